"""A call that runs while its request goes on, until its result is awaited."""

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import final

from jinfercept.calls import Call
from jinfercept.intercept.dispatcher import OUTLASTING
from jinfercept.intercept.tool_run import ToolRun
from jinfercept.intercept.tool_values import ToolValue


@final
class RunningCall:
    """One call of a function.

    Args:
        name: of its future.
        call: of the tool.

    Attributes:
        has_started: whether the function is called.
        is_read: whether the request has its result without a future, so that none follows.
    """

    def __init__(self, name: str, call: Call) -> None:
        self.name, self.call = name, call
        self.has_started = self.is_read = False
        self._result: Future[ToolValue] = Future()
        self._run: ToolRun[ToolValue] | None = None

    @property
    def has_returned(self) -> bool:
        """Whether the result is there."""
        return self._result.done()

    def start(self, function: Callable[[str], object], arguments: str, ended: Callable[[], None]) -> None:
        """Call the function with a copy of this context, a call of the dispatcher's, until the request ends.

        Args:
            ended: called once when the call has ended, or was cancelled.
        """
        self.has_started = True
        self._result.add_done_callback(lambda result: ended())
        outlasting = OUTLASTING.get()
        outlasting.at_end(self.cancel)
        if self._result.done():
            return
        self._run = run = outlasting.executor.call(self.call.name, lambda: function(arguments))
        run.result.add_done_callback(self._take)
        if self._result.done():  # cancelled meanwhile
            run.cancel()

    def skip(self) -> None:
        """The function is called elsewhere, and its caller waits for it."""
        self.is_read = True
        with suppress(InvalidStateError):
            self._result.set_result("its result was given at once")

    def wait(self) -> ToolRun[ToolValue]:
        """The result of the function. Raises what it raises; a waiter that is cancelled does not cancel the call."""
        waiting = ToolRun[ToolValue]()
        waiting.follow(self._result)
        return waiting

    def cancel(self) -> None:
        """Cancel the call, if its function is async; a sync one runs to its end, and its result is dropped."""
        self._result.cancel()
        if (run := self._run) is not None:
            run.cancel()

    def _take(self, value: Future[ToolValue]) -> None:
        error = value.exception()
        with suppress(InvalidStateError):
            if error is None:
                self._result.set_result(value.result())
            else:
                self._result.set_exception(error)
