"""Nothing that the code of a tool raises, returns or leaves behind ends the calls of other tools."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from jinfercept.intercept import tool_run
from jinfercept.intercept.tool_executor import ToolExecutor
from jinfercept.intercept.tool_run import ToolFailed, ToolRun, ToolValue, plain_failure, plain_value
from tests.support.hostile_tools import HOSTILE, answers
from tests.support.tool_runner import until

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
def test_what_a_tool_raises_returns_or_leaves_ends_no_other_call(executor: ToolExecutor) -> None:
    for name, (function, result) in HOSTILE.items():
        assert str(text(executor.call(name, function))).startswith(result), name
        assert text(executor.call("next", answers)) == "fine", name


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
    until(lambda: not set(threading.enumerate()) - before)
    assert text(executor.call("late", answers)) == "failed: these tools are closed"

    blocked = ToolExecutor()
    run = blocked.call("blocks", blocks)
    assert begun.acquire(timeout=WAIT_S)
    began_s = time.monotonic()
    blocked.close(0.1)
    assert time.monotonic() - began_s < 1
    go.set()
    assert text(run) == "awake"
    until(lambda: not set(threading.enumerate()) - before)


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


def test_long_results_are_cut_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_run, "MOST_CHARS", 20)
    assert plain_value("é" * 25) == "é" * 20
    assert plain_value(b"a" * 25) == f"b'{'a' * 18}"
    assert str(plain_failure(ValueError("a" * 25))) == f"ValueError: {'a' * 8}"
