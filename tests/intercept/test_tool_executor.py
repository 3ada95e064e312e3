"""Nothing that the code of a tool does ends or delays the calls of other tools."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from jinfercept.intercept import tool_executor, tool_values
from jinfercept.intercept.event_loop_thread import EventLoopThread
from jinfercept.intercept.tool_executor import ToolExecutor
from jinfercept.intercept.tool_run import ToolRun
from jinfercept.intercept.tool_values import ToolFailed, ToolValue, plain_failure, plain_value
from tests.support.hostile_tools import HOSTILE, answers

WAIT_S = 10.0


@pytest.fixture
def executor() -> Iterator[ToolExecutor]:
    made = ToolExecutor()
    yield made
    made.close(0.0)


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Set at the end: what blocks waits for it."""
    event = threading.Event()
    yield event
    event.set()


def text(run: ToolRun[ToolValue]) -> ToolValue:
    """The result of a call, or why it failed."""
    try:
        return run.result.result(WAIT_S)
    except ToolFailed as failed:
        return f"failed: {failed}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_tool_raises_returns_or_leaves_ends_no_loop_and_no_call(executor: ToolExecutor) -> None:
    limit = sys.getrecursionlimit()
    for name, (function, result) in HOSTILE.items():
        assert str(text(executor.call(name, function))).startswith(result), name
        assert text(executor.call("next", answers)) == "fine", name
    assert sys.getrecursionlimit() == limit


def test_a_tool_that_closes_its_loop_between_two_runs_of_it_costs_the_calls_on_it_only(executor: ToolExecutor) -> None:
    async def closes() -> str:
        loop: Any = asyncio.get_running_loop()
        loop.run_forever = loop.close
        loop.stop()
        await asyncio.sleep(WAIT_S)
        return ""

    assert text(executor.call("closes", closes)) == "failed: a tool closed the event loop"
    assert text(executor.call("next", answers)) == "fine"


