"""Runs the code of tools: each call of a sync function in a thread of its own, coroutines on one event loop.

A coroutine that blocks delays the other coroutines of the same `ToolExecutor`, and nothing else. The Python tools of a file are
in another process (`tools.python_process`).
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from typing import Any, final

from jinfercept.engine.current_call import CURRENT_CALL, AtOnce
from jinfercept.engine.tool_run import ToolFailed, ToolRun, ToolValue, plain_failure, plain_value

_CANCEL_S = 0.5
"""Seconds for the tasks to end at the end of the loop."""
_CLOSED = "these tools are closed"


@final
class ToolExecutor:
    """The threads and the event loop of the tools of an engine, or of a file. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.is_closed = False

    def submit[T](self, work: Callable[[], Coroutine[Any, Any, T]], tool: str = "") -> ToolRun[T]:
        """Start a coroutine of jinfercept's own, which does not block, in a copy of the present context."""
        run = ToolRun[T]()
        self._begin(work, _context(tool), run, run.end, run.fail)
        return run

    def call[*A](self, tool: str, function: Callable[[*A], object], *args: *A) -> ToolRun[Any]:
        """Call a function of a tool in a copy of the present context, in which `CURRENT_CALL` has the tool's name.

        The function may return an awaitable, which is awaited on the event loop, or a `ToolRun`. The run of the call raises
        only `ToolFailed`, unless the function is an `AtOnce` one, whose own run is returned.
        """
        run, context, work = ToolRun[ToolValue](), _context(tool), partial(function, *args)
        if self.is_closed:
            run.fail(ToolFailed(_CLOSED))
        elif isinstance(function, AtOnce):
            return context.run(self._call_now, work, run)
        elif inspect.iscoroutinefunction(function):
            self._await(work, context, run)
        else:
            try:
                in_thread = self._run_in_thread, work, run
                threading.Thread(target=context.run, args=in_thread, name=f"jinfercept-{tool}", daemon=True).start()
            except RuntimeError as error:  # no more threads
                run.fail(plain_failure(error))
        return run

    def close(self, timeout_s: float = 1.0) -> None:
        """Cancel everything, and wait for the loop. A loop that is blocked, and hung threads, end with the process."""
        with self._lock:
            self.is_closed, loop, thread = True, self._loop, self._thread
        if loop is None or thread is None:
            return
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(max(0.0, timeout_s))

    # -- threads ---------------------------------------------------------------------------------------------------

    def _call_now(self, function: Callable[[], object], run: ToolRun[ToolValue]) -> ToolRun[Any]:
        # Returns the run that the call ends with: `run`, or one that the function returned.
        try:
            value = function()
            if isinstance(value, ToolRun):
                return value
            if inspect.isawaitable(value):
                self._await(lambda: value, copy_context(), run)
            else:
                run.end(plain_value(value))
        except BaseException as error:  # any exception of a tool is its result
            run.fail(plain_failure(error))
        return run

    def _run_in_thread(self, function: Callable[[], object], run: ToolRun[ToolValue]) -> None:
        goes_on = self._call_now(function, run)
        if goes_on is not run:
            run.on_cancel(goes_on.cancel)
            run.follow(goes_on.result)

    # -- the event loop --------------------------------------------------------------------------------------------

    def _await(self, work: Callable[[], object], context: Context, run: ToolRun[ToolValue]) -> None:
        def end(value: object) -> None:
            run.end(plain_value(value))

        self._begin(work, context, run, end, lambda error: run.fail(plain_failure(error)))

    def _begin(
        self,
        work: Callable[[], object],
        context: Context,
        run: ToolRun[Any],
        end: Callable[[Any], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        async def to_its_end() -> None:
            try:
                value = work()
                if inspect.isawaitable(value):
                    value = await value
                end(value)
            except BaseException as error:  # not even SystemExit may reach the event loop
                fail(error)

        def begin() -> None:
            task = asyncio.Task(to_its_end(), loop=loop, context=context)
            task.add_done_callback(lambda _: fail(asyncio.CancelledError()))  # cancelled before its first step
            run.on_cancel(partial(cancel, task))

        def cancel(task: asyncio.Task[None]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)

        try:
            loop = self._running_loop()
            loop.call_soon_threadsafe(begin)
        except (RuntimeError, OSError, ToolFailed) as error:
            fail(error)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self.is_closed:
                raise ToolFailed(_CLOSED)
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = loop = asyncio.SelectorEventLoop()  # whatever policy a tool has set
                loop.set_default_executor(_DaemonThreads())
                self._thread = threading.Thread(target=self._run, args=(loop,), name="jinfercept-calls", daemon=True)
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self.is_closed and not loop.is_closed():
            with suppress(BaseException):  # a callback's SystemExit
                loop.run_forever()
        with suppress(BaseException):  # of a task
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), _CANCEL_S))
        with suppress(BaseException):
            loop.close()


@final
class _DaemonThreads(ThreadPoolExecutor):
    """Executor of the loop's jobs, such as `asyncio.to_thread`, whose threads the interpreter does not wait for at its end."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # of which no thread is ever started

    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()

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

        threading.Thread(target=job, name="jinfercept-tool", daemon=True).start()
        return future


def _context(tool: str) -> Context:
    context = copy_context()
    context.run(CURRENT_CALL.set, replace(CURRENT_CALL.get(), tool=tool))
    return context
