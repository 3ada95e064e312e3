"""What a tool returns or raises, as plain values that run no code of the tool: made where the tool runs, read anywhere.

A value of a user's class can block or raise whenever it is printed, so that it never leaves the tool's thread or event loop.
"""

from array import array
from typing import cast, final

from jinfercept.calls import Result
from jinfercept.errors import describe_failure, shown
from jinfercept.values.plain import plain

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
    """A return value as a text or token ids. Raises whatever the value's own methods raise, and `ToolFailed` for an array of
    numbers that are no token ids."""
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
    """Anything that was raised, as an exception that is safe to raise anywhere."""
    kind = type(error)  # not by `isinstance`, which may ask the exception itself
    if issubclass(kind, ToolFailed):
        return cast(ToolFailed, error)
    text = _plain_text(describe_failure(error))
    return ToolTimeout(text) if issubclass(kind, TimeoutError) else ToolFailed(text)


def value_result(value: ToolValue, duration_s: float, most_tokens: int) -> Result:
    """The result of a call that returned.

    Args:
        most_tokens: token ids that the model may read; of more ids one more is kept, which makes the result too large.
    """
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
    """A `str` and no subclass, of bounded size, without half surrogate pairs."""
    return str.encode(str.__getitem__(text, slice(MOST_CHARS)), errors="replace").decode()
