"""Runs engines on an `EngineSetup`, one at a time, for an `LLM` or a server."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, final

from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.engine import Engine
from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.engine.state import EngineState
from jinfercept.engine.streaming import AsyncStream
from jinfercept.engine.thread import ending_at_exit, interrupts_held_back
from jinfercept.errors import ConfigError, EngineError, RequestError
from jinfercept.models.adapted import without_adapters
from jinfercept.models.in_memory import Replacement
from jinfercept.outputs import FinishReason
from jinfercept.request import Request
from jinfercept.sched.door import Overload
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.plugins import label
from jinfercept.start.assembly import EngineSetup, Serving
from jinfercept.start.disk_tier import identity_of
from jinfercept.start.weights import ServedWeights


@final
class ServedEngine:
    """The engine that runs, on the thread that steps it. A restart and new weights put another one in its place."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup  # with the options of the last restart; its runner is closed with this
        self.weights = ServedWeights(setup.model, setup.runner, one_host=setup.leader is None)
        self.closed = False
        self._stats: EngineStats | None = None
        self._lock = threading.Lock()  # held while weights change
        self._begin(setup.serve())
        setup.runner.executables.compile_behind()

    def __str__(self) -> str:
        setup = self.setup
        sizes = f"kv_tokens={setup.memory_plan.kv_tokens}, max_model_len={setup.memory_plan.max_model_len}"
        state = ", closed" if self.closed else ""
        return f"{setup.name!r}, dtype={setup.dtype!r}, {sizes}, policy={self.policy_name!r}{state}"

    def __reduce__(self) -> NoReturn:
        raise RequestError("an LLM cannot be copied", got="a copy of it", fix="make one there, or ask a server")

    @property
    def policy_name(self) -> str:
        return label(self.setup.config.scheduling.policy)

    @property
    def overload(self) -> Overload:
        return self.setup.config.scheduling.overload

    def _begin(self, serving: Serving) -> None:
        self._serving, self._engine, self.thread = serving, serving.engine, serving.thread
        self._engine.requests.weights_version = self.weights.version
        self._engine.is_resting = self.weights.level is not None
        if self._stats is not None:
            self._stats = serving.stats()

    # -- requests and questions, from any thread -------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[Request],
        *,
        ends_only: bool = False,
        post: Callable[[Callable[[Any], None], Any], object] | None = None,
    ) -> AsyncStream:
        """Serve requests; arguments and errors are those of `AsyncStream`."""
        return AsyncStream(self.thread, requests, ends_only=ends_only, post=post)

    def release(self, request_id: str) -> None:
        """Drop the retained context of a finished request between two steps. Unknown ids are ignored."""
        self.thread.ask(lambda: self._engine.release(request_id))

    def reset_prefix_cache(self) -> bool:
        self.check_open("to reset its prefix cache")
        return self.thread.ask(self._engine.reset_prefix_cache).result()

    def snapshot(self) -> Future[EngineState]:
        """The engine's state between two steps; the answer waits for the step that runs."""
        return self.ask(lambda stats: EngineState.of(self._engine, stats))

    def ask[T](self, question: Callable[[EngineStats], T]) -> Future[T]:
        """Call a function of the engine's stats on the engine's thread between two steps.

        It returns copies, and takes well under a step.
        """

        def answer() -> T:
            # the first question begins to count: an engine that nothing is asked of counts nothing
            if self._stats is None:
                self._stats = self._serving.stats()
            return question(self._stats)

        return self.thread.ask(answer)

    def place_at_door(self, requests: Sequence[Request]) -> Future[int]:
        """Place from 1, among their tenant's requests at the door, of the last of these requests; 0 if none is there."""
        return self.thread.ask(lambda: self._engine.place_at_door(requests))

    def check_pages(self) -> None:
        """Assert between two steps that no page is lost or owned twice. Raises `AssertionError`."""
        self.thread.ask(self._engine.check_pages).result()

    @property
    def failure(self) -> str | None:
        """The error of an engine that cannot go on; None while it serves."""
        return self.thread.failure

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def num_waiting_by_tenant(self, tenants: Iterable[str]) -> dict[str, int]:
        return self._engine.num_waiting_by_tenant(tenants)

    @property
    def counters(self) -> SchedulerCounters:
        return replace(self._engine.scheduler.counters)  # a copy

    @property
    def adapters(self) -> AdapterTable:
        return self.setup.adapters

    # -- another engine, and changes between two steps -------------------------------------------------------------

    def restart(self, options: Mapping[str, Any]) -> None:
        self.check_idle("start over")
        if self.weights.level is not None:
            raise RequestError("a sleeping LLM cannot be restarted", got="restart()", fix="wake() it before")
        setup = self.setup.changed(**options)
        serving = setup.serve()
        with self.using_jax(), interrupts_held_back():
            self._serving.close()
            self.setup = setup
            setup.executor.reset()
            self._begin(serving)

    def start_over(self, new: Replacement) -> None:
        """Serve new weights on a new engine."""
        setup = self.setup.changed()
        serving = setup.serve()
        with interrupts_held_back():
            self._serving.close()
            try:
                self.weights.write(new, self._engine)
                if (disk := setup.disk) is not None:
                    weights = without_adapters(setup.runner.params)
                    identity = identity_of(setup.model.config, weights, setup.config)
                    setup = replace(setup, disk=disk._replace(identity=identity))
                    serving.close()
                    serving = setup.serve()
            finally:
                setup.executor.reset()
                self.setup = setup
                self._begin(serving)

    def between_steps(
        self, change: Callable[[Engine], None], *, first_end: tuple[FinishReason, None] | None = None
    ) -> None:
        """Change something between two steps.

        If the change raises an `EngineError`, it has left a whole engine: the error is raised here, and ends no request.
        """
        failures = list[EngineError]()

        def attempt() -> None:
            try:
                change(self._engine)
            except EngineError as error:
                failures.append(error)

        with interrupts_held_back():
            self.thread.ask(lambda: self._engine.between_steps(attempt, first_end=first_end)).result()
        if failures:
            raise failures[0]

    @contextmanager
    def changing_weights(self, what: str) -> Iterator[None]:
        """Use JAX in the caller's thread, one after the other, and while no adapter is loaded. `what` is as in `check_open`."""
        self.check_open(what)
        adapters = self.setup.room
        with self._lock, self.using_jax(), nullcontext() if adapters is None else adapters.lock:
            yield

    @contextmanager
    def using_jax(self) -> Iterator[None]:
        """Use the engine's settings of JAX in the caller's thread, which leaves JAX before the interpreter ends."""
        with ending_at_exit(), self.setup.settings():
            yield

    def check_in_flight(self, what: str) -> None:
        """Raise an error if weights cannot change beside unfinished requests: on several hosts, and with a disk tier."""
        if self.setup.leader is not None:
            raise RequestError("an LLM on several hosts cannot do this", got=what, fix="use one host")
        if self.setup.disk is not None:
            raise ConfigError("kv_disk holds pages of the old weights", got=what, fix="start without kv_disk")

    def check_idle(self, what: str) -> None:
        """Raise `RequestError` if requests are served, or the LLM is closed. `what` is a verb for the error."""
        self.check_open(f"to {what}")
        if self.thread.busy:
            raise RequestError(
                f"only an idle LLM can {what}",
                got="requests that are not finished",
                fix="wait for them, or close their streams",
            )

    def check_open(self, got: str) -> None:
        """Raise `RequestError` if the LLM is closed."""
        if self.closed:
            raise RequestError("this LLM is closed", got=got, fix="make a new one")

    def close(self) -> None:
        if self.closed or self.thread.is_elsewhere:
            return
        self.thread.check_caller("close()")
        with self.using_jax():
            self.closed = True
            self._serving.close()
            self.setup.close()
