"""Streams for event loops: the one file outside of endpoints and servers that knows asyncio. See `streaming`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

from jinfercept.engine.parallel_sampling import joined
from jinfercept.engine.streaming import Reader, Received, ends_only_sink
from jinfercept.engine.thread import EngineThread
from jinfercept.errors import RequestError
from jinfercept.events import Event, StreamEvent
from jinfercept.request import Request, RequestOutput


async def aserve(
    thread: EngineThread, requests: Sequence[Request], readers: Mapping[str, Reader] | None = None
) -> list[RequestOutput]:
    """Serve requests to the end, in an event loop."""
    async with AsyncStream(thread, requests, readers, ends_only=True) as stream:
        async for _ in stream:
            pass
        return joined(requests, stream.outputs)


@final
class AsyncStream:
    """As `Stream`, in an event loop. A task that is cancelled while it iterates gives up the requests.

    Args:
        post: has the loop call a function with an event, told of both on the engine's thread; by default one by one.

    Raises:
        RequestError: as `Stream`; or no event loop runs.
    """

    def __init__(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        readers: Mapping[str, Reader] | None = None,
        *,
        ends_only: bool = False,
        post: Callable[[Callable[[Any], None], Any], object] | None = None,
    ) -> None:
        self._received = Received(requests, readers)
        self._thread = thread
        self._inbox: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._listener: asyncio.Task[object] | None = None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._received.open.clear()
            raise RequestError("no event loop runs here", got="an async stream", fix="use stream()") from None
        put, later = self._inbox.put_nowait, post or loop.call_soon_threadsafe

        def sink(event: Event | BaseException) -> None:
            later(put, event)

        self._received.submit(thread, requests, ends_only_sink(sink) if ends_only else sink)

    @property
    def outputs(self) -> Mapping[str, RequestOutput]:
        """Of the requests that are finished, by id."""
        return self._received.outputs

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        received = self._received
        self._follow(asyncio.current_task())
        while not received.ready:
            if not received.open:
                received.check()
                raise StopAsyncIteration
            received.take(await self._inbox.get())
        return received.ready.popleft()

    def abort(self) -> None:
        """As `Stream.abort`."""
        self._thread.abort(self._received.open)

    async def aclose(self) -> None:
        """Give up what is not finished; its pages are free when this returns."""
        received = self._received
        received.ready.clear()
        self._thread.abort(received.open)
        while received.open:
            received.take(await self._inbox.get())
        received.ready.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._received.open:
            self._thread.discard(self._received.open)

    def _follow(self, task: "asyncio.Task[object] | None") -> None:
        """Give up the requests if the task that listens is cancelled, even where it was not waiting for this stream."""
        if task is None or task is self._listener:
            return
        self._listener = task
        thread, received = self._thread, self._received

        def ended(task: "asyncio.Task[object]") -> None:
            if task.cancelled() and received.open:
                thread.abort(received.open)

        task.add_done_callback(ended)
