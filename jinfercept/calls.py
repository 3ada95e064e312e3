"""A tool, a call of it as a model writes it, and the result that the model reads. Frozen values."""

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from jinfercept.errors import RequestError, shown
from jinfercept.sampling_params import is_number
from jinfercept.values import short_repr

Status = Literal["ok", "error", "timeout", "too_large", "empty", "unknown_tool", "started"]

CallMode = Literal["sync", "parallel", "async"]
"""When a call in context markup language runs, see `AsyncCalls`."""

READER = "<reader>"
"""Name under which the time from an answer to its follow-up is learned, as under names of tools. No tool has it."""


def check_tool_name(name: str) -> None:
    if not isinstance(name, str) or name == READER:
        raise RequestError(f"a tool's name must be a text other than {READER}", got=shown(name), fix="another name")


def _name_of(function: Callable[..., object]) -> str:
    try:
        name = getattr(function, "__name__", "")
    except Exception:  # an object's own `__getattr__` may raise anything
        name = ""
    return name if isinstance(name, str) and name else type(function).__name__


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, as the model wrote it."""

    name: str
    arguments: str
    #: The call's first token and the one after its last, counted in the request's `token_ids`.
    span: tuple[int, int] = (0, 0)
    #: Expected duration in seconds; None: it is estimated.
    expected_s: float | None = None
    #: Ties the result to the call in a chat template; "" where the template needs none.
    id: str = ""
    #: The client that made the request runs the call. The request ends with this turn instead of pausing, and the other calls
    #: of the turn are not run either.
    by_caller: bool = False
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call. A failure is a result too: its `text` says what went wrong, for the model to read.

    The status "started" is the placeholder of a call that goes on.
    """

    text: str
    status: Status = "ok"
    token_ids: tuple[int, ...] | None = None
    duration_s: float = 0.0
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Tool:
    """A Python function that a model can call, and how the call and its result look in the text.

    Attributes:
        function: takes the text between `start` and `stop`, and returns text, or a list or an array of token ids; sync or
            async. In a chat it takes its declared arguments by name, and returns anything that is text or JSON.
        name: "": the function's name.
        start: text that opens a call, as the model writes it; None: calls are found in another way.
        stop: text that ends it and hands over.
        result: how the returned text is put into the stream; `{}` is the text.
        timeout_s: seconds after which the result is that the tool timed out.
        max_result_tokens: a longer result is cut, and its text says so.
        calls: when its calls run. In a chat, "parallel" calls of one turn run at the same time, calls behind a "sync" one
            wait for its return, and "async" calls return futures. None: as `AsyncCalls` says, else in a chat "parallel".
    """

    function: Callable[..., object | Awaitable[object]]
    _: KW_ONLY
    name: str = ""
    start: str | None = None
    stop: str | None = None
    result: str = "{}"
    timeout_s: float = 60.0
    max_result_tokens: int = 1024
    calls: CallMode | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError("a tool must have a function", got=shown(self.function), fix="pass a Python function")
        check_tool_name(self.name)
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.function))
        marks = (self.start, self.stop)
        if marks != (None, None) and not all(isinstance(mark, str) and mark for mark in marks):
            raise RequestError(
                f"tool {self.name!r} needs both start and stop, or neither",
                got=f"start={self.start!r}, stop={self.stop!r}",
                fix="give the text that opens a call and the text that ends it",
            )
        if not isinstance(self.result, str) or "{}" not in self.result:
            raise RequestError(f"result of tool {self.name!r} has no {{}}", got=shown(self.result), fix="add {}")
        if not (is_number(self.timeout_s) and self.timeout_s > 0):
            raise RequestError(
                f"timeout_s of {self.name!r} is wrong", got=shown(self.timeout_s), fix="seconds, above 0"
            )
        if type(room := self.max_result_tokens) is not int or room < 1:
            problem = f"tool {self.name!r} needs room for its result"
            raise RequestError(problem, got=shown(room), fix="a whole number from 1")
        if self.calls not in (None, "sync", "parallel", "async"):
            raise RequestError(f"calls of tool {self.name!r}", got=shown(self.calls), fix="sync, parallel or async")
        if self.calls is not None and self.start is not None:
            raise RequestError(
                f"tool {self.name!r} has both start and stop texts and a mode of asynchronous calls",
                got=f"start={self.start!r}, calls={self.calls!r}",
                fix="leave start and stop out, or calls",
            )
