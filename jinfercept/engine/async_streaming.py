"""Streams for event loops, as `streaming` has them for threads. The only file of this room that knows asyncio."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, final

from jinfercept.engine.parallel_sampling import joined
from jinfercept.engine.streaming import Received, ends_only_sink
from jinfercept.engine.thread import EngineThread
from jinfercept.errors import RequestError
from jinfercept.events import Event
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request


async def aserve(thread: EngineThread, requests: Sequence[Request]) -> list[RequestOutput]:
    """Serve requests to the end, in an event loop."""
    async with AsyncStream(thread, requests, ends_only=True) as stream:
        async for _ in stream:
            pass
        return joined(requests, stream.outputs)


@final
class AsyncStream(AbstractAsyncContextManager["AsyncStream"]):
    """As `Stream`, in an event loop. Cancelling the task that iterates aborts the requests.

    Args:
        post: called on the engine's thread with a function and what to call it with on the loop; `call_soon_threadsafe` by
            default.

    Raises:
        RequestError: as `Stream`, or if no event loop runs.
    """

    def __init__(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        *,
        ends_only: bool = False,
        post: Callable[[Callable[[Any], None], Any], object] | None = None,
    ) -> None:
        self._received = Received(requests)
        self._thread = thread
        self._events: asyncio.Queue[list[Event] | BaseException] = asyncio.Queue()
        self._listener: asyncio.Task[object] | None = None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._received.open.clear()
            raise RequestError("no event loop is running", got="an async stream", fix="use stream()") from None
        put, later = self._events.put_nowait, post or loop.call_soon_threadsafe

        def sink(news: list[Event] | BaseException) -> None:
            later(put, news)

        self._received.submit(thread, requests, ends_only_sink(sink) if ends_only else sink)

    @property
    def outputs(self) -> Mapping[str, RequestOutput]:
        """The outputs of the finished requests, by id."""
        return self._received.outputs

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        received = self._received
        if (task := asyncio.current_task()) is not self._listener:
            self._watch(task)
        while not received.ready:
            if not received.open:
                received.check()
                raise StopAsyncIteration
            received.take(await self._events.get())
        return received.ready.popleft()

    def abort(self) -> None:
        self._thread.abort(self._received.open)

    async def aclose(self) -> None:
        """Abort the unfinished requests; their pages are free when this returns."""
        received = self._received
        received.ready.clear()
        self._thread.abort(received.open)
        while received.open:
            received.take(await self._events.get())
        received.ready.clear()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._received.open:
            self._thread.discard(self._received.open)

    def _watch(self, task: "asyncio.Task[object] | None") -> None:
        """Abort the requests if the iterating task is cancelled, even while it does not wait for this stream."""
        self._listener = task
        if task is None:
            return
        thread, received = self._thread, self._received

        def ended(task: "asyncio.Task[object]") -> None:
            if task.cancelled() and received.open:
                thread.abort(received.open)

        task.add_done_callback(ended)
