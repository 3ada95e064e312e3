"""Waiting for requests that the engine's thread serves: to the end, or event by event (in an event loop: `async_streaming`).

A stream's requests start when it is made. Whoever stops listening gives them up, by closing it or by dropping it. What events
mean is not known here; a reader may put others in their place.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self, final

from jinfercept.engine_thread import EngineThread, Sink
from jinfercept.errors import RequestError
from jinfercept.forks import joined
from jinfercept.intercept.pieces import Arguments, CallEnded, CallStarted, Content, Reasoning
from jinfercept.request import Event, Finished, Request, RequestOutput

StreamEvent = Event | Content | Reasoning | CallStarted | Arguments | CallEnded


class Reader(Protocol):
    """Reads one request's events."""

    def read(self, event: Event) -> Iterable[StreamEvent]:
        """What is shown of an event; of `Finished`, a `Finished` last."""
        ...


def serve(
    thread: EngineThread,
    requests: Sequence[Request],
    readers: Mapping[str, Reader] | None = None,
    on_event: Callable[[Any], None] | None = None,
) -> list[RequestOutput]:
    """Serve requests to the end; whatever interrupts that gives them up, and their pages are free when it is raised.

    Args:
        readers: by request id.
        on_event: told, on this thread, of `StreamEvent`s.
    """
    with Stream(thread, requests, readers, ends_only=on_event is None) as stream:
        for event in stream:
            if on_event is not None:
                on_event(event)
        return joined(requests, stream.outputs)


class Received:
    """What has come of a stream's requests.

    Attributes:
        open: the requests that are not finished.
        outputs: of those that are, by id.
        ready: what was not yielded yet.
    """

    def __init__(self, requests: Sequence[Request], readers: Mapping[str, Reader] | None) -> None:
        self._readers = readers or {}
        self.open = {request.id for request in requests}
        self.outputs: dict[str, RequestOutput] = {}
        self.ready: deque[StreamEvent] = deque()

    def submit(self, thread: EngineThread, requests: Sequence[Request], sink: Sink) -> None:
        try:
            thread.submit(requests, sink)
        except RequestError:
            self.open.clear()
            raise

    def take(self, event: Event | BaseException) -> None:
        """Note what came; raises it if it is an error, which is then the end."""
        if isinstance(event, BaseException):
            self.open.clear()
            raise event
        reader = self._readers.get(event.request_id)
        for read in (event,) if reader is None else reader.read(event):
            self.ready.append(read)
            if isinstance(read, Finished):
                self.outputs[read.request_id] = read.output
                self.open.discard(read.request_id)


@final
class Stream:
    """Iterates over the events of requests, in order, until all are finished. Not for two threads at once.

    Args:
        thread: serves the requests.
        requests: they are submitted now.
        readers: by request id.
        ends_only: leave out everything but `Finished`.

    Raises:
        RequestError: a request can never be served; none is started then.
    """

    def __init__(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        readers: Mapping[str, Reader] | None = None,
        *,
        ends_only: bool = False,
    ) -> None:
        self._received = Received(requests, readers)
        self._thread = thread
        self._inbox: deque[Event | BaseException] = deque()
        self._arrived: SimpleQueue[None] = SimpleQueue()
        put, wake = self._inbox.append, self._arrived.put

        def sink(event: Event | BaseException) -> None:
            put(event)
            wake(None)

        self._received.submit(thread, requests, ends_only_sink(sink) if ends_only else sink)

    @property
    def outputs(self) -> Mapping[str, RequestOutput]:
        """Of the requests that are finished, by id; known even where an interrupt came between a `Finished` and its reader."""
        return self._received.outputs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        received = self._received
        while not received.ready:
            if not received.open:
                raise StopIteration
            self._take_next()
        return received.ready.popleft()

    def _take_next(self) -> None:
        """Wait for an event. An interrupt may come between any two steps of this: what has arrived stays until it was taken."""
        while not self._inbox:
            self._arrived.get()
        self._received.take(self._inbox[0])
        self._inbox.popleft()

    def abort(self) -> None:
        """End what is not finished; what it has come to is still to be read, `Finished` last."""
        self._thread.abort(self._received.open)

    def close(self) -> None:
        """Give up what is not finished; its pages are free when this returns."""
        received = self._received
        received.ready.clear()
        self._thread.abort(received.open)
        while received.open:
            self._take_next()
        received.ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._received.open:
            self._thread.discard(self._received.open)


def ends_only_sink(sink: Sink) -> Sink:
    """A sink that is told of ends and errors."""

    def told(event: Event | BaseException) -> None:
        if isinstance(event, Finished | BaseException):
            sink(event)

    return told
