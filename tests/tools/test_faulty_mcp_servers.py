"""MCP servers whose sessions end, whose calls fail in all ways, and whose declarations and results fit no schema."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from jinfercept.errors import ConfigError
from jinfercept.serve.server_tools import open_server_tools
from jinfercept.tools.load import LoadedTools, load_tools
from tests.support.tool_runner import ToolRunner, tool_runner, until

SCHEMA = {"type": "object", "properties": {}}
WELCOME = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}}


class Http(NamedTuple):
    """A response as it is. `length` of more than the text: the connection is closed before its end; None: without a byte.

    `stays_open`: the client has to close it.
    """

    status: int = 200
    text: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012
    length: int | None = 0
    stays_open: bool = False


def refused(code: int, message: str = "no", status: int = 200) -> Http:
    """A JSON-RPC error."""
    return Http(status, json.dumps({"jsonrpc": "2.0", "id": 0, "error": {"code": code, "message": message}}))


STREAM = {"content-type": "text/event-stream"}
CLOSED = Http(length=None)


class FaultyServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        tools: pages of declarations, and the cursor behind each.
        welcome: answer to `initialize`: a result, or a response.
        answers: to calls, by the name of the tool: a result, or a response.
        no_session: response to a request of a session that has ended.
        sessions: those that are open.
        opened: how many sessions were opened.
        ran: names of the tools that ran.
        left: names of those whose connection the client closed.
        cancelled: how many calls were cancelled.
        gate: the tool `hang` answers when it is set.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.tools: dict[str | None, tuple[list[Any], Any]] = {}
        self.welcome: Any = WELCOME
        self.answers: dict[str, Any] = {}
        self.no_session = Http(404)
        self.sessions: set[str] = set()
        self.opened = 0
        self.ran: list[str] = []
        self.left: list[str] = []
        self.cancelled = 0
        self.gate = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave."""

    def declare(self, **answers: Any) -> None:
        """Have tools of these names with these answers."""
        self.answers = answers
        self.tools = {None: ([{"name": name, "inputSchema": SCHEMA} for name in answers], None)}

    def toml(self, name: str = "shop", more: str = "") -> str:
        return (
            f'[[tool]]\nkind = "mcp"\nname = "{name}"\nurl = "http://127.0.0.1:{self.server_address[1]}/"\n'
            f"timeout_s = 60\n{more}\n"
        )


class FaultyHandler(BaseHTTPRequestHandler):
    server: FaultyServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        server, message = self.server, json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, params = message["method"], message.get("params", {})
        session = self.headers.get("mcp-session-id")
        if method == "initialize":
            server.opened += 1
            session = f"session {server.opened}"
            server.sessions.add(session)
            self.reply(message, server.welcome, {"mcp-session-id": session})
        elif session is None:
            self.reply(message, Http(400))
        elif session not in server.sessions:
            self.reply(message, server.no_session)
        elif method == "tools/list":
            tools, cursor = server.tools[params.get("cursor")]
            self.reply(message, {"tools": tools} | ({} if cursor is None else {"nextCursor": cursor}))
        elif method == "tools/call":
            server.ran.append(params["name"])
            if params["name"] == "hang":
                assert server.gate.wait(60)
            answer = server.answers[params["name"]]
            stays_open = isinstance(answer, Http) and answer.stays_open
            with suppress(OSError) if stays_open else nullcontext():
                self.reply(message, answer)
                if stays_open:
                    self.rfile.read(1)
            server.left += [params["name"]] * stays_open
        else:
            server.cancelled += method == "notifications/cancelled"
            self.reply(message, {} if "id" in message else Http(202))

    def do_GET(self) -> None:
        self.reply({}, Http(405))

    do_DELETE = do_GET

    def reply(self, message: dict[str, Any], answer: Any, headers: dict[str, str] | None = None) -> None:
        if not isinstance(answer, Http):
            answer = Http(text=json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}))
        if answer.length is None:
            self.close_connection = True
            return
        body = answer.text.replace('"id": 0', f'"id": {json.dumps(message.get("id"))}').encode()
        self.send_response(answer.status)
        for name, value in ({"content-type": "application/json"} | answer.headers | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body) + answer.length))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection |= answer.length > 0

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def faulty_server() -> Iterator[FaultyServer]:
    with FaultyServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.gate.set()
        server.shutdown()


