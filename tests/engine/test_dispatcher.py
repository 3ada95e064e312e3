"""Every call has exactly one result, however its endpoint behaves and beside others of a turn; the engine is never blocked."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable

import pytest

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.dispatcher import Dispatcher, lasted_s
from jinfercept.engine.tool_executor import CURRENT_CALL
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from tests.support.fake_engine import POLICIES, make_engine, run_all, sampled_names

SOON_S = 0.05
LONG_S = 60.0
THE_END = threading.Event()
"""Never set: what hangs waits for it."""


class Service:
    """A dispatcher, and the waiting that an engine does."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.dispatcher = Dispatcher(self.wake.set)

    def call(self, request_id: str, function: Callable[[str], object], timeout_s: float = LONG_S) -> None:
        tools = {"tool": Tool(function, name="tool", timeout_s=timeout_s)}
        self.dispatcher.call(request_id, (Call("tool", "x"),), tools)

    def results(self, number: int) -> dict[str, tuple[Result, ...]]:
        """The next `number` interceptions that are over."""
        done: dict[str, tuple[Result, ...]] = {}
        give_up_s = time.monotonic() + LONG_S
        while len(done) < number:
            assert time.monotonic() < give_up_s, f"only {len(done)} of {number} returned"
            done.update(self.dispatcher.poll())
            if len(done) < number:
                deadline = self.dispatcher.next_s()
                self.wake.wait(max(0.0, min(1.0, deadline - time.monotonic())) if deadline is not None else 1.0)
                self.wake.clear()
        return done


def hangs(arguments: str) -> str:
    THE_END.wait(LONG_S)
    return "too late"


