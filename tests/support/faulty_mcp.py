"""An MCP server over HTTP, written by hand, whose sessions end and whose declarations and answers are whatever a test wants."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

SCHEMA = {"type": "object", "properties": {}}
WELCOME = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}}


class Http(NamedTuple):
    """A response as it is. `length` of more than the text: the connection is closed before its end; None: without a byte.

    `held`: the client has to close it.
    """

    status: int = 200
    text: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012
    length: int | None = 0
    held: bool = False


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
            held = isinstance(answer, Http) and answer.held
            with suppress(OSError) if held else nullcontext():
                self.reply(message, answer)
                if held:
                    self.rfile.read(1)
            server.left += [params["name"]] * held
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
