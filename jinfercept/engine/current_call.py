"""The call of a tool as the tool's function sees it, calls that go on behind it, and functions of tools that need no thread."""

from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, final

from jinfercept.calls import Call
from jinfercept.engine.tool_run import ToolRun, ToolValue

ToolFunction = Callable[[str], object]
"""Takes a call's arguments as the model wrote them; returns a value, an awaitable or a `ToolRun`."""


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """A call while its function runs.

    Attributes:
        tool: name of the tool; "" outside of tools.
        request_id: of the request that calls; "" outside of calls.
        trace: W3C trace context: headers by name; empty without a trace.
        outlast: starts another function, which may go on behind the result of this call, and calls its last argument at the
            end of the request; if the call is over, it only does the latter. None outside of calls.
    """

    tool: str = ""
    id: str = ""
    request_id: str = ""
    tenant: str = ""
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    outlast: Callable[[ToolFunction, str, Callable[[], None]], ToolRun[ToolValue]] | None = None


OUTSIDE = CurrentCall()
"""Where no tool runs."""
CURRENT_CALL = ContextVar("jinfercept_current_call", default=OUTSIDE)
"""The call whose code runs: in a tool's function, in its tasks, and in its jobs in threads."""


CALL_KEY = "jinfercept/call"
"""Key under which the metadata of a call in the process of Python tools have `fields_of` it."""


def fields_of(call: CurrentCall) -> dict[str, Any]:
    """The fields of a call that code in another process gets: all but `outlast`."""
    values = {each.name: getattr(call, each.name) for each in fields(call) if each.name != "outlast"}
    return values | {"trace": dict(call.trace)}


@final
@dataclass(frozen=True, slots=True)
class AtOnce:
    """A function of a tool that never blocks: what it returns goes on elsewhere. The caller's own thread calls it."""

    function: ToolFunction

    def __call__(self, arguments: str) -> object:
        return self.function(arguments)


def around(function: ToolFunction, wrapper: ToolFunction) -> ToolFunction:
    """A wrapper of a function, which blocks if the function does."""
    return AtOnce(wrapper) if isinstance(function, AtOnce) else wrapper


@final
class RunningCall:
    """One call of a function.

    Attributes:
        has_started: whether the function is called.
        is_read: whether the request has its result without a future, so that none follows.
    """

    def __init__(self, name: str, call: Call) -> None:
        self.name, self.call = name, call
        self.has_started = self.is_read = False
        self._run = ToolRun[ToolValue]()

    @property
    def has_returned(self) -> bool:
        """Whether the result is there."""
        return self._run.result.done()

    def start(self, function: ToolFunction, arguments: str, ended: Callable[[], None]) -> None:
        """Call the function, in a call of its tool, until the request ends.

        Args:
            ended: called once when the call has ended, or was cancelled.
        """
        self.has_started = True
        self._run.result.add_done_callback(lambda result: ended())
        outlast = CURRENT_CALL.get().outlast
        assert outlast is not None
        run = outlast(function, arguments, self.cancel)
        self._run.on_cancel(run.cancel)
        self._run.follow(run.result)

    def skip(self) -> None:
        """The function is called elsewhere, and its caller waits for it."""
        self.is_read = True
        self._run.end("its result was given at once")

    def wait(self) -> ToolRun[ToolValue]:
        """The result of the function. Raises what it raises; a waiter that is cancelled does not cancel the call."""
        waiting = ToolRun[ToolValue]()
        waiting.follow(self._run.result)
        return waiting

    def cancel(self) -> None:
        """Cancel the call, if its function is async; a sync one runs to its end, and its result is dropped."""
        self._run.cancel()
        self._run.fail(CancelledError())
