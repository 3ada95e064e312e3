"""Waits for requests that the engine's thread serves, to the end or event by event; for event loops see `async_streaming`.

A stream submits its requests when it is made, and aborts the unfinished ones when it is closed or garbage-collected. It knows
no event but `Finished`. If a step of the engine fails, each lost request still has its
`Finished`, with finish reason "error", and the iteration ends with `EngineError`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Self, final

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
        on_event: called on this thread with every `Event`.

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


class Received:
    """The received events and outputs of a stream's requests.

    Attributes:
        open: ids of the requests that are not finished.
        outputs: of the finished requests, by id.
        ready: events that were not yielded yet.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._lost: set[str] = set()
        self._failure: BaseException | None = None
        self.open = {request.id for request in requests}
        self.outputs: dict[str, RequestOutput] = {}
        self.ready: deque[Event] = deque()

    def submit(self, thread: EngineThread, requests: Sequence[Request], sink: Sink) -> None:
        """Submit the requests; none stays open if that raises."""
        try:
            thread.submit(requests, sink)
        except RequestError:
            self.open.clear()
            raise

    def take(self, news: Sequence[Event] | BaseException) -> None:
        """Take events, or an error, which ends all open requests; a `KeyboardInterrupt` is raised at once."""
        if isinstance(news, BaseException):
            self._lost |= self.open
            self.open.clear()
            if isinstance(news, KeyboardInterrupt):
                raise news
            self._failure = news
            return
        self.ready.extend(news)
        for event in news:
            if isinstance(event, Finished):
                if event.failure is not None:
                    self._failure = event.failure
                    self._lost.add(event.request_id)
                self.outputs[event.request_id] = event.output
                self.open.discard(event.request_id)

    def check(self) -> None:
        """Raise `EngineError` if the engine lost requests. For the end of the iteration."""
        if self._failure is not None:
            raise self._error(self._failure)

    def _error(self, cause: BaseException) -> EngineError:
        outputs = {name: output for name, output in self.outputs.items() if name not in self._lost}
        failure, fix = describe_failure(cause), "send the lost requests again; `restart()` begins with a new engine"
        if isinstance(cause, EngineError):
            failure, fix = cause.failure, cause.fix
        error = EngineError(failure, complete(self._requests, outputs), fix=fix)
        error.__cause__ = cause
        return error


@final
class Stream(AbstractContextManager["Stream"]):
    """Iterates over the events of requests, in order, until all are finished. Not for two threads at once.

    Args:
        thread: serves the requests.
        requests: submitted at once.
        ends_only: yield `Finished` events only.

    Raises:
        RequestError: a request can never be served; none is started then.
        EngineError: at the end of the iteration, if a step of the engine failed.
    """

    def __init__(self, thread: EngineThread, requests: Sequence[Request], *, ends_only: bool = False) -> None:
        self._received = Received(requests)
        self._thread = thread
        self._events: deque[Event | BaseException] = deque()
        self._arrived: SimpleQueue[None] = SimpleQueue()
        put, wake = self._events.extend, self._arrived.put

        def sink(news: list[Event] | BaseException) -> None:
            put([news] if isinstance(news, BaseException) else news)
            wake(None)

        self._received.submit(thread, requests, ends_only_sink(sink) if ends_only else sink)

    @property
    def outputs(self) -> Mapping[str, RequestOutput]:
        """The outputs of the finished requests, by id; complete even if an interrupt kept a `Finished` from being yielded."""
        return self._received.outputs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        received = self._received
        while not received.ready:
            if not received.open:
                received.check()
                raise StopIteration
            self._take_next()
        return received.ready.popleft()

    def _take_next(self) -> None:
        """Wait for an event and take it. An interrupt at any point of this loses no event."""
        while not self._events:
            self._thread.check_process()
            self._arrived.get()
        first = self._events[0]
        self._received.take(first if isinstance(first, BaseException) else (first,))
        self._events.popleft()

    def abort(self) -> None:
        """End the unfinished requests; their remaining events can still be read, `Finished` last."""
        self._thread.abort(self._received.open)

    def close(self) -> None:
        """Abort the unfinished requests; their pages are free when this returns."""
        received = self._received
        received.ready.clear()
        self._thread.abort(received.open)
        while received.open:
            self._take_next()
        received.ready.clear()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._received.open:
            self._thread.discard(self._received.open)


def ends_only_sink(sink: Sink) -> Sink:
    """A sink that passes on `Finished` events and errors only."""

    def filtered(news: list[Event] | BaseException) -> None:
        if isinstance(news, BaseException):
            sink(news)
        elif ends := [event for event in news if isinstance(event, Finished)]:
            sink(list[Event](ends))

    return filtered
