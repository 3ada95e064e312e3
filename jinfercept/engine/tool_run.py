"""A call of a tool that runs on another thread or event loop: its cancellation, and its result as a plain value.

A value of a user's class can block or raise, even when it is printed. So values become plain where the tool runs, and only
plain values leave it: they run no code of the tool.
"""

import asyncio
import threading
from array import array
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, cast, final

from jinfercept.calls import Result
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
