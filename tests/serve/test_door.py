"""New conversations at the door of a server: refused with a time to come again, or shown with their place."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import pytest

import jinfercept
from jinfercept.kv.disk.speed import DiskSpeed
from jinfercept.sched.door import RETRY_S, Overload
from tests.support.chat_templates import QWEN
from tests.support.engine_state import engine_of
from tests.support.gate import Gate, closed_gate
from tests.support.live_server import Running, prompt_of, running, until
from tests.support.pretend import late_at_once
from tests.support.scripted_model import Scripted, scripted_llm

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 90, "ignore_eos": True, "stream": True}
KNOWN: dict[str, Any] = {"prompt": "k" * 600, "max_tokens": 2}


@contextmanager
def crowded(served: Running, scripted: Scripted, overload: Overload) -> Iterator[Gate]:
    """More answers than run at a time, of which one waits longer than it should, until the gate is open."""
    scripted.llm.restart(overload=overload)
    scripted.follow()
    served.http.post("/v1/completions", json=KNOWN)
    with (
        pytest.MonkeyPatch.context() as patch,
        closed_gate(scripted.llm) as gate,
        served.http.stream("POST", "/v1/completions", json=LONG | {"n": 9}) as answer,
    ):
        late_at_once(patch)
        pieces = answer.iter_raw()
        assert next(pieces)
        yield gate
        gate.open()
    served.wait_idle()
    scripted.llm.restart(overload="queue")


def test_a_new_conversation_is_refused_with_a_time_to_come_again(served: Running, scripted: Scripted) -> None:
    with crowded(served, scripted, "refuse"):
        for stream in (False, True):
            refused = served.http.post("/v1/completions", json={"prompt": "c" * 600, "stream": stream})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        batch = served.http.post("/v1/completions", json=KNOWN | {"prompt": [KNOWN["prompt"], "c" * 600]})
        assert (batch.status_code, served.http.get("/live").json()["counts"]["at_door"]) == (429, 0)
        messages = [{"role": "user", "content": "c" * 600}]
        body = {"model": "scripted", "max_tokens": 5, "messages": messages}
        assert served.http.post("/v1/messages", json=body).json()["error"]["type"] == "rate_limit_error"
        assert 'refused_requests_total{code="overloaded"' in served.http.get("/metrics").text


def test_a_conversation_that_waits_too_long_is_refused_likewise(
    served: Running, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sched.door", "serve.protocols.errors"):
        monkeypatch.setattr(f"jinfercept.{module}.MOST_DOOR_S", 0.0)
    with crowded(served, scripted, "queue") as gate:
        gate.open()
        refused = served.http.post("/v1/completions", json={"prompt": "c" * 600})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) == RETRY_S
        stream = served.http.post("/v1/completions", json={"prompt": "c" * 600, "stream": True})
        assert (stream.status_code, '"code": "overloaded"' in stream.text.replace('":"', '": "')) == (200, True)


def test_a_new_conversation_that_waits_has_a_place_in_the_header_the_log_live_and_metrics(
    served: Running, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="jinfercept.serve")
    with crowded(served, scripted, "queue") as gate, ExitStack() as stack:
        body = {"prompt": "c" * 600, "max_tokens": 2, "stream": True}
        answers = [stack.enter_context(served.http.stream("POST", "/v1/completions", json=body)) for _ in range(2)]
        assert [(answer.status_code, answer.headers["x-place-at-door"]) for answer in answers] == [
            (200, "1"),
            (200, "2"),
        ]
        until(lambda: served.http.get("/live").json()["counts"]["at_door"] == 2)
        live = served.http.get("/live").json()
        assert (live["counts"]["at_door"], live["counts"]["waiting"]) == (2, 1)
        assert [row["place"] for row in live["at_door"]] == [1, 2]
        assert 'jinfercept:requests{model_name="scripted",state="at_door"} 2.0' in served.http.get("/metrics").text
        gate.open()
        assert [answer.read()[-14:] for answer in answers] == [b"data: [DONE]\n\n"] * 2
        assert 'jinfercept:door_seconds_count{model_name="scripted"} 2.0' in served.http.get("/metrics").text
    until(lambda: "place_at_door=2 " in caplog.text and "door_s=" in caplog.text)


def answer(server: Running, messages: list[dict[str, Any]]) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0})
    assert response.status_code == httpx2.codes.OK
    return response.json()


def metric(server: Running, name: str, label: str = "") -> float:
    lines = server.http.get("/metrics").text.splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith(f"jinfercept:{name}{{") and label in line]
    return float(value)


def test_a_conversation_goes_on_after_a_restart_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = DiskSpeed(1e9, 1e9, 1e-4)  # a busy machine measures a slow disk, from which nothing is worth reading
    monkeypatch.setattr("jinfercept.kv.disk.store.measure_speed", lambda *arguments: fast)
    for module in ("engine", "disk_contexts"):
        monkeypatch.setattr(f"jinfercept.engine.{module}.CLOSE_S", 60.0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of the sea. " * 20}]
    flags = {"swap_space": 0.001, "kv_disk": str(tmp_path / "kv"), "kv_disk_space": 0.01}
    num_known = 0
    for is_again in (False, True):
        with scripted_llm(1024, **flags) as make, running(make(QWEN).llm) as server:
            body = answer(server, messages)
            usage = body["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_known
            assert (metric(server, "disk_bytes_total", 'what="read"') > 0) is is_again
            assert metric(server, "disk_up") == 1
            disk = server.http.get("/live").json()["disk"]
            assert disk["works"]
            assert (disk["read_bytes"] > 0) is is_again
            assert 0 < disk["used_bytes"] <= disk["total_bytes"]
            messages += [body["choices"][0]["message"], {"role": "user", "content": "And of the sky?"}]
            num_known = (usage["total_tokens"] - 1) // 16 * 16


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
