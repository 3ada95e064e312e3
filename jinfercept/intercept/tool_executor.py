"""Runs the code of tools: sync functions in threads of their own, coroutines on event loops that they share.

A call goes from the engine's thread to where its code runs, in at most two steps, with one context variable (`CURRENT_CALL`):

    a sync function                        a thread of its own
    a coroutine function                   the loop of async tools
    HTTP, an MCP server, a model, a person the loop of jinfercept's own coroutines
    a Python function of a file            that loop, where its call waits for a slot and for its timeout; then as above

Objects such as HTTP clients belong to the loop on which they were made, so that the async tools of a file have one loop. A
watchdog looks at it while calls run. When one callback or step has run for `BLOCKED_S` seconds, calls that have not begun and
all later ones go to a fresh loop, and the tool whose code it is has a loop of its own from then on. The blocked loop ends with
its last call. What a tool raises or returns is the result of its call, and ends no loop. Jinfercept's own coroutines run on
another loop, which no tool can hold up.
"""

import inspect
import logging
import sys
import threading
import time
from asyncio import CancelledError, Task
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from jinfercept.intercept.current_call import CURRENT_CALL, OUTSIDE, AtOnce
from jinfercept.intercept.event_loop_thread import EventLoopThread, RunningCallback
from jinfercept.intercept.tool_run import ToolRun
from jinfercept.intercept.tool_values import ToolFailed, ToolValue, plain_failure, plain_value

log = logging.getLogger(__name__)

BLOCKED_S = 0.5
"""Seconds of one callback after which its loop counts as blocked."""
MOST_BLOCKED = 8
"""Blocked loops that run beside the shared one; with more of them there is no fresh loop."""
MOST_OWN = 16
"""Tools with a loop of their own at the same time."""
MOST_LEFT_THREADS = 64
"""Threads of a tool that still run after the timeout or the cancellation of their calls. While a tool has so many, further
calls of it fail."""
_BEAT_S = 0.1
_CLOSED = "these tools are closed"


@final
@dataclass(eq=False, slots=True)
class _LoopCall:
    """Code of a tool for an event loop.

    Attributes:
        tool: name of the tool.
        work: called on the loop; what it returns is awaited if it can be.
        task: once it has begun.
    """

    tool: str
    work: Callable[[], object]
    context: Context
    run: ToolRun[ToolValue]
    loop: "_ToolLoop"
    task: Task[None] | None = None


@final
class _ToolLoop:
    """A loop that runs the code of tools.

    Attributes:
        calls: on it that have not ended.
        blocking: the callback that the watchdog saw last.
        seen_s: seconds for which it has seen this callback.
    """

    def __init__(self) -> None:
        self.thread = EventLoopThread("jinfercept-tools")
        self.calls: set[_LoopCall] = set()
        self.blocking: RunningCallback | None = None
        self.seen_s = 0.0

    @property
    def is_blocked(self) -> bool:
        return self.seen_s >= BLOCKED_S

    def look(self) -> bool:
        """Note what runs; returns whether the loop has become blocked. Called at every beat, however late it comes."""
        running, before = self.thread.running(), self.blocking
        self.blocking = running
        if running is None or before is None or running.handle is not before.handle:
            self.seen_s = 0.0
            return False
        was_blocked = self.is_blocked
        self.seen_s += _BEAT_S
        return self.is_blocked and not was_blocked


