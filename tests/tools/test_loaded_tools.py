"""Tools from files in chats, with the limits and tenants of calls; arguments are checked against the whole schema."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from jinfercept import load_tools
from jinfercept.errors import ConfigError
from jinfercept.sampling_params import SamplingParams
from jinfercept.tools import mcp_server
from jinfercept.tools.calls import CallFailed, check_of
from jinfercept.tools.tool_tables import Place
from tests.support.chat_templates import QWEN
from tests.support.scripted_model import Make
from tests.support.tool_runner import ToolRunner, is_gone, tool_runner, until

FUNCTIONS = '''
import asyncio
import os
import re
import signal
import time
from pathlib import Path
from jinfercept.engine.tool_executor import CURRENT_CALL

HOME = Path(__file__).parent

def note(event: str) -> None:
    with open(HOME / "events", "a") as file:
        file.write(f"{event}\\n")

def until(name: str) -> None:
    while not (HOME / name).exists():
        time.sleep(0.01)

def price(item: str, number: int = 1) -> str:
    """The price of an item."""
    print("this reaches no client")
    return f"{number} {item}: 23, for {CURRENT_CALL.get().request_id}"

def hold(name: str) -> str:
    """Holds."""
    note("+")
    until("go")
    note("-")
    return name

async def wait() -> str:
    """Waits."""
    note("begun")
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        note("cancelled")
        raise
    return "late"

async def exits() -> str:
    """Leaves."""
    raise SystemExit("the tool leaves")

async def block() -> str:
    """Blocks its event loop."""
    note("blocking")
    until("go")
    return "awake"

async def swallow() -> str:
    """Goes on for ever."""
    note("begun")
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pass

def stop() -> str:
    """Has nothing."""
    return next(iter(()))

def match(pattern: str) -> str:
    """Holds the interpreter's lock for years."""
    return str(re.match(pattern, 60 * "a" + "b"))

def die(way: str) -> str:
    """Ends its process."""
    if way == "beside a child" and os.fork() == 0:
        time.sleep(600)
    if way == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    os._exit(3)

def bad() -> str:
    raise ValueError("out of stock")
