"""One thread that steps an engine while there is work, and passes every event to the sink of its request.

The thread ends a second after its last work, so that an engine without references can be garbage-collected. If the engine
cannot recover from a failed step, the thread ends, and every later request is refused with the error. At the end of the
interpreter, and at Ctrl-C, threads stop before, since one that is still inside JAX then aborts the process. `atexit` calls the
last function registered first, and JAX registers its clean-up when it is imported. So functions that are registered here later
run before JAX frees its devices, and after other threads than daemons have ended.
"""

import atexit
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType, MethodType
from typing import Any, Final, final
from weakref import WeakMethod, finalize

from jinfercept.engine.engine import Engine
from jinfercept.errors import EngineError, RequestError, describe_failure
from jinfercept.events import Event, Finished
from jinfercept.request import Request

LONGEST_END_S: Final = 30.0
"""Seconds that the end of the process waits for a thread, at most: a step or a compilation cannot be interrupted."""
_UNWINDING_S: Final = 3.0
"""The same for a thread that frees what it had begun to compile, if the user's code does not go on with it."""


def call_at_exit(method: MethodType) -> Callable[[], None]:
    """Call a bound method when the interpreter ends, if its object still exists then. Returns a function that cancels this."""
    reference = WeakMethod(method)

    def call() -> None:
        if (bound := reference()) is not None:
            bound()

    atexit.register(call)
    cancel = finalize(method.__self__, atexit.unregister, call)
    cancel.atexit = False
    return cancel


@contextmanager
def ending_at_exit() -> Iterator[None]:
    """If the interpreter ends while a daemon thread is in the body, raise `SystemExit` in that thread, and wait for it."""
    thread, thread_id = threading.current_thread(), threading.get_ident()
    process_id, ended = os.getpid(), threading.Event()
    if thread is threading.main_thread():
        yield
        return

    def end() -> None:
        if os.getpid() == process_id:  # a forked child does not have this thread
            # arrives between two steps of Python code
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(SystemExit))
            ended.wait(LONGEST_END_S)
            with suppress(AssertionError):  # a thread that Python did not start
                thread.join(_UNWINDING_S)

    atexit.register(end)
    try:
        if not threading.main_thread().is_alive():  # what is registered now may not be called
            raise SystemExit
        yield
    finally:
        ended.set()
        atexit.unregister(end)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block. It arrives on the main thread only, where it could end any step halfway."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived and callable(before):
            before(*arrived[-1])


