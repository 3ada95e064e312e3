"""A call that runs while its request goes on, until its result is awaited. Knows no engine."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from typing import Any, final

from jinfercept.intercept.dispatcher import OUTLASTING
from jinfercept.request import Call


@final
class RunningCall:
    """One call of a function: a sync one runs in a daemon thread of its own, an async one on the event loop of all such calls.

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
        self._result: Future[object] = Future()
        self._task: Future[object] | None = None  # of an async function

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
        OUTLASTING.get().at_end(self.cancel)
        run = copy_context().run
        try:
            threading.Thread(target=run, args=(self._run, function, arguments), name=self.name, daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._fail(error)

    def skip(self) -> None:
        """The function is called elsewhere, and its caller waits for it."""
        self.is_read = True
        self._settle("its result was given at once")

    async def wait(self) -> object:
        """The result of the function. Raises what it raises; a waiter that is cancelled does not cancel the call."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    def cancel(self) -> None:
        """Cancel the call, if its function is async; a sync one runs to its end, and its result is dropped."""
        self._result.cancel()
        if (task := self._task) is not None:
            task.cancel()

    def _run(self, function: Callable[[str], object], arguments: str) -> None:
        try:
            value = None if self._result.done() else function(arguments)
            if inspect.isawaitable(value):
                self._await(_awaited(value))
                return
        except BaseException as error:  # whatever a tool raises is its result
            self._fail(error)
            return
        self._settle(value)

    def _await(self, value: Coroutine[Any, Any, object]) -> None:
        """Run an async function on the event loop of all of them."""
        self._task = task = asyncio.run_coroutine_threadsafe(value, OUTLASTING.get().loop())
        task.add_done_callback(self._take)
        if self._result.done():  # cancelled meanwhile
            task.cancel()

    def _take(self, task: Future[object]) -> None:
        try:
            self._settle(task.result())
        except BaseException as error:
            self._fail(error)

    def _settle(self, value: object) -> None:
        with suppress(InvalidStateError):
            self._result.set_result(value)

    def _fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self._result.set_exception(error)


async def _awaited(value: Awaitable[object]) -> object:
    return await value
