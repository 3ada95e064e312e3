"""Streams of events for requests that the engine's thread serves, for threads and for event loops.

A stream submits its requests when it is made. It aborts unfinished ones when it is closed or garbage-collected. If a step of
the engine fails, every lost request has its `Finished` with the reason "error", and the iteration ends with `EngineError`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from queue import SimpleQueue
from typing import Any, NoReturn, Self, final

from jinfercept.engine.parallel_sampling import complete, joined
from jinfercept.engine.thread import EngineThread, Sink
from jinfercept.errors import EngineError, RequestError, describe_failure, shown
from jinfercept.events import Event, Finished
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request


def serve(
    thread: EngineThread, requests: Sequence[Request], on_event: Callable[[Any], None] | None = None
) -> list[RequestOutput]:
    """Serve requests to the end. An interrupt aborts them, and their pages are free when it is raised.

    Args:
        on_event: called on this thread.

    Raises:
        EngineError: a step of the engine failed; the error carries the complete outputs.
    """
    if on_event is not None and not callable(on_event):
        raise RequestError("on_event must be a function", got=shown(on_event), fix="pass a function, or leave it out")
    with Stream(thread, requests, ends_only=on_event is None) as stream:
        for event in stream:
            if on_event is not None:
                on_event(event)
        return joined(requests, stream.outputs)


async def aserve(thread: EngineThread, requests: Sequence[Request]) -> list[RequestOutput]:
    """Serve requests to the end, in an event loop."""
    async with AsyncStream(thread, requests, ends_only=True) as stream:
        async for _ in stream:
            pass
        return joined(requests, stream.outputs)


class ReceivedEvents:
    """Submits requests, and stores their events until they are read.

    Args:
        sink: called on the engine's thread with the events.
        ends_only: yield `Finished` events only.

    Raises:
        RequestError: a request can never be served; none is started then.
    """

    def __init__(self, thread: EngineThread, requests: Sequence[Request], sink: Sink, *, ends_only: bool) -> None:
        self._thread, self._requests = thread, requests
        # Of finished requests, by id; complete even if an interrupt kept a `Finished` from being yielded.
        self.outputs: dict[str, RequestOutput] = {}
        self._lost: set[str] = set()
        self._failure: BaseException | None = None
        self._ready: deque[Event] = deque()  # that were not yielded yet
        self._open = {request.id for request in requests}  # that are not finished
        try:
            thread.submit(requests, _ends_only(sink) if ends_only else sink)
        except RequestError:
            self._open.clear()
            raise

    def abort(self) -> None:
        """End the unfinished requests. Their remaining events can still be read, `Finished` last."""
        self._thread.abort(self._open)

    def __del__(self) -> None:
        if self._open:
            self._thread.discard(self._open)

    def _take(self, news: Sequence[Event] | BaseException) -> None:
        if isinstance(news, BaseException):
            self._lost |= self._open
            self._open.clear()
            if isinstance(news, KeyboardInterrupt):
                raise news
            self._failure = news
            return
        self._ready.extend(news)
        for event in news:
            if isinstance(event, Finished):
                if event.failure is not None:
                    self._failure = event.failure
                    self._lost.add(event.request_id)
                self.outputs[event.request_id] = event.output
                self._open.discard(event.request_id)

    def _raise_loss(self, cause: BaseException) -> NoReturn:
        outputs = {name: output for name, output in self.outputs.items() if name not in self._lost}
        failure, fix = describe_failure(cause), "send the lost requests again; `restart()` begins with a new engine"
        if isinstance(cause, EngineError):
            failure, fix = cause.failure, cause.fix
        raise EngineError(failure, complete(self._requests, outputs), fix=fix) from cause


@final
class Stream(ReceivedEvents, AbstractContextManager["Stream"]):
    """Iterates over the events of requests, in order, until all are finished. Two threads must not iterate at once.

    Raises:
        EngineError: when the iteration ends, if a step of the engine failed.
    """

    def __init__(self, thread: EngineThread, requests: Sequence[Request], *, ends_only: bool = False) -> None:
        self._events: deque[Event | BaseException] = deque()
        self._arrived: SimpleQueue[None] = SimpleQueue()
        put, wake = self._events.extend, self._arrived.put

        def sink(news: list[Event] | BaseException) -> None:
            put([news] if isinstance(news, BaseException) else news)
            wake(None)

        super().__init__(thread, requests, sink, ends_only=ends_only)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._ready:
            if not self._open:
                if self._failure is not None:
                    self._raise_loss(self._failure)
                raise StopIteration
            self._take_next()
        return self._ready.popleft()

    def _take_next(self) -> None:
        while not self._events:
            self._thread.check_process()
            self._arrived.get()
        # an event leaves the queue after it was taken, so an interrupt loses none
        first = self._events[0]
        self._take(first if isinstance(first, BaseException) else (first,))
        self._events.popleft()

    def close(self) -> None:
        """Abort the unfinished requests; their pages are free when this returns."""
        self._ready.clear()
        if self._open:
            self.abort()
            while self._open:
                self._take_next()
            self._ready.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class AsyncStream(ReceivedEvents, AbstractAsyncContextManager["AsyncStream"]):
    """As `Stream`, in an event loop. Cancelling the task that iterates aborts the requests.

    Args:
        post: has a function called on the loop, from the engine's thread; None: `call_soon_threadsafe`.

    Raises:
        RequestError: no event loop runs.
    """

    def __init__(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        *,
        ends_only: bool = False,
        post: Callable[[Callable[[Any], None], Any], object] | None = None,
    ) -> None:
        self._open = set[str]()
        self._events: asyncio.Queue[list[Event] | BaseException] = asyncio.Queue()
        self._listener: asyncio.Task[object] | None = None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RequestError("no event loop is running", got="an async stream", fix="use stream()") from None
        put, later = self._events.put_nowait, post or loop.call_soon_threadsafe

        def sink(news: list[Event] | BaseException) -> None:
            later(put, news)

        super().__init__(thread, requests, sink, ends_only=ends_only)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if (task := asyncio.current_task()) is not self._listener:
            self._watch(task)
        while not self._ready:
            if not self._open:
                if self._failure is not None:
                    self._raise_loss(self._failure)
                raise StopAsyncIteration
            self._take(await self._events.get())
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Abort the unfinished requests; their pages are free when this returns."""
        self._ready.clear()
        self.abort()
        while self._open:
            self._take(await self._events.get())
        self._ready.clear()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _watch(self, task: "asyncio.Task[object] | None") -> None:
        self._listener = task
        if task is None:
            return
        thread, is_open = self._thread, self._open

        def ended(task: "asyncio.Task[object]") -> None:
            if task.cancelled() and is_open:
                thread.abort(is_open)

        # the task may be cancelled while it waits for something else
        task.add_done_callback(ended)


def _ends_only(sink: Sink) -> Sink:
    def filtered(news: list[Event] | BaseException) -> None:
        if isinstance(news, BaseException):
            sink(news)
        elif ends := [event for event in news if isinstance(event, Finished)]:
            sink(list[Event](ends))

    return filtered
