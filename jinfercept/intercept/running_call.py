"""A call that runs while its request goes on, until its result is awaited."""

from asyncio import CancelledError
from collections.abc import Callable
from typing import final

from jinfercept.calls import Call
from jinfercept.intercept.current_call import CURRENT_CALL, ToolFunction
from jinfercept.intercept.tool_run import ToolRun
from jinfercept.intercept.tool_values import ToolValue


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
