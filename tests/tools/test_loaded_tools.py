"""Tools from files in chats: Python functions with limits, another model at a URL, and the tenants of calls."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from jinfercept import load_tools
from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.intercept.current_call import CURRENT_CALL
from jinfercept.sampling_params import SamplingParams
from tests.support.chat_templates import QWEN
from tests.support.scripted_model import Make
from tests.support.tool_runner import ToolRunner, tool_runner, until

FUNCTIONS = '''
import asyncio
import threading
import time
from jinfercept.errors import ConfigError
from jinfercept.intercept.current_call import CURRENT_CALL

running, most, begun, cancelled = 0, 0, 0, 0
go = threading.Event()

def price(item: str, number: int = 1) -> str:
    """The price of an item."""
    return f"{number} {item}: 23, for {CURRENT_CALL.get().request_id}"

def hold(name: str) -> str:
    """Holds."""
    global running, most
    running += 1
    most = max(most, running)
    go.wait(60)
    running -= 1
    return name

async def wait() -> str:
    """Waits."""
    global begun, cancelled
    begun += 1
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        cancelled += 1
        raise

async def exits() -> str:
    """Leaves."""
    raise SystemExit("the tool leaves")

async def block() -> str:
    """Blocks its event loop."""
    go.wait(20)
    return "awake"

async def swallow() -> str:
    """Goes on for ever."""
    global begun
    begun += 1
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pass

def stop() -> str:
    """Has nothing."""
    return next(iter(()))

def bad() -> str:
    raise ValueError("out of stock")
'''


def python(function: str, more: str = "") -> str:
    return f'[[tool]]\nkind = "python"\nfunction = "shop.py:{function}"\n{more}\n'


def shop() -> dict[str, Any]:
    """The module of the loaded functions."""
    return vars(sys.modules["jinfercept_tools_shop"])


def test_a_python_file_is_loaded_as_before(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    with load_tools(tmp_path / "shop.py") as loaded:
        names = ["price", "hold", "wait", "exits", "block", "swallow", "stop"]
        assert [tool.name for tool in loaded.tools] == names
        assert loaded.inbox.pending() == []


def test_functions_are_named_described_and_limited_in_toml(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    toml = python("price", 'name = "cost"\ndescription = "what it costs"\nmax_result_bytes = 64\ntimeout_s = 60')
    with tool_runner(
        tmp_path, toml + python("bad") + python("wait") + '[[tool]]\nkind="python"\nfunction="os.path:basename"'
    ) as runner:
        cost, _, _, base = runner.loaded.tools
        assert (cost.name, cost.declaration["function"]["description"]) == ("cost", "what it costs")
        assert cost.parameters["required"] == ["item"]
        assert runner.ask("cost", item="lamp", number="2").text == "2 lamp: 23, for one"
        assert runner.ask("cost", item="lamp" * 40).text.endswith("... (cut: 175 bytes, 64 allowed)")
        assert "item: Missing required argument" in runner.ask("cost").text
        assert runner.ask("bad").text == "error: ValueError: out of stock"
        assert runner.ask(base.name, p="a/b").text == "b"
        runner.call("r", "wait")
        until(lambda: shop()["begun"] == 1)
        runner.dispatcher.cancel("r")
        until(lambda: shop()["cancelled"] == 1)
    assert CURRENT_CALL.get().request_id == ""


def test_a_function_that_hangs_keeps_its_place_in_line(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    with tool_runner(tmp_path, python("hold", "max_concurrency = 2\ntimeout_s = 0.3")) as runner:
        for name in "abcd":
            runner.call(name, "hold", name=name)
        until(lambda: shop()["running"] == 2)
        runner.dispatcher.cancel("d")
        texts = [runner.result(name).text for name in "abc"]
        assert all("it took longer than 0.3 s" in text for text in texts)
        assert (shop()["running"], shop()["most"]) == (2, 2)
        shop()["go"].set()
        until(lambda: shop()["running"] == 0)
        until(lambda: runner.ask("hold", name="e").text == "e")
        assert shop()["most"] == 2


def test_what_one_tool_of_a_file_does_neither_ends_nor_delays_the_others(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    person = '[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks the boss"\n'
    file = "".join(map(python, ("price", "exits", "block", "swallow", "wait"))) + python("stop", "timeout_s = 5")
    with tool_runner(tmp_path, file + person) as runner:
        assert runner.ask("exits").text == "error: SystemExit: the tool leaves"
        assert runner.ask("stop").text == "error: StopIteration: "
        runner.call("waits", "wait")
        until(lambda: shop()["begun"] == 1)
        runner.call("blocks", "block")
        runner.call("asks", "boss", question="?")
        until(lambda: bool(runner.loaded.inbox.pending()))
        runner.loaded.inbox.answer(runner.loaded.inbox.pending()[0].id, "Yes.")
        assert runner.result("asks").text == "Yes."
        assert runner.ask("price", item="lamp").text == "1 lamp: 23, for one"
        runner.call("swallows", "swallow")
        until(lambda: shop()["begun"] == 2)  # on a fresh loop
        shop()["go"].set()
        assert runner.result("blocks").text == "awake"
        runner.dispatcher.cancel("waits")
        until(lambda: shop()["cancelled"] == 1)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 8, "closing does not wait for what goes on for ever"


@pytest.mark.parametrize("file", ["shop.py", "tools.toml"])
def test_calls_that_are_abandoned_leave_no_more_threads_than_slots(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jinfercept.tools.python_tool.MAX_THREADS", 3)
    (tmp_path / "shop.py").write_text(FUNCTIONS)
    (tmp_path / "tools.toml").write_text(python("hold") + python("wait"))
    with load_tools(tmp_path / file) as loaded:
        runner = ToolRunner(loaded)
        for number in range(20):
            runner.call(f"first {number}", "hold", name="a")
        until(lambda: shop()["running"] == 3)
        for number in range(20):
            runner.dispatcher.cancel(f"first {number}")
        for number in range(20):
            runner.call(f"then {number}", "hold", name="b")
        for number in range(5):
            runner.call(f"async {number}", "wait")
        until(lambda: shop()["begun"] == 5)  # those run in no thread
        assert (shop()["running"], shop()["most"]) == (3, 3)
        shop()["go"].set()
        assert {runner.result(f"then {number}").text for number in range(20)} == {"b"}
        assert shop()["most"] == 3
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


def test_run_refuses_a_bad_file_of_tools_before_it_loads_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools.toml").write_text('[[tool]]\nkind = "persan"\n')
    assert main(["run", "no-such-model", "--tools", str(tmp_path / "tools.toml")]) == 2
    assert "tool 1: kind says what it is; got 'persan'" in capsys.readouterr().err
