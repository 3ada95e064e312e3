"""An event loop in a daemon thread that goes on whatever coroutines, callbacks and tasks on it raise."""

import asyncio
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from types import FrameType
from typing import Any, NamedTuple, final

from jinfercept.intercept.current_call import CURRENT_CALL
from jinfercept.intercept.tool_run import ToolRun

_CANCEL_S = 0.5
"""Seconds for the tasks to end at the end of the loop."""
_MOST_FAILURES = 100
"""Times within a second that a loop may be ended by what runs on it, before it counts as broken."""
_RUN = asyncio.Handle._run.__code__  # pyright: ignore[reportPrivateUsage] # runs every callback and every step of a task
MOST_THREADS = 32
"""Threads of one tool in a pool. More of its functions wait for those."""


class RunningCallback(NamedTuple):
    """The callback that a loop executes at a moment.

    Attributes:
        handle: of the callback, or of the step of a task; it is another one for every callback.
        frame: of the innermost function.
    """

    handle: asyncio.Handle
    frame: FrameType


@final
class EventLoopThread:
    """One loop and its thread, which runs from now on.

    Raises:
        RuntimeError: the process has no more threads.
        OSError: it has no more file descriptors.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.SelectorEventLoop()  # whatever policy a tool has set
        self.loop.set_default_executor(DaemonPool())
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def call_soon[*A](self, function: Callable[[*A], object], *args: *A, context: Context | None = None) -> None:
        """Call a function on the loop. Raises `RuntimeError` if the loop has ended."""
        self.loop.call_soon_threadsafe(function, *args, context=context)

    def run[T](self, work: Callable[[], Coroutine[Any, Any, T]], context: Context) -> ToolRun[T]:
        """Run a coroutine that does not block. Raises `RuntimeError` if the loop has ended."""
        run = ToolRun[T]()

        async def to_its_end() -> None:
            try:
                run.end(await work())
            except BaseException as error:
                run.fail(error)

        def begin() -> None:
            task = self.loop.create_task(to_its_end())
            task.add_done_callback(lambda _: run.fail(asyncio.CancelledError()))  # cancelled before its first step
            run.on_cancel(lambda: self.cancel(task))

        self.call_soon(begin, context=context)
        return run

    def cancel(self, task: asyncio.Task[None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.call_soon(task.cancel)

    def running(self) -> RunningCallback | None:
        """The callback that the loop executes now; None while it waits."""
        innermost = frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if frame.f_code is _RUN:
                handle = frame.f_locals.get("self")
                return RunningCallback(handle, innermost) if handle is not None and innermost is not None else None
            frame = frame.f_back
        return None

    def stop(self) -> None:
        """Begin to end: tasks are cancelled, and the thread ends. A callback that runs goes on before that."""
        self._is_ending = True
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        failures, failed_s = 0, time.monotonic()
        while not self._is_ending and failures < _MOST_FAILURES and not self.loop.is_closed():
            try:
                self.loop.run_forever()  # returns if a tool stops it
            except BaseException:  # a tool's SystemExit, or a loop that a tool has broken
                if time.monotonic() > failed_s + 1:
                    failures, failed_s = 0, time.monotonic()
                failures += 1
        give_up_s = time.monotonic() + _CANCEL_S
        while time.monotonic() < give_up_s:
            try:
                if self.loop.is_closed() or self._cancel_tasks(give_up_s - time.monotonic()):
                    break
            except BaseException:  # of a task
                time.sleep(0.001)
        with suppress(BaseException):
            self.loop.close()

    def _cancel_tasks(self, timeout_s: float) -> bool:
        """Cancel all tasks and wait for them; returns whether none is left."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()

        async def wait() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=timeout_s)
            async with asyncio.timeout(timeout_s):
                await self.loop.shutdown_asyncgens()

        work = wait()
        try:
            self.loop.run_until_complete(work)
        finally:
            work.close()
        return not asyncio.all_tasks(self.loop)


@final
class DaemonPool(ThreadPoolExecutor):
    """The default executor of an event loop: runs what `asyncio.to_thread` and name look-ups are given in daemon threads."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # of which no thread is ever started
        self._turn = threading.Lock()
        self._num_threads = Counter[str]()
        self._jobs: dict[str, deque[Callable[[], None]]] = {}

    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function. Raises `RuntimeError` if the process has no more threads."""
        future, tool = Future[T](), CURRENT_CALL.get().tool

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except (StopIteration, StopAsyncIteration) as error:  # those never reach a coroutine
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        with self._turn:
            jobs = self._jobs.setdefault(tool, deque())
            jobs.append(job)
            if self._num_threads[tool] >= MOST_THREADS:
                return future
            self._num_threads[tool] += 1
            try:
                threading.Thread(target=self._serve, args=(tool,), name="jinfercept-tool", daemon=True).start()
            except RuntimeError:
                self._num_threads[tool] -= 1
                if not self._num_threads[tool]:
                    jobs.remove(job)
                    raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Drop what waits; running functions go on."""
        with self._turn:
            self._jobs.clear()

    def _serve(self, tool: str) -> None:
        """Run the tool's functions until none waits."""
        while True:
            with self._turn:
                jobs: Any = self._jobs.get(tool)
                if not jobs:
                    self._num_threads[tool] -= 1
                    return
                job = jobs.popleft()
            job()
