"""Functions of tools that raise, return or leave behind what could end an event loop, a thread or a call."""

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any


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
