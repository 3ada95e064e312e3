"""Runs the code of tools: each call of a sync function in a thread of its own, coroutines on one event loop.

A coroutine that blocks delays the other coroutines of the same `ToolExecutor`, and nothing else. The Python tools of a file are
in another process (`tools.python_process`). A value of a user's class can block or raise, even when it is printed. So values
become plain where the tool runs, and only plain values leave it: they run no code of the tool.
"""

import asyncio
import inspect
import threading
from array import array
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast, final

from jinfercept.calls import Call, Result
from jinfercept.errors import describe_failure, shown
from jinfercept.values import plain

MOST_CHARS = 2**24
"""Characters of the longest text of a result; more are dropped before they are copied."""


@final
class Placeholder(str):
    """The value that a call that goes on returns at once; its result has the status "started"."""


ToolValue = str | tuple[int, ...]
"""A text, possibly a `Placeholder`, or token ids."""


class ToolFailed(Exception):
    """An exception of a tool, as text."""


@final
class ToolTimeout(ToolFailed, TimeoutError):
    """An exception of a tool that gave up in time."""


def plain_value(value: object) -> ToolValue:
    """Convert a tool's return value to a text or to token ids.

    Raises whatever the value's own methods raise, and `ToolFailed` for an array of numbers that are not token ids.
    """
    if isinstance(value, str):
        return value if isinstance(value, Placeholder) else _plain_text(str(value))
    return _plain_other(value)


def _plain_other(given: object) -> ToolValue:
    value = plain([*given[:MOST_CHARS]] if isinstance(given, range | array) else given)
    if isinstance(value, list | tuple) and all(type(token) is int for token in value):
        return cast(tuple[int, ...], tuple(value))
    is_array = isinstance(value, list) and not isinstance(given, list)
    if is_array and all(isinstance(row, int | float | list) for row in value):
        raise ToolFailed(f"token ids are whole numbers in one dimension; got {shown(given)}; return those, or a text")
    if isinstance(value, bytes | bytearray):
        value = value[:MOST_CHARS]
    return "" if value is None else _plain_text(str(value))


def plain_failure(error: BaseException) -> ToolFailed:
    """Convert any exception to one that is safe to raise anywhere."""
    kind = type(error)  # not by `isinstance`, which may ask the exception itself
    if issubclass(kind, ToolFailed):
        return cast(ToolFailed, error)
    text = _plain_text(describe_failure(error))
    return ToolTimeout(text) if issubclass(kind, TimeoutError) else ToolFailed(text)


def value_result(value: ToolValue, duration_s: float, most_tokens: int) -> Result:
    """The result of a call that returned."""
    # one id more than the model may read is kept, which makes the result too large
    if isinstance(value, tuple):
        return (
            Result("", "ok", value[: most_tokens + 1], duration_s) if value else Result("", "empty", None, duration_s)
        )
    if isinstance(value, Placeholder):
        return Result(str(value), "started", None, duration_s)
    if not value.strip():
        return Result("(nothing)", "empty", None, duration_s)
    return Result(value, "ok", None, duration_s)


def failure_result(error: BaseException, duration_s: float) -> Result:
    """The result of a call that raised."""
    status = "timeout" if isinstance(error, TimeoutError) else "error"
    return Result(f"error: {plain_failure(error)}", status, None, duration_s)


def _plain_text(text: str) -> str:
    # a `str` and no subclass, of bounded size, without half surrogate pairs
    return str.encode(str.__getitem__(text, slice(MOST_CHARS)), errors="replace").decode()