'''


def python(function: str, more: str = "") -> str:
    return f'[[tool]]\nkind = "python"\nfunction = "shop.py:{function}"\n{more}\n'


def events(folder: Path) -> list[str]:
    """What the functions have noted."""
    file = folder / "events"
    return file.read_text().split() if file.exists() else []


def most_held(folder: Path) -> int:
    """Calls of `hold` that ran at once, at most."""
    return max(accumulate({"+": 1, "-": -1}.get(event, 0) for event in events(folder)))


def test_a_python_file_is_loaded_as_before(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    with load_tools(tmp_path / "shop.py") as loaded:
        names = ["price", "hold", "wait", "exits", "block", "swallow", "stop", "match", "die"]
        assert [tool.name for tool in loaded.tools] == names
        assert loaded.inbox.pending() == []
    for text, problem in (
        ("x = 1", "defines no tool"),
        ("1 / 0", "line 1: ZeroDivisionError"),
        ("import os; os._exit(1)", "the process of the Python tools does not start"),
    ):
        (tmp_path / f"wrong{len(text)}{text[0]}.py").write_text(
            text
        )  # a compiled file is known by its time and its length
        with pytest.raises(ConfigError, match=problem):
            load_tools(tmp_path / f"wrong{len(text)}{text[0]}.py")


def test_functions_are_named_described_and_limited_in_toml(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    toml = python("price", 'name = "cost"\ndescription = "what it costs"\nmax_result_bytes = 64\ntimeout_s = 60')
    person = '[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks the boss"\n'
    base = '[[tool]]\nkind="python"\nfunction="os.path:basename"'
    with tool_runner(tmp_path, toml + person + python("bad") + python("wait") + base) as runner:
        names = ["cost", "boss", "bad", "wait", "basename"]
        assert [tool.name for tool in runner.loaded.tools] == names, "each stands where its table does"
        cost = runner.loaded.tools[0]
        assert cost.declaration["function"]["description"] == "what it costs"
        assert cost.parameters["required"] == ["item"]
        assert runner.ask("cost", item="lamp", number="2").text == "2 lamp: 23, for one"
        assert runner.ask("cost", item="lamp" * 40).text.endswith("... (cut: 175 bytes, 64 allowed)")
        assert "item: Missing required argument" in runner.ask("cost").text
        assert runner.ask("bad").text == "error: ValueError: out of stock"
        assert runner.ask("basename", p="a/b").text == "b"
        runner.call("r", "wait")
        until(lambda: events(tmp_path) == ["begun"])
        runner.dispatcher.cancel("r")
        until(lambda: events(tmp_path) == ["begun", "cancelled"])
    for table, problem in (
        (python("none"), "tool 1: there is no such function.*shop.py:none"),
        (python("price") * 2, "two tools have one name; got price"),
    ):
        (tmp_path / "tools.toml").write_text(table)
        with pytest.raises(ConfigError, match=problem):
            load_tools(tmp_path / "tools.toml")


def test_a_function_that_hangs_keeps_its_place_in_line(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    with tool_runner(tmp_path, python("hold", "max_concurrency = 2\ntimeout_s = 0.5")) as runner:
        for name in "abcd":
            runner.call(name, "hold", name=name)
        until(lambda: events(tmp_path) == ["+", "+"])
        runner.dispatcher.cancel("d")
        texts = [runner.result(name).text for name in "abc"]
        assert all("it took longer than 0.5 s" in text for text in texts)
        assert events(tmp_path) == ["+", "+"]
        (tmp_path / "go").touch()
        until(lambda: events(tmp_path)[2:4] == ["-", "-"])
        until(lambda: runner.ask("hold", name="e").text == "e")
        assert most_held(tmp_path) == 2


def test_what_one_tool_of_a_file_does_neither_ends_nor_delays_the_others(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    person = '[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks the boss"\n'
    names = ("price", "exits", "block", "swallow", "wait", "die")
    file = "".join(map(python, names)) + python("stop", "timeout_s = 5")
    with tool_runner(tmp_path, file + person) as runner:
        assert runner.ask("exits").text == "error: SystemExit: the tool leaves"
        assert runner.ask("stop").text == "error: StopIteration: "
        for name in ("wait", "swallow"):
            runner.call(name, name)
        until(lambda: events(tmp_path) == ["begun"] * 2)
        runner.dispatcher.cancel("wait")
        until(lambda: events(tmp_path)[2:] == ["cancelled"])
        runner.call("blocks", "block")
        until(lambda: events(tmp_path)[3:] == ["blocking"])
        runner.call("asks", "boss", question="?")
        until(lambda: bool(runner.loaded.inbox.pending()))
        runner.loaded.inbox.answer(runner.loaded.inbox.pending()[0].id, "Yes.")
        assert runner.result("asks").text == "Yes."
        assert runner.ask("price", item="lamp").text == "1 lamp: 23, for one", "sync functions have threads"
        (tmp_path / "go").touch()
        assert runner.result("blocks").text == "awake"
        for way in ("at once", "beside a child", "interrupted"):
            assert "was lost during the call" in runner.ask("die", way=way).text
            assert runner.ask("price", item="lamp").text == "1 lamp: 23, for one", "the next call finds a new process"
        runner.call("swallow", "swallow")
        until(lambda: events(tmp_path)[4:] == ["begun"])
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 8, "closing does not wait for what goes on for ever"


def test_a_process_that_stays_blocked_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "BLOCKED_S", 0.5)
    quick = FUNCTIONS + "\nfrom jinfercept.tools import python_process\npython_process.BLOCKED_S = 0.1\n"
    (tmp_path / "shop.py").write_text(quick)
    with tool_runner(
        tmp_path, "".join(python(name, "timeout_s = 0.3") for name in ("block", "match")) + python("exits")
    ) as runner:
        assert "it took longer than 0.3 s" in runner.ask("block").text
        until(lambda: runner.ask("exits").text == "error: SystemExit: the tool leaves")
        assert "it took longer than 0.3 s" in runner.ask("match", pattern="(a+)+$").text
        until(lambda: runner.ask("exits").text == "error: SystemExit: the tool leaves")


STARTS = '''
import os
import subprocess
from pathlib import Path

child = subprocess.Popen(["sleep", "600"])
Path(__file__).with_name("events").write_text(f"{os.getpid()} {child.pid}")

def price() -> str:
    """The price."""
    return "23"