def ask(function: Callable[[str], object], timeout_s: float = LONG_S) -> Result:
    """The result of one call."""
    service = Service()
    service.call("r", function, timeout_s)
    (result,) = service.results(1)["r"]
    service.dispatcher.close()
    return result


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Deadly(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even an error message")


def fails(arguments: str) -> str:
    raise ValueError(f"cannot compute {arguments}")


def exits(arguments: str) -> str:
    sys.exit("the tool leaves")


def dies(arguments: str) -> str:
    raise Deadly


def is_late(arguments: str) -> str:
    THE_END.wait(100 * SOON_S)
    return "too late"


async def exits_async(arguments: str) -> str:
    sys.exit("the tool leaves")


async def hangs_async(arguments: str) -> str:
    await asyncio.sleep(LONG_S)
    return "too late"


async def answers(arguments: str) -> str:
    await asyncio.sleep(0)
    return f"async {arguments}"


@pytest.mark.parametrize(
    ("value", "text", "status"),
    [
        (None, "(nothing)", "empty"),
        ("", "(nothing)", "empty"),
        (" \n", "(nothing)", "empty"),
        ([], "", "empty"),
        (b"ab", "b'ab'", "ok"),
        (3.5, "3.5", "ok"),
        ({"a": 1}, "{'a': 1}", "ok"),
        ([True], "[True]", "ok"),
        ("a\ud800b", "a?b", "ok"),
        (Unprintable(), "error: RuntimeError: no text", "error"),
        (10**5000, "error: ValueError: Exceeds the limit", "error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_becomes_a_text(value: object, text: str, status: str) -> None:
    result = ask(lambda arguments: value)
    assert (result.text[: len(text) or 1], result.status, result.token_ids) == (text, status, None)


def test_a_result_after_the_deadline_is_thrown_away() -> None:
    service, go = Service(), threading.Event()
    service.call("r", lambda arguments: go.wait(60) and "too late", SOON_S)
    assert service.results(1)["r"][0].status == "timeout"
    go.set()
    assert service.wake.wait(60), "the late result"
    assert service.dispatcher.poll() == []
    service.call("r", lambda arguments: "the next call of the same request")
    assert service.results(1)["r"][0].status == "ok"


def test_a_call_that_fails_is_logged_without_texts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jinfercept")
    assert ask(fails).status == "error"
    [record] = caplog.records
    assert "tool 'tool' of request r: " in record.getMessage()
    assert "error after " in record.getMessage()
    assert ask(lambda arguments: "fine").status == "ok"
    assert len(caplog.records) == 1


def test_an_unknown_tool_is_named_with_those_that_there_are() -> None:
    service = Service()
    service.dispatcher.call("r", (Call("shop", ""),), {"b": Tool(fails, name="b"), "a": Tool(fails, name="a")})
    service.dispatcher.call("s", (Call("shop", ""),), {})
    done = dict(service.dispatcher.poll())
    assert done["r"] == (Result("error: no tool 'shop' (there are: a, b)", "unknown_tool"),)
    assert done["s"][0].text.endswith("(there are: none)")


def test_the_calls_of_one_interception_run_in_parallel_and_return_together_in_order() -> None:
    both = threading.Barrier(2, timeout=60)
    tools = {
        "meet": Tool(lambda arguments: f"{arguments}{both.wait() * 0}", name="meet"),
        "hang": Tool(hangs, name="hang", timeout_s=SOON_S),
    }
    service = Service()
    service.dispatcher.call("r", (Call("meet", "a"), Call("hang", ""), Call("no", ""), Call("meet", "b")), tools)
    results = service.results(1)["r"]
    assert [result.status for result in results] == ["ok", "timeout", "unknown_tool", "ok"]
    assert [results[0].text, results[3].text] == ["a0", "b0"]
    assert service.dispatcher.next_s() is None


@pytest.mark.parametrize("timeout_s", [LONG_S, SOON_S])
def test_an_async_function_is_cancelled_when_its_result_is_no_longer_needed(timeout_s: float) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def waits(arguments: str) -> None:
        started.set()
        try:
            await asyncio.sleep(LONG_S)
        finally:
            cancelled.set()

    service = Service()
    service.call("r", waits, timeout_s)
    assert started.wait(60)
    if timeout_s == LONG_S:
        service.dispatcher.cancel("r")
    else:
        assert service.results(1)["r"][0].status == "timeout"
    assert cancelled.wait(60)
    service.dispatcher.close()


def test_a_function_knows_whose_call_it_is() -> None:
    service = Service()

    async def later(arguments: str) -> str:
        return CURRENT_CALL.get().request_id

    service.call("a", lambda arguments: CURRENT_CALL.get().request_id)
    service.call("b", later)
    assert {name: result.text for name, (result,) in service.results(2).items()} == {"a": "a", "b": "b"}
    assert CURRENT_CALL.get().request_id == ""
    service.dispatcher.close()


def test_a_cancelled_request_may_call_again_under_the_same_id() -> None:
    service = Service()
    go = threading.Event()
    service.call("r", lambda arguments: go.wait(60) and "of the first")
    service.dispatcher.cancel("r")
    service.call("r", lambda arguments: go.wait(60) and "of the second")
    go.set()
    assert service.results(1)["r"][0].text == "of the second"


def test_a_machine_out_of_threads_is_an_error_that_the_model_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    result = ask(len)
    assert (result.text, result.status) == ("error: RuntimeError: can't start new thread", "error")


def characters(text: str) -> list[int]:
    """A tokenizer of the tests: a token per character."""
    return [ord(character) % 97 for character in text]


HOSTILE: dict[str, tuple[Callable[[str], object], str]] = {
    "answers": (answers, "ok"),
    "fails": (fails, "error"),
    "exits": (exits, "error"),
    "dies": (dies, "error"),
    "exits_async": (exits_async, "error"),
    "hangs": (hangs, "timeout"),
    "hangs_async": (hangs_async, "timeout"),
    "is_late": (is_late, "timeout"),
    "none": (lambda arguments: None, "empty"),
    "empty": (lambda arguments: "", "empty"),
    "no_tokens": (lambda arguments: [], "empty"),
    "bytes": (lambda arguments: b"\xff", "ok"),
    "huge": (lambda arguments: "long " * 500_000, "too_large"),
    "surrogates": (lambda arguments: "\ud800\udfff", "ok"),
    "unprintable": (lambda arguments: Unprintable(), "error"),
    "negative": (lambda arguments: [-1, 5], "error"),
    "out_of_range": (lambda arguments: [5, 97, 10**30], "error"),
    "too_many": (lambda arguments: [5] * 1000, "too_large"),
}


@pytest.mark.parametrize("policy", sampled_names())
def test_no_hostile_endpoint_hangs_an_engine_or_keeps_a_page(policy: str) -> None:
    tools = {
        name: Tool(function, name=name, timeout_s=SOON_S if status == "timeout" else LONG_S, max_result_tokens=40)
        for name, (function, status) in HOSTILE.items()
    }
    names = [*HOSTILE, "unknown"]
    requests = []
    for number in range(2 * len(names)):
        calls = [Call(names[number % len(names)], "x"), Call(names[(number * 5 + 1) % len(names)], "y")]
        script = {2: calls[:1], 4: calls} if number % 3 else {3: calls}
        prompt = tuple(range(number % 7 + 1))
        params = SamplingParams(temperature=0, max_tokens=6)
        requests.append(Request(f"r{number}", prompt, params, tools, ScriptedDetector(script)))
    engine = make_engine(POLICIES[policy](), num_pages=250, num_host_pages=10, depth=1, encode=characters)
    outputs = run_all(engine, requests)
    for number, request in enumerate(requests):
        output = outputs[request.id].outputs[0]
        assert output.finish_reason == "length"
        interceptions = output.interceptions
        assert len(interceptions) == (2 if number % 3 else 1)
        assert all(token in range(97) for token in output.token_ids)
        for interception in interceptions:
            for call, result in zip(interception.calls, interception.results, strict=True):
                assert result.status == (HOSTILE[call.name][1] if call.name in HOSTILE else "unknown_tool"), call
    assert engine.scheduler.kv.occupancy().free + engine.scheduler.kv.occupancy().cached == 250


def test_calls_behind_a_sync_tool_begin_when_it_has_returned() -> None:
    service, log, go = Service(), list[str](), threading.Event()

    def sync(arguments: str) -> str:
        assert go.wait(LONG_S)
        log.append(f"sync {arguments}")
        return "s"

    def other(arguments: str) -> str:
        log.append(f"other {arguments}")
        return "o"

    tools = {"sync": Tool(sync, name="sync", calls="sync"), "other": Tool(other, name="other")}
    calls = tuple(Call(name, str(i)) for i, name in enumerate(("other", "sync", "gone", "other", "sync")))
    service.dispatcher.call("r", calls, tools)
    while log != ["other 0"]:
        service.wake.wait(LONG_S)
        assert service.dispatcher.poll() == []
    go.set()
    results = service.results(1)["r"]
    assert [result.text[:2] for result in results] == ["o", "s", "er", "o", "s"]
    assert log[:2] == ["other 0", "sync 1"]
    assert sorted(log[2:]) == ["other 3", "sync 4"]
    times = tuple(Result("", duration_s=s) for s in (5.0, 2.0, 0.0, 4.0, 1.0))
    assert lasted_s(calls, times, tools) == 6.0


def test_a_sync_tool_that_hangs_holds_its_turn_no_longer_than_its_timeout() -> None:
    service = Service()
    tools = {
        "sync": Tool(hangs, name="sync", calls="sync", timeout_s=SOON_S),
        "other": Tool(str, name="other", calls="sync"),
    }
    service.dispatcher.call("r", (Call("sync", "x"), Call("other", "y")), tools)
    assert [result.status for result in service.results(1)["r"]] == ["timeout", "ok"]


def test_what_outlasts_its_call_is_cancelled_with_its_request() -> None:
    service, cancelled = Service(), list[str]()

    def registers(arguments: str) -> str:
        outlast = CURRENT_CALL.get().outlast
        assert outlast is not None
        outlast(hangs, arguments, lambda: cancelled.append(arguments))
        return "at once"

    service.call("r", registers)
    service.call("s", registers)
    service.results(2)
    service.dispatcher.cancel("r")
    assert cancelled == ["x"]
    service.dispatcher.cancel("r")
    service.dispatcher.close()
    assert cancelled == ["x", "x"]