FINE = {"content": [{"type": "text", "text": "fine"}]}


@pytest.fixture
def shop() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


NO_SESSION = {
    "the protocol's status alone": Http(404),
    "the Python SDK": refused(-32600, "Session not found", 404),
    "the TypeScript SDK": refused(-32001, "Session not found", 404),
    "a gateway": Http(404, "<h1>Not Found</h1>", {"content-type": "text/html"}),
    "an unknown method": refused(-32601, "Method not found", 404),
    "examples of the TypeScript SDK": refused(-32000, "Bad Request: No valid session ID provided", 400),
    "gone": Http(410),
}


def test_calls_that_find_their_session_ended_run_once_in_one_new_session(shop: FaultyServer, tmp_path: Path) -> None:
    shop.declare(price=FINE, hang=FINE)
    with tool_runner(tmp_path, shop.toml()) as runner:
        for number, (name, shop.no_session) in enumerate(NO_SESSION.items(), 2):
            shop.ran.clear()
            shop.gate.clear()
            runner.call("hang", "hang")
            until(lambda: shop.ran == ["hang"])
            shop.sessions.clear()
            for call in "abcd":
                runner.call(call, "price")
            assert [runner.result(call).text for call in "abcd"] == ["fine"] * 4, name
            assert shop.opened == number, name
            shop.gate.set()
            assert runner.result("hang").text == "fine", "a call that runs in the old session ends there"
            assert shop.ran == ["hang", *["price"] * 4], name


def test_a_session_that_cannot_be_opened_again_fails_the_call_at_once(shop: FaultyServer, tmp_path: Path) -> None:
    shop.declare(price=FINE)
    with tool_runner(tmp_path, shop.toml()) as runner:
        assert runner.ask("price").text == "fine"
        shop.sessions = shop.tools = {}  # pyright: ignore[reportAttributeAccessIssue] # no new one can be used
        assert "MCP server shop is not there" in runner.ask("price").text


FAULTS: dict[str, tuple[Http, str]] = {
    **{f"code{-code}": (refused(code, "not today"), "not today") for code in (-1, 404, *range(-32003, -31999))},
    **{f"parsed{code}": (refused(code, "not today"), "not today") for code in (-32600, -32601, -32602, -32603, -32700)},
    "in_a_stream": (Http(200, f"data: {refused(-32000, 'not today').text}\n\n", STREAM), "not today"),
    "terminated": (refused(-32600, "Session terminated"), "Session terminated"),
    "with_status": (refused(-32602, "not today", 400), "HTTP 400 Bad Request: "),
    "unauthorized": (Http(401, "who are you"), "MCP server shop answered HTTP 401 Unauthorized: who are you"),
    "often": (
        Http(429, "slow\n down", {"Retry-After": "17"}),
        "HTTP 429 Too Many Requests: slow down",
    ),
    "broken": (Http(500, "<p>oh</p>", {"content-type": "text/html"}), "HTTP 500 Internal Server Error: <p>oh</p>"),
    "no_answer": (Http(200, "", STREAM), "ended without a response"),
    "half_a_stream": (Http(200, "data: {", STREAM, 100), "ended without a response"),
    "half_an_answer": (Http(200, "{", {}, 100), "MCP server shop did not answer"),
    "closed": (CLOSED, "MCP server shop did not answer"),
    "no_json": (Http(200, "{"), "Failed to parse"),
    "accepted": (Http(202), "202"),
    "long": (Http(200, " " * (5 << 20)), "the answer is longer than 4194304 bytes"),
    "long_event": (Http(200, "data: " + "x" * (5 << 20), STREAM), "exceeded the 4194304 byte limit"),
    "no_result": (Http(200, '{"jsonrpc": "2.0", "id": 0, "result": {}}'), "MCP server shop sent no result of a tool"),
}


