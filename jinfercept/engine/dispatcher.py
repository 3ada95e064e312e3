"""Runs the calls of tools off the engine's thread and returns one `Result` per call, also if the tool fails.

Polling enforces timeouts, so no function can hold a request back. Results after a timeout are dropped, and calls whose result
is no longer needed are cancelled.
"""

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, Protocol, final, runtime_checkable

from jinfercept.calls import Call, Result, Tool
from jinfercept.engine.tool_executor import (
    CURRENT_CALL,
    CurrentCall,
    ToolExecutor,
    ToolFunction,
    ToolRun,
    ToolValue,
    failure_result,
    value_result,
)
from jinfercept.hooks import Constraint

log = logging.getLogger(__name__)


class Clock(Protocol):
    """Monotonic seconds since an arbitrary start, and a wait that an event ends."""

    def now(self) -> float: ...

    def wait(self, wake: Event, timeout_s: float) -> None:
        """Return when `wake` is set, or after `timeout_s` seconds; clears `wake`."""
        ...


@final
class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)

    def wait(self, wake: Event, timeout_s: float) -> None:
        wake.wait(timeout_s)
        wake.clear()


class CallDispatcher(Protocol):
    """Answers calls, off the engine's thread. No method waits."""

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool], tenant: str) -> None: ...

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        """The requests whose calls have all returned since the last poll, with the results in the calls' order."""
        ...

    def start(self, request_id: str, call: Call, tools: Mapping[str, Tool], tenant: str) -> None:
        """Start an asynchronous call of a request. Its id is unique among the request's calls in flight."""
        ...

    def poll_started(self) -> list[tuple[str, Call, Result]]:
        """The asynchronous calls that had returned at the last `poll` and were not given yet, in the order of their returns."""
        ...

    def next_s(self) -> float | None:
        """The deadline of the call that times out next, in seconds of the engine's clock; None if no call is in flight."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget the calls of a request, asynchronous ones too, if it has any."""
        ...


@runtime_checkable
class CopyableConstraint(Constraint, Protocol):
    """A constraint whose state can be copied. Requests with another one have no drafts."""

    def copy(self) -> Constraint:
        """The same state; what it accepts does not change this one."""
        ...


def lasted_s(calls: tuple[Call, ...], results: tuple[Result, ...], tools: Mapping[str, Tool]) -> float:
    """Seconds from the beginning of a pause to its last result."""
    began_s = end_s = 0.0
    for call, result in zip(calls, results, strict=True):
        end_s = max(end_s, began_s + result.duration_s)
        if (tool := tools.get(call.name)) is not None and tool.calls == "sync":
            began_s += result.duration_s
    return end_s


@dataclass(eq=False)
class _Pause:
    request_id: str
    calls: tuple[Call, ...]  # of one interception, or one asynchronous call
    tools: Mapping[str, Tool]
    tenant: str
    asynchronous: bool
    started: list[float] = field(default_factory=list[float])  # when each call began, of those that have
    results: dict[int, Result] = field(default_factory=dict[int, Result])  # by the call's place
    runs: dict[int, ToolRun[Any]] = field(
        default_factory=dict[int, ToolRun[Any]]
    )  # likewise, of the calls that have begun
    cancelled: bool = False