@final
class ToolExecutor:
    """The threads and event loops of the tools of an engine, or of a file. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._home: EventLoopThread | None = None
        self._shared: _ToolLoop | None = None
        self._own: dict[str, _ToolLoop] = {}
        self._left: set[_ToolLoop] = set()
        self._blocking_tools: set[str] = set()
        self._left_threads = Counter[str]()
        self._problem: str | None = None
        self._watchdog: threading.Thread | None = None
        self._wake = threading.Event()
        self.is_closed = False

    @property
    def problem(self) -> str | None:
        """Why calls of async tools have to wait for blocked ones; None if they have not."""
        return self._problem

    def submit[T](self, work: Callable[[], Coroutine[Any, Any, T]], tool: str = "") -> ToolRun[T]:
        """Start a coroutine of jinfercept's own, which does not block, with a copy of this context."""
        try:
            with self._lock:
                if self.is_closed:
                    raise ToolFailed(_CLOSED)
                self._home = self._home or EventLoopThread("jinfercept-calls")
            return self._home.run(work, _context(tool))
        except (RuntimeError, OSError, ToolFailed) as error:
            run = ToolRun[T]()
            run.fail(error)
            return run

    def call[*A](self, tool: str, function: Callable[[*A], object], *args: *A) -> ToolRun[Any]:
        """Call a function of a tool with a copy of this context, in which `CURRENT_CALL` has the tool's name.

        The run never raises anything but `ToolFailed`, unless the function is an `AtOnce` one, whose run is returned.

        Args:
            function: may return an awaitable, which is awaited on an event loop, or a `ToolRun`.
        """
        run, context, work = ToolRun[ToolValue](), _context(tool), partial(function, *args)
        if self.is_closed:
            run.fail(ToolFailed(_CLOSED))
        elif isinstance(function, AtOnce):
            return context.run(self._call_now, tool, work, run)
        elif inspect.iscoroutinefunction(function):
            self._place(tool, work, context, run)
        elif self._left_threads[tool] >= MOST_LEFT_THREADS:
            run.fail(ToolFailed(f"{MOST_LEFT_THREADS} cancelled or timed-out calls of {tool} still run"))
        else:
            args_of_thread = self._run_in_thread, tool, work, run
            try:
                threading.Thread(
                    target=context.run, args=args_of_thread, name=f"jinfercept-{tool}", daemon=True
                ).start()
            except RuntimeError as error:  # no more threads
                run.fail(plain_failure(error))
        return run

    def close(self, timeout_s: float = 1.0) -> None:
        """Cancel everything, and wait for the loops; those that are blocked, and hung threads, end with the process."""
        with self._lock:
            self.is_closed = True
            loops = [loop.thread for loop in self._loops()]
            loops += [] if self._home is None else [self._home]
        self._wake.set()
        for loop in loops:
            loop.stop()
        give_up_s = time.monotonic() + timeout_s
        for loop in loops:
            running = loop.running()
            loop.join(min(give_up_s - time.monotonic(), 0.1) if running is not None else give_up_s - time.monotonic())

    # -- threads ---------------------------------------------------------------------------------------------------

    def _call_now(self, tool: str, function: Callable[[], object], run: ToolRun[ToolValue]) -> ToolRun[Any]:
        """Call a function on this thread; returns the run that its call ends with."""
        try:
            value = function()
            if isinstance(value, ToolRun):
                return value
            if inspect.isawaitable(value):
                self._place(tool, lambda: value, copy_context(), run)
            else:
                run.end(plain_value(value))
        except BaseException as error:  # any exception of a tool is its result
            run.fail(plain_failure(error))
        return run

    def _run_in_thread(self, tool: str, function: Callable[[], object], run: ToolRun[ToolValue]) -> None:
        is_left = has_ended = False

        def leave() -> None:
            nonlocal is_left
            with self._lock:
                if not has_ended:
                    is_left = True
                    self._left_threads[tool] += 1

        run.on_cancel(leave)
        recursion_limit = sys.getrecursionlimit()
        try:
            goes_on = self._call_now(tool, function, run)
            if goes_on is not run:
                run.on_cancel(goes_on.cancel)
                run.follow(goes_on.result)
        finally:
            _restore(recursion_limit)
            with self._lock:
                has_ended = True
                self._left_threads[tool] -= is_left
                self._left_threads += Counter()  # drops tools without any

    # -- event loops -----------------------------------------------------------------------------------------------

    def _place(self, tool: str, work: Callable[[], object], context: Context, run: ToolRun[ToolValue]) -> None:
        """Give code of a tool to a loop."""
        try:
            with self._lock:
                if self.is_closed:
                    raise ToolFailed(_CLOSED)
                call = _LoopCall(tool, work, context, run, self._loop_for(tool))
                self._give(call, call.loop)
                if self._watchdog is None:
                    watchdog = threading.Thread(target=self._beat, name="jinfercept-tool-watchdog", daemon=True)
                    with suppress(RuntimeError):  # no more threads: the next call tries again
                        watchdog.start()
                        self._watchdog = watchdog
        except (RuntimeError, OSError, ToolFailed) as error:
            run.fail(plain_failure(error))

    def _give(self, call: _LoopCall, loop: _ToolLoop) -> None:
        call.loop = loop
        loop.calls.add(call)
        loop.thread.call_soon(self._begin, call, loop)

    def _loop_for(self, tool: str) -> _ToolLoop:
        """The loop of a tool, a new one if there is none. Raises `RuntimeError` or `OSError` if there cannot be one."""
        if tool not in self._blocking_tools:
            if self._shared is None or not self._shared.thread.is_alive:
                self._shared = _ToolLoop()
            return self._shared
        loop = self._own.get(tool)
        if loop is None or not loop.thread.is_alive:
            idle = [name for name, own in self._own.items() if not own.calls]
            if len(self._own) >= MOST_OWN and idle:
                self._leave(self._own.pop(idle[0]))
            if len(self._own) >= MOST_OWN:
                raise ToolFailed(f"{MOST_OWN} other tools block their event loops now")
            loop = self._own[tool] = _ToolLoop()
        return loop

    def _begin(self, call: _LoopCall, loop: _ToolLoop) -> None:
        """Begin a call, on the thread of its loop, unless it has moved."""
        with self._lock:
            if call.loop is not loop or call.task is not None:
                return
            loop.thread.loop.set_task_factory(None)  # nor what else an earlier call has set
            loop.thread.loop.set_exception_handler(None)
            call.task = Task(self._await(call), loop=loop.thread.loop, context=call.context)
            task = call.task
        task.add_done_callback(lambda _: self._end(call, loop))
        call.run.on_cancel(lambda: loop.thread.cancel(task))

    async def _await(self, call: _LoopCall) -> None:
        recursion_limit = sys.getrecursionlimit()
        try:
            value = call.work()
            if inspect.isawaitable(value):
                value = await value
            call.run.end(plain_value(value))
        except BaseException as error:  # not even SystemExit may reach the event loop
            call.run.fail(plain_failure(error))
        finally:
            _restore(recursion_limit)

    def _end(self, call: _LoopCall, loop: _ToolLoop) -> None:
        with self._lock:
            loop.calls.discard(call)
        call.run.fail(plain_failure(CancelledError()))  # of a call that was cancelled before its first step

    def _loops(self) -> list[_ToolLoop]:
        shared = [] if self._shared is None else [self._shared]
        return [*shared, *self._own.values(), *self._left]

    def _leave(self, loop: _ToolLoop) -> None:
        """Use a loop for no more calls; it ends with those that it has."""
        self._left.add(loop)

    # -- the watchdog ----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._wake.wait(_BEAT_S):
            with self._lock:
                for loop in self._loops():
                    self._check(loop)
                if not self._left and self._problem is None and not any(loop.calls for loop in self._loops()):
                    self._watchdog = None
                    return

    def _check(self, loop: _ToolLoop) -> None:
        if not loop.thread.is_alive:
            self._replace_ended(loop)
        elif loop.look():
            self._blame(loop)
        if loop is self._shared:
            problem = self._replace(loop) if loop.is_blocked else None
            if problem is not None and self._problem is None:
                _write(logging.ERROR, problem)
            self._problem = problem
        if loop in self._left and not loop.calls and loop.blocking is None:
            loop.thread.stop()

    def _blame(self, loop: _ToolLoop) -> None:
        """Name the tool that blocks a loop, and give it a loop of its own from now on."""
        assert loop.blocking is not None
        tool = loop.blocking.handle.get_context().get(CURRENT_CALL, OUTSIDE).tool
        if tool and tool in self._blocking_tools:
            return
        if tool:
            self._blocking_tools.add(tool)
        code = loop.blocking.frame.f_code
        place = f"{code.co_filename}:{loop.blocking.frame.f_lineno} in {code.co_name}"
        who = f"the tool {tool}" if tool else "a callback of a tool"
        _write(
            logging.WARNING,
            f"{who} blocks the event loop of async tools, at {place}; it should await, or be a sync function",
        )

    def _replace(self, blocked: _ToolLoop) -> str | None:
        """Put a fresh loop in the place of the shared one, and move what has not begun; returns why that cannot be."""
        if len(self._left) >= MOST_BLOCKED:
            return f"{MOST_BLOCKED + 1} event loops are blocked by async tools, the calls of others wait"
        try:
            self._shared = _ToolLoop()
        except (RuntimeError, OSError) as error:
            return f"an async tool blocks the event loop, and there is no fresh one: {error}"
        self._leave(blocked)
        self._move(blocked)
        return None

    def _replace_ended(self, loop: _ToolLoop) -> None:
        """Move what has not begun from a loop that a tool has closed, and fail the rest."""
        if loop is self._shared:
            self._shared = self._problem = None
        self._left.discard(loop)
        self._own = {tool: own for tool, own in self._own.items() if own is not loop}
        self._move(loop)
        for call in loop.calls:
            call.run.fail(ToolFailed("a tool closed the event loop"))
        loop.calls.clear()

    def _move(self, loop: _ToolLoop) -> None:
        for call in [call for call in loop.calls if call.task is None]:
            loop.calls.discard(call)
            try:
                self._give(call, self._loop_for(call.tool))
            except (RuntimeError, OSError, ToolFailed) as error:
                call.run.fail(plain_failure(error))


def _context(tool: str) -> Context:
    """A copy of this context for code of a tool."""
    context = copy_context()
    context.run(lambda: CURRENT_CALL.set(replace(CURRENT_CALL.get(), tool=tool)))
    return context


def _write(level: int, text: str) -> None:
    """Write a line to the log, in a thread: the tool that blocks may hold the lock of a handler."""
    with suppress(RuntimeError):  # no more threads
        threading.Thread(target=log.log, args=(level, "%s", text), name="jinfercept-tool-log", daemon=True).start()


def _restore(recursion_limit: int) -> None:
    """Undo what a tool has done to all threads."""
    if sys.getrecursionlimit() < recursion_limit:
        sys.setrecursionlimit(recursion_limit)
