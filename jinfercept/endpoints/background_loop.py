"""An event loop in a thread, for the parts of tools that outlast a call: connections, servers, queues, an inbox.

Tools may be called from any thread and any event loop.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, final

from jinfercept.errors import RequestError

_CLOSING_S = 10.0


@final
class BackgroundLoop:
    """An event loop that runs until it is closed."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jinfercept-tools", daemon=True)
        self._thread.start()

    def submit[T](self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it. Raises `RequestError` if the loop is closed."""
        if self._closed:
            raise RequestError("these tools are closed", got="a call", fix="load them again")
        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    async def run[T](self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine, awaited in any event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Cancel all tasks, wait `_CLOSING_S` seconds for them, and end the thread."""
        if not self._closed:
            self._closed = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSING_S))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