def test_the_fault_of_a_call_is_its_own(shop: FaultyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shop.declare(hang=FINE, **{name: answer for name, (answer, _) in FAULTS.items()})
    with tool_runner(tmp_path, shop.toml()) as runner:
        runner.call("waits", "hang")
        until(lambda: shop.ran == ["hang"])
        for name, (_, text) in FAULTS.items():
            result = runner.ask(name)
            assert (result.status, text in result.text) == ("error", True), f"{name}: {result.text}"
        shop.gate.set()
        assert runner.result("waits").text == "fine"
    assert shop.opened == 1, "the connection stays"
    assert shop.ran == ["hang", *FAULTS], "no call is repeated"
    for words in ("HTTP 401", "HTTP 429 Too Many Requests", "HTTP 500"):
        assert any("MCP server shop" in line and words in line for line in caplog.messages), words


HELD = {
    "silent": Http(length=None, stays_open=True),
    "half": Http(200, "{", {}, 100, stays_open=True),
    "endless": Http(200, " " * (3 << 20), {}, 1 << 40, stays_open=True),
    "refuses": Http(400, "{", {}, 100, stays_open=True),
    "streams": Http(200, "data: {", STREAM, 100, stays_open=True),
    "notes": Http(200, "id: 1\ndata: \n\n", STREAM, 100, stays_open=True),
}


def test_the_requests_of_calls_that_are_cancelled_are_closed(shop: FaultyServer, tmp_path: Path) -> None:
    shop.declare(price=FINE, **HELD)
    with tool_runner(tmp_path, shop.toml()) as runner:
        for name in HELD:
            runner.call(name, name)
        until(lambda: len(shop.ran) == len(HELD))
        for name in HELD:
            runner.dispatcher.cancel(name)
        until(lambda: sorted(shop.left) == sorted(HELD))
        until(lambda: shop.cancelled == len(HELD))
        assert runner.ask("price").text == "fine"
    assert shop.opened == 1, "the connection stays"


STDIO = r"""
import json, sys
tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("count", "learn", "hang", *json.loads(sys.argv[1]))]
answers = json.loads(sys.argv[1])
number, waiting = 0, []

def send(**message):
    print(json.dumps({"jsonrpc": "2.0"} | message), flush=True)

for line in sys.stdin:
    message = json.loads(line)
    name = message.get("params", {}).get("name")
    if message["method"] == "initialize":
        about = {"name": "a", "version": "1"}
        capabilities = {"tools": {"listChanged": True}}
        send(id=message["id"], result={"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": about})
    elif message["method"] == "tools/list":
        send(id=message["id"], result={"tools": tools})
    elif name == "hang":
        waiting.append(message["id"])
    elif name in ("count", "learn"):
        number += 1
        if name == "learn":
            tools += [{"name": "mute"}]
            tools += [{"name": name, "inputSchema": {"type": "object"}} for name in ("half\ud800", "fly")]
            send(method="notifications/tools/list_changed")
        for id in [*waiting, message["id"]]:
            send(id=id, result={"content": [{"type": "text", "text": str(number)}]})
    elif name is not None:
        sys.stdout.buffer.write(b"\xff no UTF-8\n")
        print(answers[name].replace("ID", str(message["id"])), flush=True)
    elif "id" in message:
        send(id=message["id"], error={"code": -32601, "message": "unknown"})
"""
WRITTEN = {
    "closed": '{"jsonrpc": "2.0", "id": ID, "error": {"code": -32000, "message": "Connection closed"}}',
    "late": '{"jsonrpc": "2.0", "id": ID, "error": {"code": -32001, "message": "late"}}',
}


def test_a_process_outlives_the_faults_of_its_calls_and_malformed_tools(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "server.py").write_text(STDIO)
    arguments = json.dumps([str(tmp_path / "server.py"), json.dumps(WRITTEN)])
    toml = f'[[tool]]\nkind = "mcp"\nname = "shop"\ncommand = "{sys.executable}"\nargs = {arguments}\ntimeout_s = 60\n'
    with tool_runner(tmp_path, toml) as runner:
        assert runner.ask("count").text == "1"
        runner.call("waits", "hang")
        for name in WRITTEN:
            result = runner.ask(name)
            assert (result.status, "lost" in result.text) == ("error", False), f"{name}: {result.text}"
        assert runner.ask("learn").text == "2", "it is the same process"
        assert runner.result("waits").text == "2"
        until(lambda: "fly" in [tool.name for tool in runner.loaded.tools])
        assert {"mute", "half_"} & {tool.name for tool in runner.loaded.tools} == {"half_"}
    assert any("MCP server shop" in line and "'mute'" in line for line in caplog.messages)


MALFORMED = {
    "bare": {},
    "empty": {"inputSchema": {}},
    "text": {"inputSchema": "object"},
    "typeless": {"inputSchema": {"properties": {}}},
    "properties": {"inputSchema": {"type": "object", "properties": 5}},
    "property": {"inputSchema": {"type": "object", "properties": {"a": "string"}}},
    "required": {"inputSchema": {"type": "object", "required": "a"}},
    "described": {"inputSchema": SCHEMA, "description": 5},
}
NAMELESS = [
    {"inputSchema": SCHEMA},
    {"name": "", "inputSchema": SCHEMA},
    {"name": 5, "inputSchema": SCHEMA},
    "tool",
    None,
]


def test_a_malformed_declaration_leaves_out_that_tool(
    shop: FaultyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nulls = {"type": "object", "properties": None, "required": None}
    odd: Any = {"annotations": 5, "title": [], "outputSchema": 5, "_meta": "x", "description": None}
    served = [{"name": "price", "inputSchema": nulls} | odd, {"name": "last", "inputSchema": SCHEMA}]
    malformed = [{"name": name} | fields for name, fields in MALFORMED.items()]
    shop.tools = {None: ([served[0], *malformed, *NAMELESS, served[1]], 5)}
    with load_tools(_file(tmp_path, shop.toml())) as loaded:
        assert [tool.name for tool in loaded.tools] == ["price", "last"]
        assert loaded.tools[0].parameters == {"type": "object"}
    lines = [line for line in caplog.messages if "MCP server shop" in line and "is left out" in line]
    assert len(lines) == len(MALFORMED) + len(NAMELESS)
    for name, line in zip(MALFORMED, lines, strict=False):
        assert f"tool {name!r}" in line
        assert "correct its declaration" in line
    assert "inputSchema: Field required" in lines[0]


@pytest.mark.parametrize(
    "cursors", [["", ""], ["a", "a"], ["a", "b", "a"], None], ids=["empty", "same", "cycle", "endless"]
)
def test_a_list_ends_whatever_its_cursors_are(
    shop: FaultyServer, tmp_path: Path, cursors: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Pages(dict[str | None, tuple[list[Any], Any]]):
        number = count()
        listed = 0

        def __missing__(self, cursor: str | None) -> tuple[list[Any], Any]:
            self.listed += 1
            follows = f"page {next(self.number)}" if cursors is None else cursors[self.listed - 1]
            return [{"name": f"tool{self.listed}", "inputSchema": SCHEMA}], follows

    shop.tools = pages = Pages()
    with load_tools(_file(tmp_path, shop.toml())) as loaded:
        most = 100 if cursors is None else 1 + len({*cursors} - {""})
        assert pages.listed == most
        assert [tool.name for tool in loaded.tools] == [f"tool{number}" for number in range(1, most + 1)]
    assert any("page 100" in line for line in caplog.messages) == (cursors is None)


def test_tools_of_equal_names_have_different_ones_and_run_themselves(shop: FaultyServer, tmp_path: Path) -> None:
    long = "n" * 70
    names = ["a.b", "a_b", "a b", "price", f"{long}1", f"{long}2", "boss"]
    offered = ["a_b_3", "a_b", "a_b_2", "price", "n" * 64, "n" * 62 + "_2", "boss_2"]
    person = '[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks"\n'
    with faulty_server() as other, faulty_server() as third:
        for server in (shop, other, third):
            listed = names if server is shop else ["price"]
            server.declare(
                **{
                    name: {"content": [{"type": "text", "text": f"{name} of {server.server_address[1]}"}]}
                    for name in listed
                }
            )
        toml = shop.toml("first") + other.toml("second") + person
        with tool_runner(tmp_path, toml) as runner:
            assert [tool.name for tool in runner.loaded.tools] == [*offered, "price_2", "boss"]
            for name, called in zip(names, offered, strict=True):
                assert runner.ask(called).text == f"{name} of {shop.server_address[1]}"
            assert runner.ask("price_2").text == f"price of {other.server_address[1]}"
            shop.tools[None][0].reverse()
            with load_tools(tmp_path / "tools.toml") as again:
                assert {tool.name for tool in again.tools} == {tool.name for tool in runner.loaded.tools}
                assert [tool.name for tool in again.tools][:7] == offered[::-1]
        third_file = tmp_path / "third.toml"
        third_file.write_text(third.toml())
        with open_server_tools([str(tmp_path / "tools.toml"), str(third_file)]) as tools:
            assert [*tools.tools][-3:] == ["price_2", "boss", "price_3"]
            runner = ToolRunner(cast(LoadedTools, SimpleNamespace(tools=tools.tools.values())))
            assert runner.ask("price_3").text == f"price of {third.server_address[1]}"
            runner.dispatcher.close()


TEXT = {"type": "text", "text": "see"}
PHOTO = {"type": "image", "data": "YWJj", "mimeType": "image/png"}
LINK = {"type": "resource_link", "uri": "file:///a", "name": "a"}
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "parts": ({"content": [TEXT, PHOTO, LINK]}, "see\n(image/png, 3 bytes)\n(file:///a)"),
    "inside": ({"content": [{"type": "resource", "resource": {"uri": "file:///b", "text": "inside"}}]}, "inside"),
    "link": ({"content": [LINK | {"description": "the list"}]}, "(file:///a) the list"),
    "unknown": ({"content": [TEXT, {"type": "hologram", "rays": 3}]}, "see\n[unsupported content: hologram]"),
    "broken": ({"content": [{"type": "image"}, TEXT]}, "[unsupported content: image]\nsee"),
    "bare": ({"content": "see"}, "see"),
    "structured": ({"structuredContent": {"a": "ä"}}, '{"a": "ä"}'),
    "both": ({"content": [TEXT], "structuredContent": {"a": 1}}, "see"),
    "empty_text": ({"content": [{"type": "text", "text": ""}], "structuredContent": {"a": 1}}, '{"a": 1}'),
    "meta": ({"content": [TEXT | {"annotations": 5, "_meta": 5}], "_meta": 5, "isError": None}, "see"),
    "nothing": ({"content": []}, ""),
}


def test_a_result_is_read_for_what_is_there(shop: FaultyServer, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    shop.declare(
        refuses={"content": [TEXT], "isError": True}, **{name: result for name, (result, _) in RESULTS.items()}
    )
    for tool in shop.tools[None][0]:
        tool["outputSchema"] = schema
    with tool_runner(tmp_path, shop.toml()) as runner:
        for name, (_, text) in RESULTS.items():
            result = runner.ask(name)
            assert (result.status, result.text) == ("ok" if text else "empty", text or "(nothing)"), name
        assert (runner.ask("refuses").status, runner.ask("refuses").text[-3:]) == ("error", "see")


def test_an_error_status_at_the_start_is_named(shop: FaultyServer, tmp_path: Path) -> None:
    shop.welcome = Http(401, "who are you", {"Retry-After": "9"})
    with pytest.raises(ConfigError, match="HTTP 401 Unauthorized: who are you"):
        load_tools(_file(tmp_path, shop.toml()))


def _file(folder: Path, toml: str) -> Path:
    file = folder / "tools.toml"
    file.write_text(toml)
    return file
