"""The part of `LLM` that changes its weights: updates, sleep, and adapters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

import jax

from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError, ModelError, RequestError, shown
from jinfercept.models.adapters import AdapterWeights
from jinfercept.models.load import dtype_name, lazy_params
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.protocol import Params
from jinfercept.request import Adapter
from jinfercept.startup.served_adapters import ServedAdapters
from jinfercept.startup.served_engine import ServedEngine
from jinfercept.startup.weights import DEEPEST
from jinfercept.values.option_types import check_type
from jinfercept.weights.leaves import made
from jinfercept.weights.named import NameFilter, WeightTree

UpdateMode = Literal["keep", "recompute", "abort"]
"""What becomes of unfinished requests when the weights change, see `LLM.update_weights`."""


class WeightControls:
    """What a trainer asks of an `LLM`."""

    engine: ServedEngine

    @property
    def params(self) -> Params:
        """The weights that serve, with their adapters; they are replaced by an update, and empty in a sleep of level 2."""
        return self.engine.setup.runner.params

    @property
    def weights_version(self) -> int:
        """Of the weights that serve: 0 at the start, raised by 1 by every `update_weights`."""
        return self.engine.weights.version

    def update_weights(
        self,
        params: WeightTree | str | Path,
        *,
        mode: UpdateMode | None = None,
        names: Mapping[str, str] | None = None,
        only: NameFilter | None = None,
    ) -> int:
        """Serve other weights of the same model from now on. See `docs/weights.md`.

        Args:
            params: `Params` of the same shapes, in any dtype, on any devices, which the caller may donate afterwards. Or by
                names: an `nnx.State`, an `nnx.Module`, or mappings, with the names of `Params`, as `layers.0.q`, or with those
                of transformers. Or the directory of a checkpoint, or a `.gguf` file.
            mode: of requests that are not finished. None: there must be none, and the LLM starts over as `restart`. "keep":
                they go on with their contexts. "recompute": their contexts are computed again when they run next. "abort":
                they end with what they have.
            names: by a name in `params`, the name that the weight has here; `*` stands for a number in both.
            only: take these weights alone: a beginning of names as `params` has them (of a path those of `Params`), several, or
                a function of a name that says whether. All other weights stay as they are.

        Returns:
            The new version.

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
            tree = _read(params, engine.setup.config.model.dtype) if isinstance(params, str | Path) else params
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
        """Whether `sleep` was called, or an update lost the weights, and `wake` was not called since."""
        return self.engine.weights.level is not None

    def sleep(self, level: int = 1, *, discard: bool = False) -> None:
        """Run nothing until `wake`. Requests wait, those that come too; calls go on, and their results are taken in.

        Args:
            level: 0: all stays where it is. 1: the device's pages are freed; what the host has of contexts stays, the rest is
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

        Args:
            params, names: new weights, as of `update_weights(params, mode="recompute", names=names)`.

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
        """Load an adapter that PEFT saved; with `in_place`, one that has the name goes on for its requests. Raises `ModelError`
        if it cannot be used, `ConfigError` if there is no room (`max_loras`)."""
        self._put_adapter(name, lambda room: room.read(directory), str(directory), in_place=in_place)

    def update_lora(
        self, name: str, matrices: WeightTree, *, scale: float = 1.0, names: Mapping[str, str] | None = None
    ) -> int:
        """Serve an adapter of arrays under a name from now on; one that has the name goes on for its requests.

        Args:
            matrices: by names, as weights of `update_weights`: those that PEFT saves, or `layers.0.q.a` `[*inputs, rank]` and
                `layers.0.q.b` `[rank, *outputs]`.
            scale: of their products, `lora_alpha / rank`.
            names: as of `update_weights`.

        Returns:
            The version that tokens of its requests have from now on: of the weights, and 1 more with every update of the name.

        Raises:
            RequestError: the LLM sleeps at level 2.
            ModelError: a matrix is none of the model's, has another shape, or another number type.
            ConfigError: there is no room (`max_loras`, `max_lora_rank`); an adapter in place of another needs room of its own.
        """
        adapter = self._put_adapter(name, lambda room: room.in_memory(matrices, scale, names), "memory", in_place=True)
        return adapter.version + self.weights_version

    def unload_lora(self, name: str) -> None:
        """Take an adapter's name away; its room is free once its requests have ended. Raises `RequestError` for others."""
        self.engine.check_open("to unload an adapter")
        self.engine.adapters.remove(name)

    def _put_adapter(
        self, name: str, read: Callable[[ServedAdapters], AdapterWeights], source: str, *, in_place: bool
    ) -> Adapter:
        """Load an adapter. Waits for the disk and for the end of a step, not for requests."""
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


def _read(source: str | Path, dtype: str) -> Params:
    """The weights of a checkpoint, all of which can be read. Where the device is this CPU, each is read again when it is
    written, so that the weights are in memory once; elsewhere they are in the host's memory."""
    if not Path(source).exists():
        raise ModelError("there is no such checkpoint", got=str(source), fix="name a directory or a .gguf file")
    host = ModelMesh((jax.local_devices(backend="cpu")[0],))
    weights = lazy_params(source, dtype_name(dtype), host)
    if jax.default_backend() != "cpu":
        return made(weights)
    for weight in jax.tree.leaves(weights):
        (weight.check or weight.make)()
    return weights