@final
class Dispatcher:
    """Answers the calls of one engine's requests.

    Args:
        on_result: called, from any thread, when `poll` has a new result.
        now: the clock of deadlines, in seconds.
    """

    def __init__(self, on_result: Callable[[], None], now: Callable[[], float] = time.monotonic) -> None:
        self._on_result = on_result
        self._now = now
        self._open: dict[str, list[_Pause]] = {}  # by request
        self._returned: list[tuple[str, Call, Result]] = []  # asynchronous calls
        self._arrived: deque[tuple[_Pause, int, Result]] = deque()
        self._deadlines: list[tuple[float, int, _Pause, int]] = []
        self._count = 0
        self._ends: dict[str, list[Callable[[], None]]] = {}  # cancel calls that outlast their pause, by request
        self._executor = ToolExecutor()
        self._lock = threading.Lock()

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool], tenant: str = "") -> None:
        """Start the calls of one interception. They run in parallel, but calls behind a sync tool's wait for its result."""
        self._begin(_Pause(request_id, calls, tools, tenant, asynchronous=False))

    def start(self, request_id: str, call: Call, tools: Mapping[str, Tool], tenant: str = "") -> None:
        self._begin(_Pause(request_id, (call,), tools, tenant, asynchronous=True))

    def _begin(self, pause: _Pause) -> None:
        self._open.setdefault(pause.request_id, []).append(pause)
        self._start_next(pause)

    def _start_next(self, pause: _Pause) -> None:
        for index in range(len(pause.started), len(pause.calls)):
            call, began_s = pause.calls[index], self._now()
            pause.started.append(began_s)
            tool = pause.tools.get(call.name)
            if tool is None:
                names = ", ".join(sorted(pause.tools)) or "none"
                text = f"error: no tool {call.name!r} (there are: {names})"
                self._deliver(pause, index, Result(text, "unknown_tool"))
                continue
            self._count += 1
            heapq.heappush(self._deadlines, (began_s + tool.timeout_s, self._count, pause, index))
            self._start(pause, index, tool, call.arguments)
            if tool.calls == "sync":
                return

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        answers: list[tuple[str, tuple[Result, ...]]] = []
        while self._arrived:
            self._settle(*self._arrived.popleft(), answers)
        while self._deadlines and self._deadlines[0][0] <= self._now():
            _, _, pause, index = heapq.heappop(self._deadlines)
            text = f"error: {pause.calls[index].name} timed out"
            waited_s = self._now() - pause.started[index]
            self._settle(pause, index, Result(text, "timeout", duration_s=waited_s), answers)
            pause.runs[index].cancel()
        return answers

    def poll_started(self) -> list[tuple[str, Call, Result]]:
        returned, self._returned = self._returned, []
        return returned

    def next_s(self) -> float | None:
        while self._deadlines:
            deadline, _, pause, index = self._deadlines[0]
            if not pause.cancelled and index not in pause.results:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def cancel(self, request_id: str) -> None:
        with self._lock:
            pauses = self._open.pop(request_id, ())
            for pause in pauses:
                pause.cancelled = True
            cancels = self._ends.pop(request_id, ())
        for pause in pauses:
            for run in [*pause.runs.values()]:
                run.cancel()
        for cancel in cancels:
            cancel()
        if self._returned:
            self._returned = [returned for returned in self._returned if returned[0] != request_id]

    def close(self) -> None:
        """Cancel all calls and stop the event loops; hung threads end with the process."""
        with self._lock:
            unfinished = {*self._open, *self._ends}
        for request_id in unfinished:
            self.cancel(request_id)
        self._executor.close(timeout_s=0.0)

    def _settle(self, pause: _Pause, index: int, result: Result, answers: list[tuple[str, tuple[Result, ...]]]) -> None:
        # only the first result of a call counts, and none after `cancel`
        if pause.cancelled or index in pause.results:
            return
        pause.results[index] = result
        if result.status in ("error", "timeout"):  # its text may be a client's, and is not logged
            call, seconds = pause.calls[index], self._now() - pause.started[index]
            log.info("tool %.80r of request %s: %s after %.1f s", call.name, pause.request_id, result.status, seconds)
        if len(pause.results) < len(pause.calls):
            if index == len(pause.started) - 1:  # the others wait for this one
                self._start_next(pause)
            return
        pauses = self._open[pause.request_id]
        pauses.remove(pause)
        if not pauses:
            del self._open[pause.request_id]
        if pause.asynchronous:
            self._returned.append((pause.request_id, pause.calls[0], result))
        else:
            answers.append((pause.request_id, tuple([pause.results[place] for place in range(len(pause.calls))])))

    def _start(self, pause: _Pause, index: int, tool: Tool, arguments: str) -> None:
        def begin() -> ToolRun[Any]:
            outlast = partial(self._outlast, pause, index, tool.name)
            CURRENT_CALL.set(
                CurrentCall(tool.name, pause.calls[index].id, pause.request_id, pause.tenant, outlast=outlast)
            )
            return self._executor.call(tool.name, tool.function, arguments)

        def deliver(value: Future[Any]) -> None:
            duration_s, error = self._now() - pause.started[index], value.exception()
            if error is not None:
                result = failure_result(error, duration_s)
            else:
                result = value_result(value.result(), duration_s, tool.max_result_tokens)
            self._deliver(pause, index, result)

        run = pause.runs[index] = Context().run(begin)
        run.result.add_done_callback(deliver)

    def _deliver(self, pause: _Pause, index: int, result: Result) -> None:
        self._arrived.append((pause, index, result))
        self._on_result()

    def _outlast(
        self,
        pause: _Pause,
        index: int,
        tool: str,
        function: ToolFunction,
        arguments: str,
        at_end: Callable[[], None],
    ) -> ToolRun[ToolValue]:
        # See `CurrentCall.outlast`. Called from any thread.
        with self._lock:
            is_over = pause.cancelled or index in pause.results
            if not is_over:
                self._ends.setdefault(pause.request_id, []).append(at_end)
        if is_over:
            at_end()
            return ToolRun()
        return self._executor.call(tool, function, arguments)
