"""The weights that are served while engines run on it: others take their place, and they leave the device and come back."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from jinfercept.engine.engine import Engine
from jinfercept.errors import EngineError, RequestError, describe_failure
from jinfercept.models.adapted import is_adapted, without_adapters
from jinfercept.models.adapters import with_matrices_of
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.runner.runner import ModelRunner
from jinfercept.weights.in_memory import Replacement, blocks_of, ties_of
from jinfercept.weights.named import NameFilter, WeightTree, params_by_name

DEEPEST = 2
"""Level of a sleep in which the weights leave the device, too."""


@final
class ServedWeights:
    """The weights of one model. Its methods that change something are called with no plan in flight.

    Attributes:
        version: grows by 1 with every update.
        level: of the sleep, 0 to 2; None: awake.
    """

    def __init__(self, model: ServedModel, runner: ModelRunner, *, one_host: bool) -> None:
        self._model, self._runner, self._one_host = model, runner, one_host
        self.version, self.level = 0, None
        self.level: int | None
        self._matrices: Params | None = None  # of the adapters, on the host where the device has no weights
        self._host: Params | Replacement | None = None  # the weights themselves, at level 2

    @property
    def are_lost(self) -> bool:
        """Whether there are no weights: they were discarded, or replaced in part only."""
        return not self._runner.params.embed and self._host is None

    def replacement(
        self, weights: WeightTree, names: Mapping[str, str] | None = None, only: NameFilter | None = None
    ) -> Replacement:
        """New weights, checked. Raises `ModelError` if they do not fit, `RequestError` on several hosts, or if weights that are
        to stay are lost.

        Args:
            names, only: as of `params_by_name`.
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
        """Free what is on the device; never wakes from a deeper sleep."""
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
        """Take the memory again, and go on; with other weights, if there are any. Raises `EngineError`: the sleep goes on."""
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
    """Raise `EngineError`, which says what state the LLM is in, for all that is raised."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"{describe_failure(error)}; {state}", fix=fix) from error


def _matrices(params: Params) -> Params:
    """The adapters of weights, without these."""
    return jax.tree.map(
        lambda weight: replace(weight, base=None) if is_adapted(weight) else None, params, is_leaf=is_adapted
    )


def _each_once(move: Callable[..., Any], params: Params, shapes: Params | None = None) -> Params:
    """Weights elsewhere; what is one array is one there, too."""
    moved: dict[int, Any] = {}

    def to(leaf: Any, shape: Any) -> Any:
        if id(leaf) not in moved:
            moved[id(leaf)] = move(leaf, shape)
        return moved[id(leaf)]

    return jax.tree.map(to, params, params if shapes is None else shapes)