@final
class ToolRun[T]:
    """Work that runs elsewhere. It can be awaited in any event loop; a waiter that is cancelled cancels the work."""

    def __init__(self) -> None:
        self.result = Future[T]()  # set when the work has ended, not when it is cancelled
        self.result.set_running_or_notify_cancel()
        self.is_cancelled = False
        self._cancel: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        """Replace the function that cancels the work. It is called at once if `cancel` was called before."""
        with self._lock:
            self._cancel = cancel
            is_late = self.is_cancelled
        if is_late:
            cancel()

    def cancel(self) -> None:
        """Ask the work to end. Work in a thread goes on; later calls do nothing."""
        with self._lock:
            was_cancelled, self.is_cancelled = self.is_cancelled, True
            cancel = self._cancel
        if cancel is not None and not was_cancelled and not self.result.done():
            cancel()

    def end(self, value: T) -> None:
        """Set the value of the work. Only the first of `end` and `fail` counts."""
        with suppress(InvalidStateError):
            self.result.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set the exception of the work."""
        with suppress(InvalidStateError):
            self.result.set_exception(error)

    def follow(self, result: Future[T]) -> None:
        """End with the value or the exception of another future."""

        def copy(result: Future[T]) -> None:
            error = asyncio.CancelledError() if result.cancelled() else result.exception()
            self.end(result.result()) if error is None else self.fail(error)

        result.add_done_callback(copy)

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from asyncio.wrap_future(self.result).__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise


ToolFunction = Callable[[str], object]
"""Takes a call's arguments as the model wrote them; returns a value, an awaitable or a `ToolRun`."""


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """A call while its function runs. Outside of tools it has no tool's name, outside of calls no ids and no `outlast`."""

    tool: str = ""
    id: str = ""
    request_id: str = ""
    tenant: str = ""
    trace: Mapping[str, str] = field(default_factory=dict[str, str])  # headers of the W3C trace context, by name
    # Starts another function, which may go on after the result of this call, and calls its last argument at the end of
    # the request. If the call is over, it only does the latter.
    outlast: Callable[[ToolFunction, str, Callable[[], None]], ToolRun[ToolValue]] | None = None


OUTSIDE = CurrentCall()
"""Where no tool runs."""
CURRENT_CALL = ContextVar("jinfercept_current_call", default=OUTSIDE)
"""The call whose code runs: in a tool's function, in its tasks, and in its jobs in threads."""


CALL_KEY = "jinfercept/call"
"""Key of `fields_of` a call in the metadata that the process of Python tools receives with it."""


def fields_of(call: CurrentCall) -> dict[str, Any]:
    """The fields of a call that code in another process gets: all but `outlast`."""
    values = {each.name: getattr(call, each.name) for each in fields(call) if each.name != "outlast"}
    return values | {"trace": dict(call.trace)}


@final
@dataclass(frozen=True, slots=True)
class AtOnce:
    """A function of a tool that never blocks, so the caller's own thread calls it: its work goes on elsewhere."""

    function: ToolFunction

    def __call__(self, arguments: str) -> object:
        return self.function(arguments)


def around(function: ToolFunction, wrapper: ToolFunction) -> ToolFunction:
    """Mark a wrapper as `AtOnce` if the wrapped function is."""
    return AtOnce(wrapper) if isinstance(function, AtOnce) else wrapper


@final
class RunningCall:
    """One call of a function."""

    def __init__(self, name: str, call: Call) -> None:
        self.name, self.call = name, call
        self.has_started = self.is_read = False  # is_read: the request has the result at once, so no future follows
        self._run = ToolRun[ToolValue]()

    @property
    def has_returned(self) -> bool:
        return self._run.result.done()

    def start(self, function: ToolFunction, arguments: str, ended: Callable[[], None]) -> None:
        """Call the function within the current call of its tool, until the request ends. `ended` is called once, at its end."""
        self.has_started = True
        self._run.result.add_done_callback(lambda result: ended())
        outlast = CURRENT_CALL.get().outlast
        assert outlast is not None
        run = outlast(function, arguments, self.cancel)
        self._run.on_cancel(run.cancel)
        self._run.follow(run.result)

    def skip(self) -> None:
        """Mark the call as run elsewhere, by a caller that waits for its result."""
        self.is_read = True
        self._run.end("its result was given at once")

    def wait(self) -> ToolRun[ToolValue]:
        """Wait for the function's result or exception. A waiter that is cancelled does not cancel the call."""
        waiting = ToolRun[ToolValue]()
        waiting.follow(self._run.result)
        return waiting

    def cancel(self) -> None:
        """Cancel the call. Only an async function stops; a sync one runs to its end, and its result is dropped."""
        self._run.cancel()
        self._run.fail(CancelledError())


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
