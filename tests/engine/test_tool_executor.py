"""Nothing that the code of a tool raises, returns or leaves behind ends the calls of other tools."""

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from jinfercept.engine import tool_executor
from jinfercept.engine.tool_executor import ToolExecutor, ToolFailed, ToolRun, ToolValue, plain_failure, plain_value
from tests.support.tool_runner import until


async def answers() -> str:
    await asyncio.sleep(0)
    return "fine"


class Deadly(BaseException):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class Faceless(Exception):
    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise SystemExit("no class")


class DiesWhenCollected:
    def __del__(self) -> None:
        raise SystemExit("collected")


class WeirdAwaitable:
    def __await__(self) -> Iterator[Any]:
        yield "what no event loop understands"


class NoAwaitable:
    def __await__(self) -> Any:
        return 3


class DeadlyText:
    def __str__(self) -> str:
        raise Deadly


class EvilText(str):
    def strip(self, *args: Any) -> Any:
        raise SystemExit

    __str__ = __len__ = strip


async def leaves_deadly_tasks() -> str:
    async def exits() -> None:
        sys.exit("a task")

    tasks = [asyncio.create_task(exits()) for _ in range(3)]
    await asyncio.sleep(0)
    return f"{len(tasks)}"


async def leaves_deadly_callbacks() -> str:
    loop = asyncio.get_running_loop()
    for _ in range(3):
        loop.call_soon(sys.exit, "a callback")
    loop.call_later(0, lambda: [][1])
    done = loop.create_future()
    done.add_done_callback(lambda _: sys.exit("a done callback"))
    done.set_result(None)
    await asyncio.sleep(0)
    return "left"


async def stops_its_loop() -> str:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return "stopped"


async def closes_its_loop() -> str:
    asyncio.get_running_loop().close()
    return "closed"


async def runs_a_loop() -> str:
    work = answers()
    try:
        return asyncio.run(work)
    finally:
        work.close()


async def spoils_its_loop() -> str:
    loop = asyncio.get_running_loop()

    def refuse(*args: Any, **more: Any) -> Any:
        raise SystemExit

    loop.set_task_factory(refuse)
    loop.set_exception_handler(refuse)
    loop.call_soon(lambda: [][1])
    asyncio.set_event_loop(None)
    return "spoilt"


async def leaves_a_generator_open() -> str:
    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
        finally:
            sys.exit("a generator")

    async for number in numbers():
        return f"{number}"
    return ""


async def recurses() -> str:
    return await recurses()


async def exits_in_a_thread() -> str:
    await asyncio.to_thread(sys.exit, "a thread")
    return ""


async def stops_iterating() -> str:
    await asyncio.to_thread(next, iter(()))
    return ""


HOSTILE: dict[str, tuple[Callable[[], object], str]] = {
    "deadly tasks": (leaves_deadly_tasks, "3"),
    "deadly callbacks": (leaves_deadly_callbacks, "left"),
    "stop": (stops_its_loop, "stopped"),
    "close": (closes_its_loop, "failed: RuntimeError"),
    "asyncio.run": (runs_a_loop, "failed: RuntimeError"),
    "spoilt": (spoils_its_loop, "spoilt"),
    "generator": (leaves_a_generator_open, "1"),
    "recursion": (recurses, "failed: RecursionError"),
    "exit in a thread": (exits_in_a_thread, "failed: SystemExit"),
    "stop iteration": (stops_iterating, "failed: "),
    "awaitable": (WeirdAwaitable, "failed: RuntimeError"),
    "no awaitable": (NoAwaitable, "failed: TypeError"),
    "text": (DeadlyText, "failed: Deadly"),
    "evil text": (lambda: EvilText("a"), "failed: "),
    "collected": (lambda: DiesWhenCollected() and "collected", "collected"),
    "infinite": (itertools.count, "count(0)"),
    "generator function": (lambda: (number for number in "ab"), "<generator"),
}
for kind in (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration, Deadly, Faceless):

    async def raises(kind: type[BaseException] = kind) -> str:
        raise kind

    def raises_at_once(kind: type[BaseException] = kind) -> str:
        raise kind

    HOSTILE[f"async {kind.__name__}"] = raises, "failed: "
    HOSTILE[f"sync {kind.__name__}"] = raises_at_once, f"failed: {kind.__name__}"


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
    monkeypatch.setattr(tool_executor, "MOST_CHARS", 20)
    assert plain_value("é" * 25) == "é" * 20
    assert plain_value(b"a" * 25) == f"b'{'a' * 18}"
    assert str(plain_failure(ValueError("a" * 25))) == f"ValueError: {'a' * 8}"