log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds that the thread waits for more work before it ends; the next request starts another."""

Sink = Callable[[list[Event] | BaseException], None]
"""Called on the engine's thread with a request's next events, or with an error if the engine failed. Must not block."""


@final
class EngineThread:
    """Serves requests on one engine. Its methods may be called from any thread but the engine's own.

    Args:
        engine: stepped here and nowhere else while a request is open.
        settings: makes the context in which the engine is stepped and closed.
    """

    def __init__(self, engine: Engine, settings: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._engine, self._settings = engine, settings
        self._questions: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._sinks: dict[str, Sink] = {}  # by id, of the requests that are not finished
        self._lock = threading.RLock()  # entered itself, not through its condition: no interrupt leaves it locked
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None  # from which the engine could not recover
        self._process_id = os.getpid()
        self._forget_exit = call_at_exit(self._close_at_exit)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a forked child: the thread stayed with the parent, and perhaps the lock is held there."""
        return os.getpid() != self._process_id

    @property
    def failure(self) -> str | None:
        """The error from which the engine could not recover; None while it can serve."""
        return describe_failure(self._failure) if self._failure is not None else None

    @property
    def busy(self) -> bool:
        """Whether a caller waits for a request."""
        self.check_process()
        with self._lock:
            return any(sink is not _ignore for sink in self._sinks.values())

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Serve requests. An idle engine takes them in with one step, up to the limit of a step.

        Args:
            sink: receives their events. A request's last event is `Finished`; an error ends all requests.

        Raises:
            RequestError: one of them can never be served (none is, then), the engine is closed, or this is its own thread.
            EngineError: the engine failed and could not recover.
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
                self._abort(begun, silent=True)
                raise
            finally:
                if self._sinks and self._thread is None:
                    self._start(begun)
                self._changed.notify()

    def _start(self, request_ids: Iterable[str]) -> None:
        thread = threading.Thread(target=self._run, name="jinfercept-engine", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # the process has no more threads
            self._abort(request_ids, silent=True)
            raise EngineError(
                describe_failure(error), fix="end other threads of this process, and try again"
            ) from error
        self._thread = thread

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their sinks receive `Finished`. Finished requests are ignored."""
        self.check_process()
        with self._lock:
            self._abort(list(request_ids), silent=False)

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests without calling their sinks. Their pages are free after the step."""
        if self._closed or self.is_elsewhere:
            return
        with self._lock:
            self._abort(list(request_ids), silent=True)

    def ask[T](self, question: Callable[[], T]) -> Future[T]:
        """Call a function on the engine's thread between two steps; it must not take long. The future has its result."""
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

    def close(self, longest_s: float | None = None) -> None:
        """End the thread, and all unfinished requests as lost: their sinks receive `Finished`. Wait `longest_s` at most."""
        self.check_caller("close()")
        self._forget_exit()
        closed = EngineError("the LLM was closed", fix="make a new LLM, and send the lost requests again")
        with self._lock:
            self._closed = True
            thread = self._thread
            if self._sinks:
                self.ask(lambda: self._engine.between_steps(lambda: None, first_end=("error", closed)))
            self._changed.notify()
        if thread is not None:
            thread.join(longest_s)
            if thread.is_alive():
                log.warning("the engine's thread does not end: a step takes more than %s s", longest_s)
                return
        self._close_engine()

    def _close_at_exit(self) -> None:
        if not self.is_elsewhere:
            self.close(LONGEST_END_S)

    def _close_engine(self) -> BaseException | None:
        try:
            with self._settings():
                self._engine.close()
        except Exception as error:
            log.warning("the engine could not be closed in order: %s", describe_failure(error))
            return error
        return None

    def check_process(self) -> None:
        """Raise `RequestError` in a forked child, which does not have the engine's thread."""
        if self.is_elsewhere:
            raise RequestError(
                "an LLM works only in the process that made it",
                got="a forked child",
                fix="make an LLM in the child, started with multiprocessing's `spawn`",
            )

    def check_caller(self, what: str) -> None:
        """Raise `RequestError` on the engine's own thread, which would wait for itself, and in a forked child."""
        self.check_process()
        if self._thread is threading.current_thread():
            raise RequestError(
                f"{what} on the engine's own thread", got="a detector that uses its own LLM", fix="do it in a tool"
            )

    def _abort(self, request_ids: Iterable[str], silent: bool) -> None:
        for request_id in request_ids:
            if request_id in self._sinks:
                if silent:
                    self._sinks[request_id] = _ignore
                self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            with self._settings():
                self._serve()
        except BaseException as error:  # of code that the engine calls and does not own, such as a handler of logs
            self._end(error)

    def _end(self, error: BaseException) -> None:
        # Nothing that is not the engine's own is called before its state is settled.
        sinks = self._lose_all(error)
        with self._lock:
            self._thread = None
            questions, self._questions = self._questions, []
        failure = EngineError(describe_failure(error), fix="`restart()` begins with a new engine")
        for sink in sinks:
            with suppress(BaseException):
                sink(error)
        for _, answer in questions:
            with suppress(BaseException):
                answer.set_exception(failure)
        self._close_engine()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._engine.quiescent:  # else it still moves pages of retained contexts
                    self._changed.wait_for(
                        lambda: self._sinks or self._closed or self._questions or self._failure, LINGER_S
                    )
                questions, self._questions = self._questions, []
                if not questions and (self._failure or (not self._sinks and (self._engine.quiescent or self._closed))):
                    self._thread = None
                    return
            for question, answer in questions:
                _answer(question, answer)
            if self._failure is not None:
                continue
            try:
                events = self._engine.step()
            except BaseException as error:  # the engine has lost its requests: their sinks receive the error
                self._fail(error)
            else:
                self._deliver(events)

    def _deliver(self, events: list[Event]) -> None:
        last, batches = None, list[tuple[Sink, list[Event]]]()
        with self._lock:
            for event in events:
                take = self._sinks.pop if isinstance(event, Finished) else self._sinks.get
                sink = take(event.request_id, _ignore)
                if sink is not last:
                    last = sink
                    batches.append((sink, []))
                batches[-1][1].append(event)
        for sink, batch in batches:
            self._call_sink(sink, batch)

    def _fail(self, error: BaseException) -> None:
        # The thread goes on only if the engine has recovered from an interrupt.
        worse = self._close_engine()
        cause = self._engine.failure or (worse if isinstance(error, KeyboardInterrupt) else error)
        for sink in self._lose_all(cause):
            self._call_sink(sink, cause or error)
        log.error("the engine failed; its requests are lost", exc_info=error)

    def _lose_all(self, failure: BaseException | None) -> Iterable[Sink]:
        with self._lock:
            # None: the engine has recovered
            self._failure = failure
            lost, self._sinks = self._sinks, {}
        return {id(sink): sink for sink in lost.values()}.values()

    def _call_sink(self, sink: Sink, news: list[Event] | BaseException) -> None:
        try:
            sink(news)
        except Exception as error:
            # a sink of a closed event loop raises
            with self._lock:
                self._abort([name for name, other in self._sinks.items() if other is sink], silent=True)
            with suppress(Exception):  # of a handler of logs
                log.warning("the sink of a request failed, and its requests are aborted: %s", describe_failure(error))


def _ignore(news: list[Event] | BaseException) -> None:
    """The sink of a discarded request."""


def _answer(question: Callable[[], Any], answer: Future[Any]) -> None:
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(question())
        except Exception as error:  # the caller receives it
            answer.set_exception(error)
