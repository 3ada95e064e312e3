"""How a server's process starts, drains and ends, what its log says of requests, and how much Python a step takes."""

import gc
import io
import json
import logging
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

import jinfercept
from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.models.protocol import Params
from jinfercept.serve import serve as serve_module
from jinfercept.serve.app import create_app
from jinfercept.serve.observe.log_lines import JsonFormatter, StderrHandler, TextFormatter
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.process import frozen_heap
from jinfercept.serve.serve import DrainingServer, listen
from jinfercept.serve.service import Service
from tests.support.chat_templates import QWEN
from tests.support.engine_state import engine_of, engine_state
from tests.support.gate import Gate
from tests.support.live_server import MODEL, Running, prompt_of, running, until
from tests.support.pretend import failing_counts
from tests.support.scripted_model import Make, Scripted
from tests.support.tool_server import ALL, asks, says, shop
from tests.support.tool_server import QUESTION as SHOPPING


@pytest.fixture(autouse=True)
def _spared() -> Iterator[None]:
    """What hundreds of modules and other tests have left is visited neither here nor, as before, afterwards."""
    gc.freeze()
    yield
    gc.freeze()


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def test_objects_are_frozen_while_a_server_runs_and_collected_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(serve_module, "DrainingServer", lambda *_: type("Server", (), {"serve_until_signal": serving}))

    def serving() -> None:
        frozen.append(gc.get_freeze_count())

    interval = sys.getswitchinterval()
    serve_module.serve_app(None, None, None, lambda: None)  # pyright: ignore[reportArgumentType]
    assert frozen[0] > 10_000
    assert (gc.get_freeze_count(), sys.getswitchinterval()) == (0, interval)


def test_garbage_that_is_made_while_the_heap_is_frozen_is_collected() -> None:
    with frozen_heap():
        _Cycle()
        assert gc.collect() >= 1


QUESTION: Any = [{"role": "user", "content": "Go on for ever."}]


LONG: Any = {
    "model": MODEL,
    "messages": QUESTION,
    "temperature": 0,
    "max_tokens": 1900,
    "extra_body": {"ignore_eos": True},
}


def test_answers_are_sent_without_waiting_for_acknowledgements(served: Running) -> None:
    served.http.get("/version")
    sockets = [each.transport.get_extra_info("socket") for each in served.server.server_state.connections]  # pyright: ignore
    assert sockets
    assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)


def test_a_drain_refuses_what_is_new_and_finishes_what_runs(scripted: Scripted, gate: Gate) -> None:
    scripted.follow()
    with running(scripted.llm, drain_timeout=60.0) as server:
        stream = server.client.chat.completions.create(stream=True, **(LONG | {"max_tokens": 300}))
        chunks = iter(stream)
        next(chunks)
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.http.get("/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError) as refused:
            server.client.chat.completions.create(model=MODEL, messages=QUESTION)
        assert refused.value.status_code == 503
        gate.open()
        assert list(chunks)[-1].choices[0].finish_reason == "length"


@pytest.mark.usefixtures("gate")
def test_what_a_drain_gives_up_ends_with_an_error(scripted: Scripted) -> None:
    scripted.follow()
    with running(scripted.llm, drain_timeout=0.0) as server:
        stream = server.client.chat.completions.create(stream=True, **LONG)
        chunks = iter(stream)
        next(chunks)
        server.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="the server aborted the request"):
            list(chunks)
    assert not engine_state(scripted.llm).has_work


def test_a_drain_says_how_long_it_may_take_and_a_second_signal_ends_it(
    make_scripted: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jinfercept.serve")
    scripted = make_scripted(QWEN)
    with (
        shop(scripted, tmp_path, patience_s=3600, drain_timeout=3600.0) as server,
        ThreadPoolExecutor() as threads,
    ):
        says(scripted, server, asks("hang"), SHOPPING)
        answer = threads.submit(server.chat, messages=SHOPPING, max_tokens=100, **ALL)
        until((tmp_path / "begun").exists)
        server.server.handle_exit(signal.SIGINT, None)
        until(lambda: "requests have 3600 s to end" in caplog.text)
        server.server.handle_exit(signal.SIGINT, None)
        assert answer.result(60).status_code == 503


def test_a_drain_does_not_wait_for_idle_connections(scripted: Scripted) -> None:
    with running(scripted.llm, timeout_keep_alive=3600, header_timeout=3600.0) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        silent, partial, early = (socket.create_connection((host, int(port)), timeout=60) for _ in range(3))
        partial.sendall(b"GET /health HT")
        early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert early.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert server.http.get("/health").status_code == 200
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: not server.server.server_state.connections)
        for connection in (silent, partial, early):
            connection.close()


