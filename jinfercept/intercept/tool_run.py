"""Work that runs on another thread or event loop: its result, and its cancellation."""

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, final


@final
class ToolRun[T]:
    """One piece of work while it runs. It can be awaited in any event loop; a waiter that is cancelled cancels the work.

    Attributes:
        result: what the work returned or raised. It is there when the work has ended, however it was cancelled before.
        is_cancelled: whether `cancel` was called.
    """

    def __init__(self) -> None:
        self.result = Future[T]()
        self.result.set_running_or_notify_cancel()
        self.is_cancelled = False
        self._cancel: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        """Replace the function that cancels the work; it is called now if `cancel` was."""
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
        """Note what the work returned. Only the first of `end` and `fail` counts."""
        with suppress(InvalidStateError):
            self.result.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Note what the work raised."""
        with suppress(InvalidStateError):
            self.result.set_exception(error)

    def follow(self, result: Future[T]) -> None:
        """End as another future does."""

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
