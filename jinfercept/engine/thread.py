"""One thread that steps an engine while there is work and hands every event to whoever asked for its request.

Everybody who serves through it, from any thread or event loop, is batched together. It knows neither prompts nor texts:
requests go in, events come out. The thread lives while there is work and a moment longer, so an engine that is dropped can
be collected. Of what a step raises, the engine recovers by itself if it can; if it cannot, the thread ends, and every later
request is refused with what happened.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, final

from jinfercept.engine.engine import Engine
from jinfercept.errors import EngineError, RequestError, describe_failure
from jinfercept.events import Event, Finished
from jinfercept.request import Request

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds that the thread waits for more work before it ends; the next request starts another."""

Sink = Callable[[Event | BaseException], None]
"""Told, on the engine's thread, of a request's events; of an error instead if the engine itself failed. Must not block."""


@final
class EngineThread:
    """Serves requests on one engine. Its methods may be called from any thread but the engine's own.

    Args:
        engine: stepped here and nowhere else while a request is open.
        told: of the events of every step, on the engine's thread.
    """

    def __init__(self, engine: Engine, told: Callable[[list[Event]], None]) -> None:
        self._engine, self._told = engine, told
        self._questions: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._sinks: dict[str, Sink] = {}  # of the requests that are not finished
        self._lock = threading.RLock()  # entered itself, not through its condition: no interrupt leaves it locked
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None  # the engine cannot go on
        self._process_id = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child: the thread, and perhaps its lock, stayed with the parent."""
        return os.getpid() != self._process_id

    @property
    def failure(self) -> str | None:
        """What the engine failed of, if it cannot go on."""
        return describe_failure(self._failure) if self._failure is not None else None

    @property
    def busy(self) -> bool:
        """Whether anybody waits for a request."""
        self.check_process()
        with self._lock:
            return any(sink is not _nobody for sink in self._sinks.values())

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Serve requests: an idle engine sees all of them in its first step.

        Args:
            requests: with ids of their own.
            sink: told of their events; the last of each is `Finished`, unless an error comes instead, which is the last of all.

        Raises:
            RequestError: one of them can never be served (none is, then), the engine is closed, or this is its own thread.
            EngineError: the engine failed before and could not recover.
        """
        self.check_caller("a request")
        with self._lock:  # no step begins meanwhile
            if self._closed:
                raise RequestError("this LLM is closed", got="a request", fix="make a new one")
            if self._failure is not None:
                raise EngineError(describe_failure(self._failure), fix="`restart()` begins with a new engine")
            begun: list[str] = []
            try:
                for request in requests:
                    self._engine.submit(request)
                    self._sinks[request.id] = sink
                    begun.append(request.id)
            except RequestError:
                self._give_up(begun, silent=True)
                raise
            finally:
                if self._sinks and self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="jinfercept-engine", daemon=True)
                    self._thread.start()
                self._changed.notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their sinks are told `Finished`. Those that are over are left alone."""
        self.check_process()
        with self._lock:
            self._give_up(list(request_ids), silent=False)

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody listens to any more: their pages are free after the step."""
        if self.is_elsewhere:
            return
        with self._lock:
            self._give_up(list(request_ids), silent=True)

    def ask[T](self, question: Callable[[], T]) -> Future[T]:
        """Answer a question about the engine between two of its steps, when nothing moves. It must not take long."""
        self.check_process()
        answer = Future[T]()
        with self._lock:
            if self._thread is None:
                _answer(question, answer)
            else:
                self._questions.append((question, answer))
                self._engine.wake.set()
                self._changed.notify()
        return answer

    def close(self) -> None:
        """Abort whatever runs, tell its sinks, and end the thread."""
        self.check_caller("close()")
        with self._lock:
            self._closed = True
            self._give_up(list(self._sinks), silent=False)
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._close_engine()

    def _close_engine(self) -> BaseException | None:
        """Close the engine; returns what it raises, an engine in pieces for example."""
        try:
            self._engine.close()
        except Exception as error:
            log.warning("the engine could not be closed in order: %s", describe_failure(error))
            return error
        return None

    def check_process(self) -> None:
        """Raise `RequestError` in a forked child, where nothing would ever answer."""
        if self.is_elsewhere:
            raise RequestError(
                "an LLM works only in the process that made it",
                got="a forked child",
                fix="make an LLM in the child, started with multiprocessing's `spawn`",
            )

    def check_caller(self, what: str) -> None:
        """Raise `RequestError` on the engine's own thread, which would wait for itself, and in a forked child."""
        self.check_process()
        thread = self._thread
        if thread is not None and thread.ident == threading.get_ident():
            raise RequestError(
                f"{what} on the engine's own thread", got="a detector that uses its own LLM", fix="do it in a tool"
            )

    def _give_up(self, request_ids: Iterable[str], silent: bool) -> None:
        for request_id in request_ids:
            if request_id in self._sinks:
                if silent:
                    self._sinks[request_id] = _nobody
                self._engine.abort(request_id)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._engine.settled:  # else it has contexts to move while nobody is served
                    self._changed.wait_for(self._is_needed, LINGER_S)
                questions, self._questions = self._questions, []
                if not questions and (self._failure or (not self._sinks and (self._engine.settled or self._closed))):
                    self._thread = None
                    return
            for question, answer in questions:
                _answer(question, answer)
            if self._failure is not None:
                continue
            try:
                events = self._engine.step()
                self._told(events)
            except BaseException as error:  # the engine has lost its requests; whoever waits for them is told why
                self._fail(error)
            else:
                self._deliver(events)

    def _is_needed(self) -> bool:
        """Whether the thread has to do something, be it to end."""
        return bool(self._sinks or self._closed or self._questions or self._failure)

    def _deliver(self, events: list[Event]) -> None:
        with self._lock:
            told = [
                (self._sinks.pop(event.request_id, _nobody), event)
                if isinstance(event, Finished)
                else (self._sinks.get(event.request_id, _nobody), event)
                for event in events
            ]
        for sink, event in told:
            self._tell(sink, event)

    def _fail(self, error: BaseException) -> None:
        """The engine raised: all requests are lost. It goes on only after an interrupt that it has recovered from."""
        log.error("the engine failed; its requests are lost", exc_info=error)
        worse = self._close_engine()
        cause = self._engine.failure or (error if isinstance(error, Exception) else worse)
        with self._lock:
            self._failure = cause
            lost, self._sinks = self._sinks, {}
        for sink in {id(sink): sink for sink in lost.values()}.values():
            self._tell(sink, cause or error)

    def _tell(self, sink: Sink, event: Event | BaseException) -> None:
        """A sink that raises has gone, an event loop that was closed for example: its requests are given up."""
        try:
            sink(event)
        except Exception as error:
            log.warning("nobody takes the events of a request any more, it is given up: %s", error)
            with self._lock:
                self._give_up([name for name, other in self._sinks.items() if other is sink], silent=True)


def _nobody(event: Event | BaseException) -> None:
    """The sink of a request that nobody listens to."""


def _answer(question: Callable[[], Any], answer: Future[Any]) -> None:
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(question())
        except Exception as error:  # it is told to whoever asked
            answer.set_exception(error)
