"""A call that runs in a thread of its own while its request goes on, until its result is awaited. Knows no engine."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from typing import final

from jinfercept.request import Call


@final
class RunningCall:
    """One call of a function, sync or async, in a daemon thread.

    Args:
        name: of its future.
        call: of the tool.
    """

    def __init__(self, name: str, call: Call) -> None:
        self.name, self.call = name, call
        self._result: Future[object] = Future()
        self._has_started = False

    @property
    def has_returned(self) -> bool:
        """Whether the result is there."""
        return self._result.done()

    def start(self, function: Callable[[str], object], arguments: str) -> bool:
        """Call the function in a thread with a copy of this context; False if that was done before."""
        if self._has_started:
            return False
        self._has_started = True
        run = copy_context().run
        threading.Thread(target=run, args=(self._run, function, arguments), name=self.name, daemon=True).start()
        return True

    async def wait(self) -> object:
        """The result of the function. Raises what it raises; a waiter that is cancelled does not cancel the call."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    def _run(self, function: Callable[[str], object], arguments: str) -> None:
        try:
            value = function(arguments)
            value = asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
        except BaseException as error:  # whatever a tool raises is its result
            with suppress(InvalidStateError):
                self._result.set_exception(error)
            return
        with suppress(InvalidStateError):
            self._result.set_result(value)


async def _awaited(value: Awaitable[object]) -> object:
    return await value