def test_every_request_leaves_a_line(served: Running, scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    scripted.follow()
    caplog.set_level(logging.INFO, "jinfercept.serve")
    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    served.http.post("/v1/completions", json=body, headers={"x-request-id": "me!"})
    served.http.get("/health")
    until(lambda: any("me!" in record.getMessage() for record in caplog.records))
    [record] = [record for record in caplog.records if record.name == "jinfercept.serve"]
    for fields in (
        json.loads(JsonFormatter().format(record)),
        dict(part.split("=", 1) for part in record.getMessage().replace('"', "").split(" ")),
    ):
        assert (fields["request_id"], str(fields["status"]), str(fields["completion_tokens"])) == ("me!", "200", "3")
        assert {"id", "path", "prompt_tokens", "cached_tokens", "finish_reason", "seconds"} <= set(fields)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_the_line_of_a_request_that_a_shutdown_ended_says_so(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    scripted.follow()
    caplog.set_level(logging.INFO, "jinfercept.serve")
    bodies = {
        "chat/completions": {"messages": QUESTION, "max_tokens": 1900, "n": 2},
        "completions": {"prompt": ["a", "b"], "max_tokens": 1900},
        "responses": {"input": "a", "max_output_tokens": 1900},
    }
    body = {"temperature": 1, "ignore_eos": True, "stream": stream, **bodies[path]}
    with running(scripted.llm, drain_timeout=0.0) as server:
        asking = threading.Thread(target=lambda: server.http.post(f"/v1/{path}", json=body))
        asking.start()
        until(lambda: server.llm.counters.plans > 20)
        server.server.handle_exit(signal.SIGTERM, None)
        asking.join(60)
        until(lambda: any(record.name == "jinfercept.serve" for record in caplog.records))
    [record] = [record for record in caplog.records if record.name == "jinfercept.serve"]
    line = json.loads(JsonFormatter().format(record))
    assert (line["status"], line["finish_reason"]) == (200 if stream else 503, "abort")
    assert line["completion_tokens"] > 5
    assert line["prompt_tokens"] > 0


def test_logits_that_are_no_numbers_are_an_error_of_every_dialect(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    embed, layers, head = whole = scripted.runner.params
    scripted.runner.use(Params(embed, layers, {"zero": head["zero"] + np.nan}))
    message = {"role": "user", "content": "Hi"}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [message], "n": 2, "temperature": 1},
        "completions": {"prompt": ["a", "b"], "logprobs": 1},
        "responses": {"input": "a"},
        "messages": {"messages": [message], "max_tokens": 5},
    }
    for (path, body), stream in product(bodies.items(), (False, True)):
        answer = served.http.post(f"/v1/{path}", json={"model": MODEL, "stream": stream, **body})
        assert "the model's logits are NaN or infinite" in answer.text, path
        assert answer.status_code == (200 if stream else 500)
    scripted.runner.use(whole)
    assert served.chat().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_cannot_go_on_is_an_engine_error_and_no_good_health(scripted: Scripted, stream: bool) -> None:
    scripted.follow()
    body = {"messages": QUESTION, "max_tokens": 9, "stream": stream}
    with failing_counts():
        scripted.llm.restart()
        engine_state(scripted.llm)  # an engine that nothing is asked of counts nothing
    with running(scripted.llm) as server:
        for _ in range(2):  # while it fails, and afterwards
            answer = server.http.post("/v1/chat/completions", json=body)
            assert '"code":"engine_error"' in answer.text
            assert "ArithmeticError: cannot count" in answer.text
        assert server.http.get("/health").status_code == 503
    scripted.llm.restart()


HOLDS = """
import threading

threading.Thread(target=threading.Event().wait).start()

def price(item: str) -> str:
    '''A price.'''
    return "23"
"""


def test_a_process_that_does_not_end_by_itself_is_ended_at_its_limit(tmp_path: Path) -> None:
    code = (
        "import threading, time; from jinfercept.serve.process import end_process_by;"
        "threading.Thread(target=threading.Event().wait, name='held').start(); end_process_by(time.monotonic() + 0.2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert "held" in done.stderr


def test_the_end_of_a_process_destroys_no_coroutine_that_would_go_on() -> None:
    code = """
        import asyncio, atexit
        from jinfercept.serve.process import end_process

        async def holds():
            while True:
                try:
                    await asyncio.sleep(100)
                except BaseException:
                    pass

        loop = asyncio.new_event_loop()
        task = loop.create_task(holds())
        loop.call_later(0.01, loop.stop)
        loop.run_forever()
        atexit.register(print, "the last words")
        end_process()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "the last words\n")


@pytest.mark.slow
def test_the_command_serves_prints_where_and_drains_on_sigterm(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "llama_gqa"
    flags = ["--port", "0", "--kv-tokens", "512", "--max-num-batched-tokens", "32", "--profile", "paper-gptj-6b-a100"]
    (tmp_path / "holds.py").write_text(HOLDS)
    flags += ["--tools", str(tmp_path / "holds.py"), "--drain-timeout", "4"]
    command = [sys.executable, "-m", "jinfercept", "serve", str(golden), *flags, "--served-model-name", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = client.completions.create(
                model="tiny",
                prompt=[1, 2, 3],
                max_tokens=60,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            chunks = iter(stream)
            next(chunks)
            process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert process.wait(60) == 0
        assert time.monotonic() - began_s < 15, "a tool that does not end was waited for"


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "no-such-model", "--port", str(taken.getsockname()[1])]) == 2
    assert "the address cannot be used" in capsys.readouterr().err


def test_without_its_packages_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from jinfercept.cli.main import main; sys.exit(main(['serve', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'jinfercept[serve]'" in done.stderr


def test_options_that_cannot_work_are_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--tool-call-parser", "xml"], "one of mistral, qwen3_coder, "),
        (["--reasoning-parser", "xml"], "one of auto, none"),
        (["--chat-template", "no-such-file"], "cannot be read"),
        (["--port", "70000"], "65535"),
        (["--api-key", ""], "empty"),
        (["--allowed-origins", "[oops"], "not JSON"),
        (["--max-queue-len", "0"], "at least 1"),
        (["--max-prompt-chars", "0"], "at least 1"),
    ):
        assert main(["serve", "no-such-model", *flags]) == 2
        assert message in capsys.readouterr().err


def test_a_unix_socket_is_shared_with_nobody_and_gone_afterwards(scripted: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    options = ServerOptions(uds=str(path), served_model_name=(MODEL,))
    with pytest.raises(ConfigError, match="the address cannot be used"):
        listen(ServerOptions(uds=str(tmp_path / "no" / "socket")))
    listen(options)[0].close()  # as one that was killed leaves it
    listener, url = listen(options)
    service = Service(scripted.llm, MODEL, options)
    server = DrainingServer(create_app(service), service, listener)
    thread = threading.Thread(target=server.serve_until_signal)
    thread.start()
    until(lambda: server.started)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://x") as http:
        assert http.get("/ready").json() == {"status": "ready"}
        with pytest.raises(ConfigError, match="a server listens there"):
            listen(options)
        assert http.get("/ready").json() == {"status": "ready"}
    server.handle_exit(signal.SIGTERM, None)
    thread.join()
    assert (url, path.exists()) == (f"unix:{path}", False)


def test_a_chat_template_that_does_not_work_is_found_before_anybody_asks(scripted: Scripted, tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("bad{{")
    service = Service(scripted.llm, MODEL, ServerOptions(chat_template=str(template)))
    with pytest.raises(ConfigError, match="the chat template does not work"):
        service.check_template()
    Service(scripted.llm, MODEL, ServerOptions()).check_template()


def test_the_log_goes_on_when_standard_error_is_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    StderrHandler().handle(logging.LogRecord("a", logging.INFO, "", 0, "still here", (), None))
    monkeypatch.undo()
    assert "still here" in capfd.readouterr().err


def test_no_text_of_a_client_makes_a_line_of_its_own_in_the_log() -> None:
    record = logging.LogRecord(
        "jinfercept", logging.INFO, "", 0, "tool %s", ("x\n2026 INFO key=admin\x1b[2J\u2028é",), None
    )
    line = TextFormatter().format(record)
    assert line.endswith(r" INFO tool x\n2026 INFO key=admin\x1b[2J\u2028é")
    assert line.isprintable()


PACKAGE = str(Path(jinfercept.__file__).parent)


MESSAGES = [{"role": "user", "content": "Count"}]


MOST_CALLS = 150


MOST_FILES = 60


def test_a_decode_step_of_a_streamed_chat_makes_few_calls_in_few_files(
    scripted: Scripted, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.follow(prompt_of(scripted, MESSAGES) + "one two three " * 30 + "<|im_end|>")
    monkeypatch.setattr(engine_of(served.llm), "_check", False)
    _called(served, 64)
    few, many = _called(served, 64), _called(served, 192)
    calls = {place: (count - few[place]) / 128 for place, count in many.items()}
    each = {place for place, per_step in calls.items() if per_step > 0.5}
    assert sum(calls.values()) <= MOST_CALLS, sorted(((n, *place) for place, n in calls.items()), reverse=True)[:40]
    assert len({file for file, _ in each}) <= MOST_FILES


def _called(served: Running, max_tokens: int) -> Counter[tuple[str, str]]:
    """Calls of the package's functions while a chat of so many tokens is streamed, by file and name."""
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    body = {"messages": MESSAGES, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    threading.setprofile_all_threads(note)
    try:
        with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            num_chunks = sum(line.startswith("data: ") for line in reply.iter_lines())
    finally:
        threading.setprofile_all_threads(None)
        sys.setprofile(None)
    assert num_chunks >= max_tokens
    served.wait_idle()
    return Counter(entered)
