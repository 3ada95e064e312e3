"""Runs engines on an `EngineSetup`, one at a time: what a server asks of an engine."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, final, get_args

import jax

from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.async_streaming import AsyncStream
from jinfercept.engine.process_end import ending_at_exit, interrupts_held_back
from jinfercept.engine.state import EngineState
from jinfercept.engine.thread import EngineThread
from jinfercept.errors import ConfigError, EngineError, ModelError, RequestError, shown
from jinfercept.meter.engine_stats import EngineStats
from jinfercept.models.adapted import without_adapters
from jinfercept.models.adapters import AdapterWeights
from jinfercept.models.load import dtype_name, lazy_params
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.protocol import Params
from jinfercept.outputs import FinishReason
from jinfercept.request import Adapter, Request
from jinfercept.sched.estimator import EstimatorChoice
from jinfercept.sched.orders import OrderChoice
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.plugins import label
from jinfercept.sched.policies import PolicyChoice
from jinfercept.startup.assembly import Assembled
from jinfercept.startup.disk_tier import identity_of
from jinfercept.startup.served_adapters import ServedAdapters
from jinfercept.startup.start import EngineSetup
from jinfercept.startup.weights import DEEPEST, ServedWeights
from jinfercept.values.option_types import check_type
from jinfercept.weights.in_memory import Replacement
from jinfercept.weights.leaves import made
from jinfercept.weights.named import NameFilter, WeightTree

UpdateMode = Literal["keep", "recompute", "abort"]
"""What becomes of unfinished requests when the weights change, see `LLM.update_weights`."""


@final
class EngineHost:
    """The engine that runs, on the thread that steps it. `restart` and `update_weights` put another one in its place.

    Args:
        setup: the model and the options; its runner is closed with the host.

    Attributes:
        setup: the same with the options of the last `restart`.
        thread: serves requests on the engine that runs.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.setup, self._runner = setup, setup.executor
        self.weights = ServedWeights(setup.model, setup.runner, one_host=setup.leader is None)
        self.closed = False
        self._lock = threading.Lock()  # held while weights change
        self._begin(setup.assemble())
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
        """As `LLM.policy_name`."""
        return label(self.setup.own.filled(self.setup.config)[0])

    def _begin(self, parts: Assembled) -> None:
        self._engine, self._dispatcher, self._stats = parts
        self._engine.weights_version = self.weights.version
        self._engine.is_resting = self.weights.level is not None
        self.thread = EngineThread(self._engine, self.setup.settings)

    def _end(self) -> None:
        self.thread.close()
        self._dispatcher.close()

    # -- requests and questions, from any thread -------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[Request],
        *,
        ends_only: bool = False,
        post: Callable[[Callable[[Any], None], Any], object] | None = None,
    ) -> AsyncStream:
        """Serve requests that were made before; arguments and errors as those of `AsyncStream`."""
        return AsyncStream(self.thread, requests, ends_only=ends_only, post=post)

    def release(self, request_id: str) -> None:
        """Drop the retained context of a finished request between two steps; a request without one is ignored."""
        self.thread.ask(lambda: self._engine.release(request_id))

    def reset_prefix_cache(self) -> bool:
        """As `LLM.reset_prefix_cache`, between two steps."""
        self.check_open("to reset its prefix cache")
        return self.thread.ask(self._engine.reset_prefix_cache).result()

    def snapshot(self) -> Future[EngineState]:
        """The engine's state between two steps; the answer waits for the step that runs."""
        return self.thread.ask(lambda: EngineState.of(self._engine, self._stats))

    def ask[T](self, question: Callable[[EngineStats], T]) -> Future[T]:
        """The answer of a function of the engine's stats, called on the engine's thread between two steps.

        Args:
            question: returns copies; takes well under a step.
        """
        return self.thread.ask(lambda: question(self._stats))

    def check_pages(self) -> None:
        """Assert between two steps that no page is lost or owned twice. Raises `AssertionError`."""
        self.thread.ask(self._engine.check_pages).result()

    @property
    def failure(self) -> str | None:
        """The error of an engine that cannot go on; None while it serves."""
        return self.thread.failure

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn now."""
        return self._engine.num_waiting

    def num_waiting_by_tenant(self, tenants: Iterable[str]) -> dict[str, int]:
        """Requests of each of these tenants that wait for their turn now."""
        return self._engine.num_waiting_by_tenant(tenants)

    @property
    def counters(self) -> SchedulerCounters:
        """Totals of the scheduler since the engine began, as a copy."""
        return replace(self._engine.scheduler.counters)

    # -- another engine --------------------------------------------------------------------------------------------

    def restart(
        self,
        policy: PolicyChoice | None,
        estimator: EstimatorChoice | None,
        order: OrderChoice | None,
        flags: Mapping[str, Any],
    ) -> None:
        """As `LLM.restart`."""
        self.check_idle("start over")
        if self.weights.level is not None:
            raise RequestError("a sleeping LLM cannot be restarted", got="restart()", fix="wake() it before")
        setup = self.setup.changed(policy, estimator, order, **flags)
        parts = setup.assemble()
        with self._using_jax(), interrupts_held_back():
            self.setup = setup
            self._end()
            self._runner.reset()
            self._begin(parts)

    def update_weights(
        self,
        weights: WeightTree | str | Path,
        mode: UpdateMode | None,
        names: Mapping[str, str] | None = None,
        only: NameFilter | None = None,
    ) -> int:
        """As `LLM.update_weights`."""
        if mode not in (modes := (*get_args(UpdateMode), None)):
            raise ConfigError("no such mode of an update", got=mode, fix=f"one of {', '.join(map(str, modes))}")
        if mode is None:
            self.check_idle("take new weights")
        self.check_open("to take new weights")
        with self._changing_weights():
            tree = self._read(weights) if isinstance(weights, str | Path) else weights
            new = self.weights.replacement(tree, names, only)
            if mode is None and self.weights.level is None:
                self._start_over(new)
            else:
                self._check_in_flight("new weights while requests run")

                def take() -> None:
                    self.weights.write(new, self._engine)
                    self._engine.take_weights(self.weights.version, recompute=mode != "keep")

                self._between_steps(take, first_end=("abort", None) if mode == "abort" else None)
            return self.weights.version

    def _read(self, source: str | Path) -> Params:
        """The weights of a checkpoint, all of which can be read. Where the device is this CPU, each is read again when it is
        written, so that the weights are in memory once; elsewhere they are in the host's memory."""
        if not Path(source).exists():
            raise ModelError("there is no such checkpoint", got=str(source), fix="name a directory or a .gguf file")
        host = ModelMesh((jax.local_devices(backend="cpu")[0],))
        weights = lazy_params(source, dtype_name(self.setup.config.model.dtype), host)
        if jax.default_backend() != "cpu":
            return made(weights)
        for weight in jax.tree.leaves(weights):
            (weight.check or weight.make)()
        return weights

    def _start_over(self, new: Replacement) -> None:
        """Serve new weights on a new engine."""
        setup = self.setup.changed()
        parts = setup.assemble()
        with interrupts_held_back():
            self._end()
            try:
                self.weights.write(new, self._engine)
                if (disk := setup.disk) is not None:
                    weights = without_adapters(setup.runner.params)
                    identity = identity_of(setup.model.config, weights, setup.config)
                    setup = replace(setup, disk=disk._replace(identity=identity))
                    parts = setup.assemble()
            finally:
                self._runner.reset()
                self.setup = setup
                self._begin(parts)

    def sleep(self, level: int, *, discard: bool) -> None:
        """As `LLM.sleep`."""
        if type(level) is not int or level not in range(DEEPEST + 1):
            raise ConfigError("no such level of sleep", got=shown(level), fix="0, 1 or 2")
        check_type("discard", discard, bool)
        if discard and level != DEEPEST:
            raise ConfigError("only a sleep of level 2 discards weights", got=f"level {level}", fix="sleep at level 2")
        self.check_open("to sleep")
        with self._changing_weights():
            if level:
                self._check_in_flight("to sleep")
            self._between_steps(lambda: self.weights.sleep(self._engine, level, discard=discard))

    def wake(self, weights: WeightTree | None, names: Mapping[str, str] | None = None) -> None:
        """As `LLM.wake`."""
        self.check_open("to wake")
        with self._changing_weights():
            new = None if weights is None else self.weights.replacement(weights, names)
            if self.weights.level is None and new is None:
                return
            self.weights.check_wake(is_given=new is not None)

            def wake() -> None:
                self.weights.wake(self._engine, new)
                if new is not None:
                    self._engine.take_weights(self.weights.version, recompute=True)

            self._between_steps(wake)

    def _between_steps(self, change: Callable[[], None], *, first_end: tuple[FinishReason, None] | None = None) -> None:
        """Change something that leaves a whole engine when an `EngineError` says that it failed: the error is raised here
        and ends no request."""
        failures = list[EngineError]()

        def attempt() -> None:
            try:
                change()
            except EngineError as error:
                failures.append(error)

        with interrupts_held_back():
            self.thread.ask(lambda: self._engine.between_steps(attempt, first_end=first_end)).result()
        if failures:
            raise failures[0]

    def _check_in_flight(self, what: str) -> None:
        if self.setup.leader is not None:
            raise RequestError("an LLM on several hosts cannot do this", got=what, fix="use one host")
        if self.setup.disk is not None:
            raise ConfigError("kv_disk holds pages of the old weights", got=what, fix="start without kv_disk")

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """Use JAX in the caller's thread, one after the other, and while no adapter is loaded."""
        adapters = self.setup.room
        with self._lock, self._using_jax(), nullcontext() if adapters is None else adapters.lock:
            yield

    def load_adapter(self, name: str, directory: str | Path, *, in_place: bool = False) -> Adapter:
        """As `LLM.load_lora`. Waits for the disk and for the end of a step, not for requests."""
        return self._put_adapter(name, lambda room: room.read(directory), str(directory), in_place=in_place)

    def update_adapter(self, name: str, matrices: WeightTree, scale: float, names: Mapping[str, str] | None) -> Adapter:
        """As `LLM.update_lora`."""
        return self._put_adapter(name, lambda room: room.in_memory(matrices, scale, names), "memory", in_place=True)

    def _put_adapter(
        self, name: str, read: Callable[[ServedAdapters], AdapterWeights], source: str, *, in_place: bool
    ) -> Adapter:
        self.check_open("to load an adapter")
        setup = self.setup
        if setup.room is None:
            raise ConfigError("this LLM has no room for adapters", got=name, fix="start with max_loras")
        if setup.leader is not None:
            raise ConfigError("an LLM on several hosts cannot load adapters later", got=name, fix="name it in `loras`")
        if not setup.runner.params.embed:
            raise RequestError("the weights are not on the device", got="an adapter to load", fix="wake() before")
        weights = read(setup.room)
        with setup.room.table.new_slot(name, replace=in_place) as slot:
            with setup.room.lock, self._using_jax():
                params = setup.room.written(setup.runner.params, slot, weights)
                self.thread.ask(lambda: setup.runner.use(params)).result()
            return setup.room.table.put(Adapter(name, slot, weights.digest, source))

    def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_lora`."""
        self.check_open("to unload an adapter")
        self.adapters.remove(name)

    @property
    def adapters(self) -> AdapterTable:
        """The adapters by name."""
        return self.setup.adapters

    def check_idle(self, what: str) -> None:
        """Raise `RequestError` if requests are served, or the host is closed.

        Args:
            what: an LLM is asked to do, as the error says it.
        """
        self.check_open(f"to {what}")
        if self.thread.busy:
            raise RequestError(
                f"only an idle LLM can {what}",
                got="requests that are not finished",
                fix="wait for them, or close their streams",
            )

    def check_open(self, got: str) -> None:
        """Raise `RequestError` if the host is closed."""
        if self.closed:
            raise RequestError("this LLM is closed", got=got, fix="make a new one")

    def close(self) -> None:
        """As `LLM.close`."""
        if self.closed or self.thread.is_elsewhere:
            return
        self.thread.check_caller("close()")
        with self._using_jax():
            self.closed = True
            self._end()
            self.setup.close()

    @contextmanager
    def _using_jax(self) -> Iterator[None]:
        """Use the engine's settings of JAX in the caller's thread, which leaves JAX before the interpreter ends."""
        with ending_at_exit(), self.setup.settings():
            yield
