"""The call of a tool as the tool's function sees it, and functions of tools that need no thread."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, final

from jinfercept.intercept.tool_run import ToolRun
from jinfercept.intercept.tool_values import ToolValue

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
