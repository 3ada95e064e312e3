"""The part of `LLM` that changes its weights: updates, sleep, and adapters."""

from collections.abc import Mapping
from pathlib import Path

from jinfercept.models.protocol import Params
from jinfercept.startup.host import EngineHost, UpdateMode
from jinfercept.weights.named import NameFilter, WeightTree


class WeightControls:
    """What a trainer asks of an `LLM`."""

    engine: EngineHost

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
        return self.engine.update_weights(params, mode, names, only)

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
        self.engine.sleep(level, discard=discard)

    def wake(self, params: WeightTree | None = None, *, names: Mapping[str, str] | None = None) -> None:
        """Take the memory again, without compiling, and go on. Does nothing to an LLM that does not sleep.

        Args:
            params, names: new weights, as of `update_weights(params, mode="recompute", names=names)`.

        Raises:
            RequestError: the weights were discarded, and none are given.
            ModelError, EngineError: as `update_weights`; the sleep goes on.
        """
        self.engine.wake(params, names)

    @property
    def loras(self) -> Mapping[str, str]:
        """The directories of the adapters that requests may name."""
        return self.engine.adapters.directories

    def load_lora(self, name: str, directory: str | Path, *, in_place: bool = False) -> None:
        """Load an adapter that PEFT saved; with `in_place`, one that has the name goes on for its requests. Raises `ModelError`
        if it cannot be used, `ConfigError` if there is no room (`max_loras`)."""
        self.engine.load_adapter(name, directory, in_place=in_place)

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
        return self.engine.update_adapter(name, matrices, scale, names).version + self.weights_version

    def unload_lora(self, name: str) -> None:
        """Take an adapter's name away; its room is free once its requests have ended. Raises `RequestError` for others."""
        self.engine.unload_adapter(name)