'''


def test_nothing_of_the_tools_is_left_of_a_program_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(STARTS)
    program = "import os, sys; from jinfercept import load_tools; load_tools(sys.argv[1]); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", program, tmp_path / "shop.py"], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    for number in events(tmp_path):
        until(lambda number=number: is_gone(int(number)))


def test_calls_that_are_abandoned_leave_no_more_threads_than_slots(tmp_path: Path) -> None:
    few = FUNCTIONS + "\nfrom jinfercept.tools import python_process\npython_process.MAX_THREADS = 3\n"
    (tmp_path / "shop.py").write_text(few)
    with load_tools(tmp_path / "shop.py") as loaded:
        runner = ToolRunner(loaded)
        for number in range(20):
            runner.call(f"first {number}", "hold", name="a")
        until(lambda: events(tmp_path) == ["+"] * 3)
        for number in range(20):
            runner.dispatcher.cancel(f"first {number}")
        for number in range(20):
            runner.call(f"then {number}", "hold", name="b")
        for number in range(5):
            runner.call(f"async {number}", "wait")
        until(lambda: events(tmp_path).count("begun") == 5)  # those run in no thread
        assert events(tmp_path).count("+") == 3
        (tmp_path / "go").touch()
        assert {runner.result(f"then {number}").text for number in range(20)} == {"b"}
        assert most_held(tmp_path) == 3
        runner.dispatcher.close()


class Oracle(BaseHTTPRequestHandler):
    """An OpenAI-compatible server for single questions."""

    request_body: dict[str, Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.request_body = body | {"path": self.path, "key": self.headers["authorization"]}  # pyright: ignore
        answer = {"choices": [{"message": {"content": "42"}}]} if body["max_tokens"] > 1 else {"error": "too short"}
        data = json.dumps(answer).encode()
        self.send_response(200 if body["max_tokens"] != 2 else 429)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def oracle() -> Iterator[Any]:
    server = HTTPServer(("127.0.0.1", 0), Oracle)
    thread = threading.Thread(target=lambda: server.serve_forever(0.01))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_another_model_at_a_url_is_asked(oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JINFERCEPT_TEST_KEY", "s3cret")
    toml = "".join(
        f'[[tool]]\nkind = "model"\nname = "{name}"\ndescription = "knows"\nmodel = "big"\nsystem = "Be brief."\n'
        f'base_url = "http://127.0.0.1:{oracle.server_address[1]}/v1/"\napi_key_env = "JINFERCEPT_TEST_KEY"\n'
        f"max_tokens = {most}\n"
        for name, most in (("wise", 9), ("hasty", 1), ("busy", 2))
    )
    with tool_runner(tmp_path, toml) as runner:
        assert runner.ask("wise", question="Why?").text == "42"
        assert oracle.request_body == {
            "path": "/v1/chat/completions",
            "key": "Bearer s3cret",
            "model": "big",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
            "max_tokens": 9,
            "temperature": 0.0,
        }
        assert "no chat completion" in runner.ask("hasty", question="Why?").text
        assert "the model big says HTTP 429" in runner.ask("busy", question="Why?").text
        oracle.server_close()
        assert "the model big cannot be reached" in runner.ask("wise", question="Why?").text


@pytest.mark.slow
def test_another_model_in_the_process_is_asked(tmp_path: Path) -> None:
    toml = (
        '[[tool]]\nkind = "model"\nname = "small"\ndescription = "knows little"\npath = "smollm2-135m"\nmax_tokens = 8\n'
        "options = {kv_tokens = 512, max_num_seqs = 2, max_num_batched_tokens = 32}\n"
    )
    with tool_runner(tmp_path, toml) as runner:
        assert "Paris" in runner.ask("small", question="What is the capital of France?").text
        (tmp_path / "tools.toml").write_text(toml.replace("kv_tokens", "kv_token"))
        with pytest.raises(ConfigError, match="no such option; got kv_token"):
            load_tools(tmp_path / "tools.toml")


def test_a_chat_asks_a_person_and_goes_on(make_scripted: Make, tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text('[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks the boss"\n')
    scripted = make_scripted(QWEN)
    messages = [{"role": "user", "content": "May I?"}]
    call = '<tool_call>\n{"name": "boss", "arguments": {"question": "May they?"}}\n</tool_call>'
    read = "<|im_end|>\n<|im_start|>user\n<tool_response>\nYes.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    with load_tools(tmp_path / "tools.toml") as loaded:
        scripted.follow()
        [first] = scripted.llm.chat(messages, SamplingParams(max_tokens=1, temperature=0), tools=loaded.tools)
        assert first.prompt is not None
        scripted.follow(f"{first.prompt}{call}{read}You may.<|im_end|>")

        def boss() -> None:
            until(lambda: bool(loaded.inbox.pending()))
            loaded.inbox.answer(loaded.inbox.pending()[0].id, "Yes.")

        person = threading.Thread(target=boss)
        person.start()
        [output] = scripted.llm.chat(messages, SamplingParams(max_tokens=200, temperature=0), tools=loaded.tools)
        person.join()
        assert output.outputs[0].messages[-1]["content"] == "You may."

        stream = scripted.llm.stream(messages, SamplingParams(max_tokens=200, temperature=0), tools=loaded.tools)
        until(lambda: bool(loaded.inbox.pending()))
        assert loaded.inbox.pending()[0].request_id.startswith("request-")
        stream.abort()
        until(lambda: not loaded.inbox.pending())


def test_a_schema_may_name_an_older_draft() -> None:
    pair = {"type": "array", "items": [{"type": "string"}], "additionalItems": False}
    draft = "http://json-schema.org/draft-07/schema#"
    check = check_of({"$schema": draft, "type": "object", "properties": {"x": pair}}, Place(Path("tools.toml"), 1))
    check({"x": ["a"]})
    with pytest.raises(CallFailed, match="the arguments do not fit: x"):
        check({"x": ["a", "b"]})