def test_a_tool_that_blocks_is_named_and_delays_no_call_but_those_that_had_begun(
    executor: ToolExecutor, go: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    begun = threading.Event()

    async def blocks() -> str:
        begun.set()
        go.wait(WAIT_S)
        return f"on {threading.get_ident()}"

    blocking = executor.call("greedy", blocks)
    assert begun.wait(WAIT_S)
    waiting = [executor.call("modest", answers) for _ in range(3)]
    assert [text(run) for run in waiting] == ["fine"] * 3
    assert not blocking.result.done()
    later = executor.call("greedy", blocks)  # on a loop of its own
    assert text(executor.call("modest", answers)) == "fine"
    wait_for(lambda: bool(caplog.records))
    [record] = [record for record in caplog.records if record.name == tool_executor.__name__]
    assert "the tool greedy blocks" in record.getMessage()
    assert f"{__file__}" in record.getMessage() or "threading.py" in record.getMessage()
    assert executor.problem is None
    go.set()
    again = executor.call("greedy", blocks)
    assert text(again) == text(later) != text(blocking)


@pytest.mark.parametrize("how", ["callback", "task", "str", "error"])
def test_code_that_blocks_is_found_wherever_it_runs(
    executor: ToolExecutor,
    go: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    monkeypatch.setattr(tool_executor, "BLOCKED_S", 0.2)
    caplog.set_level(logging.WARNING)
    begun = threading.Event()

    def block() -> str:
        begun.set()
        go.wait(WAIT_S)
        return "awake"

    class SlowError(Exception):
        def __str__(self) -> str:
            return block()

    async def task() -> None:
        block()

    async def tool() -> Any:
        if how == "callback":
            asyncio.get_running_loop().call_soon(block)
        elif how == "task":
            asyncio.create_task(task())  # noqa: RUF006
        elif how == "str":
            return type("Slow", (), {"__str__": lambda self: block()})()
        else:
            raise SlowError
        return None

    executor.call("sly", tool)
    assert begun.wait(WAIT_S)
    assert text(executor.call("modest", answers)) == "fine"
    wait_for(lambda: any("the tool sly blocks" in record.getMessage() for record in caplog.records))


def test_a_tool_that_blocks_while_it_holds_the_log_holds_nothing_else(
    executor: ToolExecutor, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_executor, "BLOCKED_S", 0.2)
    begun = threading.Event()

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            begun.set()
            go.wait(WAIT_S)

    handler = Full(logging.WARNING)
    tool_executor.log.addHandler(handler)

    async def writes() -> str:
        tool_executor.log.warning("a line")
        return "written"

    try:
        writing = executor.call("writes", writes)
        assert begun.wait(WAIT_S)
        assert text(executor.call("modest", answers)) == "fine"
        go.set()
        assert text(writing) == "written"
    finally:
        tool_executor.log.removeHandler(handler)


def test_without_a_fresh_loop_there_is_a_problem_until_a_blocked_one_ends(
    executor: ToolExecutor, go: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tool_executor, "MOST_BLOCKED", 1)
    monkeypatch.setattr(tool_executor, "BLOCKED_S", 0.2)
    gates = [threading.Event(), threading.Event()]

    def block(number: int) -> Callable[[], object]:
        async def blocks() -> str:
            gates[number].set()
            go.wait(WAIT_S)
            return "awake"

        return blocks

    blocked = [executor.call("a", block(0))]
    assert gates[0].wait(WAIT_S)
    assert text(executor.call("modest", answers)) == "fine"
    blocked.append(executor.call("b", block(1)))
    waiting = executor.call("modest", answers)
    wait_for(lambda: executor.problem is not None)
    assert executor.problem is not None
    assert "2 event loops are blocked" in executor.problem
    assert not waiting.result.done()
    go.set()
    assert [text(run) for run in (*blocked, waiting)] == ["awake", "awake", "fine"]
    wait_for(lambda: executor.problem is None)
    wait_for(lambda: "2 event loops are blocked" in caplog.text)


def test_without_threads_there_is_a_problem_and_calls_fail_readably(
    executor: ToolExecutor, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_executor, "BLOCKED_S", 0.2)
    begun = threading.Event()

    async def blocks() -> str:
        begun.set()
        go.wait(WAIT_S)
        return "awake"

    executor.call("greedy", blocks)
    assert begun.wait(WAIT_S)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert text(executor.call("sync", str)) == "failed: RuntimeError: can't start new thread"
    waiting = executor.call("modest", answers)
    wait_for(lambda: executor.problem is not None)
    assert "can't start new thread" in str(executor.problem)
    assert text(executor.call("greedy", answers)) == "failed: RuntimeError: can't start new thread"
    go.set()
    assert text(waiting) == "fine"
    wait_for(lambda: executor.problem is None)


def test_the_watchdog_does_not_count_its_own_lateness() -> None:
    loop = tool_executor._ToolLoop()  # pyright: ignore[reportPrivateUsage]
    go, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go.wait(WAIT_S)

    loop.thread.call_soon(block)
    assert begun.wait(WAIT_S)
    looks = [loop.look() for _ in range(8)]  # at once, however much time has passed
    assert looks.index(True) == 5
    assert looks.count(True) == 1
    go.set()
    loop.thread.stop()


def test_functions_in_threads_of_async_tools_wait_for_no_other_tool(
    executor: ToolExecutor, go: threading.Event
) -> None:
    async def hangs() -> str:
        await asyncio.gather(*(asyncio.to_thread(go.wait, WAIT_S) for _ in range(40)))
        return "awake"

    async def reads() -> str:
        return await asyncio.to_thread(str, "read")

    before = threading.enumerate()  # threads of earlier tests may still end
    hanging = executor.call("hangs", hangs)
    assert text(executor.call("reads", reads)) == "read"
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert sum(thread.name == "jinfercept-tool" for thread in begun) <= 33
    go.set()
    assert text(hanging) == "awake"


def test_a_tool_whose_calls_are_given_up_has_a_bounded_number_of_threads(
    executor: ToolExecutor, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_executor, "MOST_LEFT_THREADS", 2)
    runs = [executor.call("hangs", lambda: go.wait(WAIT_S)) for _ in range(3)]
    for run in runs[:2]:
        run.cancel()
    assert text(executor.call("hangs", str)) == "failed: 2 cancelled or timed-out calls of hangs still run"
    assert text(executor.call("other", lambda: "fine")) == "fine"
    go.set()
    assert {text(run) for run in runs} == {"True"}
    wait_for(lambda: text(executor.call("hangs", lambda: "fine")) == "fine")


def test_closing_is_quick_and_leaves_no_thread_but_those_that_tools_hold(go: threading.Event) -> None:
    before, executor = set(threading.enumerate()), ToolExecutor()
    begun = threading.Semaphore(0)

    async def swallows() -> str:
        task: Any = asyncio.current_task()
        task._log_destroy_pending = False  # it outlives its loop, and asyncio need not say so when the tests end
        begun.release()
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(WAIT_S)

    async def blocks() -> str:
        begun.release()
        go.wait(WAIT_S)
        return "awake"

    executor.call("swallows", swallows)
    assert begun.acquire(timeout=WAIT_S)
    began_s = time.monotonic()
    executor.close()
    assert time.monotonic() - began_s < 1.5
    wait_for(lambda: not set(threading.enumerate()) - before)
    assert text(executor.call("late", answers)) == "failed: these tools are closed"

    blocked = ToolExecutor()
    run = blocked.call("blocks", blocks)
    assert begun.acquire(timeout=WAIT_S)
    began_s = time.monotonic()
    blocked.close()
    assert time.monotonic() - began_s < 1
    go.set()
    assert text(run) == "awake"
    wait_for(lambda: not set(threading.enumerate()) - before)


def test_the_watchdog_runs_only_while_async_calls_do(executor: ToolExecutor) -> None:
    def watched() -> bool:
        return any("watchdog" in thread.name for thread in threading.enumerate())

    assert text(executor.call("sync", lambda: "fine")) == "fine"
    assert not watched()
    go = threading.Event()

    async def waits() -> str:
        while not go.is_set():
            await asyncio.sleep(0.01)
        return "fine"

    run = executor.call("async", waits)
    wait_for(watched)
    go.set()
    assert text(run) == "fine"
    wait_for(lambda: not watched())


def test_a_cancelled_call_is_cancelled_once_and_before_its_first_step_too(executor: ToolExecutor) -> None:
    cancelled = 0
    begun, cleaned = threading.Event(), threading.Event()

    async def waits() -> str:
        nonlocal cancelled
        begun.set()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            cancelled += 1
            await asyncio.sleep(0.02)
            cleaned.set()
            raise
        return ""

    run = executor.call("waits", waits)
    assert begun.wait(WAIT_S)
    run.cancel()
    run.cancel()
    assert str(text(run)).startswith("failed: CancelledError")
    assert (cancelled, cleaned.is_set()) == (1, True)
    early = executor.call("waits", waits)
    early.cancel()
    assert str(text(early)).startswith("failed: CancelledError")


def test_a_loop_that_is_broken_ends_and_does_not_spin() -> None:
    thread = EventLoopThread("broken")

    def breaks() -> None:
        thread.loop.run_forever = sys.exit
        thread.loop.stop()

    thread.call_soon(breaks)
    thread.join(WAIT_S)
    assert not thread.is_alive


def test_long_results_are_cut_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_values, "MOST_CHARS", 20)
    assert plain_value("é" * 25) == "é" * 20
    assert plain_value(b"a" * 25) == f"b'{'a' * 18}"
    assert str(plain_failure(ValueError("a" * 25))) == f"ValueError: {'a' * 8}"


def wait_for(reached: Callable[[], bool]) -> None:
    """Wait for something that happens on other threads."""
    give_up_s = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < give_up_s, "it never happens"
        time.sleep(0.005)
