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
