"""The weights that are served while engines run on them, and the part of `LLM` that changes them: updates, sleep, adapters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import jax
import numpy as np

from jinfercept.config import check_type
from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError, EngineError, ModelError, RequestError, describe_failure, shown
from jinfercept.models.adapted import is_adapted, without_adapters
from jinfercept.models.adapters import AdapterWeights, with_matrices_of
from jinfercept.models.in_memory import Replacement, blocks_of, ties_of
from jinfercept.models.load import dtype_name, lazy_params
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.named_weights import NameFilter, WeightTree, made, params_by_name
from jinfercept.models.protocol import Params, ServedModel, num_draft_layers
from jinfercept.request import Adapter
from jinfercept.runner.runner import ModelRunner
from jinfercept.start.served_adapters import ServedAdapters

if TYPE_CHECKING:
    from jinfercept.start.served_engine import ServedEngine

DEEPEST = 2
"""Level of a sleep in which the weights leave the device, too."""


@final
class ServedWeights:
    """The weights of one model. Its methods that change something are called with no plan in flight."""

    def __init__(self, model: ServedModel, runner: ModelRunner, *, one_host: bool) -> None:
        self._model, self._runner, self._one_host = model, runner, one_host
        # `version` grows by 1 with every update; `level` is that of the sleep, 0 to 2, or None while awake.
        self.version, self.level = 0, None
        self.level: int | None
        self._matrices: Params | None = None  # of the adapters, on the host where the device has no weights
        self._host: Params | Replacement | None = None  # the weights themselves, at level 2

    @property
    def are_lost(self) -> bool:
        """Whether there are no weights: they were discarded, or an update replaced only a part of them."""
        return not self._runner.params.embed and self._host is None

    def replacement(
        self, weights: WeightTree, names: Mapping[str, str] | None = None, only: NameFilter | None = None
    ) -> Replacement:
        """New weights, checked; `names` and `only` are as in `params_by_name`.

        Raises:
            ModelError: they do not fit.
            RequestError: there are several hosts, or weights that are to stay are lost.
        """
        if not self._one_host:
            raise RequestError("only one host can take new weights", got="several", fix="start all with the new ones")
        shapes = without_adapters(self._runner.weight_shapes)
        if isinstance(weights, Params) and names is None and only is None:
            params = weights
        else:
            params = params_by_name(self._model, weights, shapes, names, only)
        new = Replacement(
            self._model, params, shapes, ties_of(self._host if isinstance(self._host, Params) else self._runner.params)
        )
        if new.is_partial and self.are_lost:
            raise RequestError("only needs weights that are loaded", got=f"only={only!r}", fix="give all")
        return new

    def write(self, new: Replacement, engine: Engine) -> None:
        """Serve these weights, with the adapters of the old ones; in a sleep of level 2, from its end on.

        Raises:
            EngineError: they could not be written, for want of memory or since an array was donated meanwhile. Either the old
                weights are served on, or there are none, and the LLM sleeps at level 2.
        """
        if self.level == DEEPEST:
            with _failing("the weights before are kept", "update_weights() again"):
                self._host = new.on_host(self._host)
        else:
            self._write(new, engine)
        self.version += 1

    def _write(self, new: Replacement, engine: Engine) -> None:
        params = self._runner.take_params()
        self._matrices = _matrices(params)
        old = blocks_of(without_adapters(params))
        del params
        try:
            self._serve(new.write(old, owned=self._runner.owns_params))
        except Exception as error:
            failure, fix = describe_failure(error), "wake(params) with all weights: requests wait for that"
            if old:
                self._serve(Params(old[0], tuple(old[1:-1]), old[-1]), owned=self._runner.owns_params)
                failure, fix = f"{failure}; the weights before are served on", "update_weights() again"
            else:
                self._free_pages(engine)
                self._matrices = jax.tree.map(np.array, self._matrices)
                self.level, self._host = DEEPEST, None
                failure += "; the weights before are overwritten in part, and the LLM sleeps"
            raise EngineError(failure, fix=fix) from error

    def _free_pages(self, engine: Engine) -> None:
        engine.is_resting = True
        if not self.level:
            engine.leave_device()
            self._runner.leave_device()

    def sleep(self, engine: Engine, level: int, *, discard: bool) -> None:
        """Free what is on the device. A deeper sleep goes on as it is."""
        if level:
            self._free_pages(engine)
        engine.is_resting = True
        before = -1 if self.level is None else self.level
        self.level = max(before, min(level, 1))
        if before < DEEPEST <= level:
            with _failing("the LLM sleeps at level 1", "wake(), or sleep(2, discard=True)"):
                params = self._runner.params
                bases, matrices = without_adapters(params), jax.tree.map(np.array, _matrices(params))
                host = None if discard else _each_once(lambda leaf, _: np.array(leaf), bases)
            self._matrices, self._host, self.level = matrices, host, DEEPEST
            self._runner.take_params()
            if self._runner.owns_params:
                for leaf in jax.tree.leaves(params):
                    leaf.delete()

    def check_wake(self, *, is_given: bool) -> None:
        """Raise `RequestError` if no weights are there to wake with, and none are given."""
        if self.are_lost and not is_given:
            raise RequestError(
                "there are no weights to wake with", got="wake(); a sleep or an update lost them", fix="wake(params)"
            )

    def wake(self, engine: Engine, new: Replacement | None = None) -> None:
        """Take the memory again, and go on, with new weights if there are any. After an `EngineError` the sleep goes on."""
        if new is not None and self.level != DEEPEST:
            self.write(new, engine)
        with _failing("the LLM sleeps on", "wake() again when the device has memory"):
            if self.level == DEEPEST:
                weights = self._host if new is None else new.on_host(self._host) if new.is_partial else new
                assert weights is not None
                if isinstance(weights, Replacement):
                    self._serve(weights.write(None))
                else:
                    shapes = without_adapters(self._runner.weight_shapes)
                    self._serve(
                        _each_once(lambda leaf, at: jax.device_put(leaf, at.sharding, may_alias=False), weights, shapes)
                    )
                self._host, self.level = None, 1
                self.version += new is not None
            if self.level:
                self._runner.come_back()
        self.level, engine.is_resting = None, False

    def _serve(self, bases: Params, *, owned: bool = True) -> None:
        assert self._matrices is not None
        self._runner.use(with_matrices_of(bases, self._matrices))
        self._runner.owns_params, self._matrices = owned, None


@contextmanager
def _failing(state: str, fix: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EngineError(f"{describe_failure(error)}; {state}", fix=fix) from error


def _matrices(params: Params) -> Params:
    return jax.tree.map(
        lambda weight: replace(weight, base=None) if is_adapted(weight) else None, params, is_leaf=is_adapted
    )


def _each_once(move: Callable[..., Any], params: Params, shapes: Params | None = None) -> Params:
    # One array that is several weights is one in the result, too.
    moved: dict[int, Any] = {}

    def to(leaf: Any, shape: Any) -> Any:
        if id(leaf) not in moved:
            moved[id(leaf)] = move(leaf, shape)
        return moved[id(leaf)]

    return jax.tree.map(to, params, params if shapes is None else shapes)


UpdateMode = Literal["keep", "recompute", "abort"]
"""How an update of the weights treats unfinished requests, see `LLM.update_weights`."""


class WeightControls:
    """The part of an `LLM` that changes its weights, for trainers."""

    engine: "ServedEngine"

    @property
    def params(self) -> Params:
        """The weights that serve, with their adapters. An update replaces them; in a sleep of level 2 they are empty."""
        return self.engine.setup.runner.params

    @property
    def weights_version(self) -> int:
        """Version of the weights that serve: 0 at the start, raised by 1 by every `update_weights`."""
        return self.engine.weights.version

    def update_weights(
        self,
        params: WeightTree | str | Path,
        *,
        mode: UpdateMode | None = None,
        names: Mapping[str, str] | None = None,
        only: NameFilter | None = None,
    ) -> int:
        """Serve other weights of the same model from now on; returns the new version. See `docs/weights.md`.

        Args:
            params: `Params` of the same shapes, in any dtype, on any devices, which the caller may donate afterwards. Or
                weights by name: an `nnx.State`, an `nnx.Module`, or mappings, with the names of `Params`, as `layers.0.q`, or
                with those of transformers. Or the directory of a checkpoint, or a `.gguf` file.
            mode: how unfinished requests go on. None: there must be none, and the LLM starts over as `restart`. "keep": they go
                on with their contexts. "recompute": their contexts are computed again when they run next. "abort": they end
                with the tokens that they have.
            names: by a name in `params`, the name that the weight has here; `*` stands for a number in both.
            only: replace these weights alone. It is a beginning of names as `params` has them (for a path, as `Params` has
                them), several of these, or a function that takes a name and returns a bool.

        Raises:
            ModelError: a weight is missing, too much, donated already, or has another shape; the old ones are served on.
            EngineError: an array could not be read or written in the end; the old weights serve on, or the LLM sleeps.
            RequestError: requests are not finished, or there are several hosts.
            ConfigError: the mode is none of these, or there is a `kv_disk`, whose pages are of one version.
        """
        if mode not in (modes := (*get_args(UpdateMode), None)):
            raise ConfigError("no such mode of an update", got=mode, fix=f"one of {', '.join(map(str, modes))}")
        engine, weights = self.engine, self.engine.weights
        if mode is None:
            engine.check_idle("take new weights")
        with engine.changing_weights("to take new weights"):
            setup, drafts = engine.setup, num_draft_layers(engine.setup.model.config) > 0
            dtype = setup.config.model.dtype
            tree = _read(params, dtype, draft_layer=drafts) if isinstance(params, str | Path) else params
            new = weights.replacement(tree, names, only)
            if mode is None and weights.level is None:
                engine.start_over(new)
            else:
                engine.check_in_flight("new weights while requests run")

                def take(running: Engine) -> None:
                    weights.write(new, running)
                    running.take_weights(weights.version, recompute=mode != "keep")

                engine.between_steps(take, first_end=("abort", None) if mode == "abort" else None)
            return weights.version

    @property
    def is_sleeping(self) -> bool:
        """Whether the LLM sleeps: `sleep` was called, or an update lost the weights, and `wake` was not called since."""
        return self.engine.weights.level is not None

    def sleep(self, level: int = 1, *, discard: bool = False) -> None:
        """Run nothing until `wake`. Requests wait, new ones too; calls go on, and their results are taken in.

        Args:
            level: 0: all stays where it is. 1: the device's pages are freed; the host's copies of contexts stay, the rest is
                computed again. 2: the weights leave the device, too, for the host's memory.
            discard: at level 2, forget the weights: `wake` needs others.

        Raises:
            ConfigError: there is no such level, or there is a `kv_disk` (level 1 and 2).
            RequestError: there are several hosts (level 1 and 2), or the LLM is closed.
        """
        if type(level) is not int or level not in range(DEEPEST + 1):
            raise ConfigError("no such level of sleep", got=shown(level), fix="0, 1 or 2")
        check_type("discard", discard, bool)
        if discard and level != DEEPEST:
            raise ConfigError("only a sleep of level 2 discards weights", got=f"level {level}", fix="sleep at level 2")
        engine = self.engine
        with engine.changing_weights("to sleep"):
            if level:
                engine.check_in_flight("to sleep")
            engine.between_steps(lambda running: engine.weights.sleep(running, level, discard=discard))

    def wake(self, params: WeightTree | None = None, *, names: Mapping[str, str] | None = None) -> None:
        """Take the memory again, without compiling, and go on. Does nothing to an LLM that does not sleep.

        New weights are served as by `update_weights(params, mode="recompute", names=names)`.

        Raises:
            RequestError: the weights were discarded, and none are given.
            ModelError, EngineError: as `update_weights`; the sleep goes on.
        """
        weights = self.engine.weights
        with self.engine.changing_weights("to wake"):
            new = None if params is None else weights.replacement(params, names)
            if weights.level is None and new is None:
                return
            weights.check_wake(is_given=new is not None)

            def wake(running: Engine) -> None:
                weights.wake(running, new)
                if new is not None:
                    running.take_weights(weights.version, recompute=True)

            self.engine.between_steps(wake)

    @property
    def loras(self) -> Mapping[str, str]:
        """The directories of the adapters that requests may name."""
        return self.engine.adapters.directories

    def load_lora(self, name: str, directory: str | Path, *, in_place: bool = False) -> None:
        """Load an adapter that PEFT saved. With `in_place` it may take the name of another, which goes on for its requests.

        Raises:
            ModelError: the adapter cannot be used.
            ConfigError: there is no room (`max_loras`), or the name is taken.
        """
        self._put_adapter(name, lambda room: room.read(directory), str(directory), in_place=in_place)

    def update_lora(
        self, name: str, matrices: WeightTree, *, scale: float = 1.0, names: Mapping[str, str] | None = None
    ) -> int:
        """Serve an adapter of arrays under a name from now on. An older one of the name goes on for its requests.

        Args:
            matrices: by names, as weights of `update_weights`: those that PEFT saves, or `layers.0.q.a` `[*inputs, rank]` and
                `layers.0.q.b` `[rank, *outputs]`.
            scale: of their products, `lora_alpha / rank`.
            names: as of `update_weights`.

        Returns:
            The version of tokens of its later requests: of the weights, and 1 more with every update of the name.

        Raises:
            RequestError: the LLM sleeps at level 2.
            ModelError: a matrix is none of the model's, has another shape, or another number type.
            ConfigError: there is no room (`max_loras`, `max_lora_rank`); an adapter in place of another needs room of its own.
        """
        adapter = self._put_adapter(name, lambda room: room.in_memory(matrices, scale, names), "memory", in_place=True)
        return adapter.version + self.weights_version

    def unload_lora(self, name: str) -> None:
        """Take an adapter's name away. Its room is free once its requests have ended. Raises `RequestError` for other names."""
        self.engine.check_open("to unload an adapter")
        self.engine.adapters.remove(name)

    def _put_adapter(
        self, name: str, read: Callable[[ServedAdapters], AdapterWeights], source: str, *, in_place: bool
    ) -> Adapter:
        # Waits for the disk and for the end of a step, not for requests.
        self.engine.check_open("to load an adapter")
        setup = self.engine.setup
        if setup.room is None:
            raise ConfigError("this LLM has no room for adapters", got=name, fix="start with max_loras")
        if setup.leader is not None:
            raise ConfigError("an LLM on several hosts cannot load adapters later", got=name, fix="name it in `loras`")
        if not setup.runner.params.embed:
            raise RequestError("the weights are not on the device", got="an adapter to load", fix="wake() before")
        weights = read(setup.room)
        with setup.room.table.new_slot(name, replace=in_place) as slot:
            with setup.room.lock, self.engine.using_jax():
                params = setup.room.written(setup.runner.params, slot, weights)
                self.engine.thread.ask(lambda: setup.runner.use(params)).result()
            return setup.room.table.put(Adapter(name, slot, weights.digest, source))


def _read(source: str | Path, dtype: str, *, draft_layer: bool) -> Params:
    # All weights can be read. Where the device is this CPU, each is read again when it is written, so that the weights are in
    # memory once. Elsewhere they are in the host's memory.
    if not Path(source).exists():
        raise ModelError("there is no such checkpoint", got=str(source), fix="name a directory or a .gguf file")
    host = ModelMesh((jax.local_devices(backend="cpu")[0],))
    weights = lazy_params(source, dtype_name(dtype), host, draft_layer=draft_layer)
    if jax.default_backend() != "cpu":
        return made(weights)
    for weight in jax.tree.leaves(weights):
        weight.make()
    return weights
