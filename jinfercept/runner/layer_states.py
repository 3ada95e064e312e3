"""The device arrays of recurrent layers' states, between the pages of the others: what groups of layers read and write."""

import math
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from jinfercept.layouts.states import StateArray
from jinfercept.models.mesh import Placed, beside
from jinfercept.models.parallel import AXIS
from jinfercept.runner.page_transfers import PAGES_SPEC

type States = tuple[tuple[StateArray, ...], ...]
"""The state of every layer of a model, see `protocol.states_of`; () if no layer has one."""


def with_states(pages: Sequence[Any], states: Sequence[Any]) -> tuple[Any, ...]:
    """What every layer keeps: its states, or pages where it has none.

    Args:
        pages: of the layers that have some.
        states: of all layers, () for those with pages; () if no layer has states.
    """
    if not states:
        return tuple(pages)
    left = iter(pages)
    return tuple(of_layer or next(left) for of_layer in states)


def state_shapes(states: States, num_slots: int, like: Placed) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """The arrays of every layer's states, with their places.

    Args:
        num_slots: without the one that is no sequence's.
        like: an array with the dtype of the weights, on their devices.
    """

    def struct(array: StateArray) -> jax.ShapeDtypeStruct:
        dtype: DTypeLike = array.dtype or like.dtype
        return jax.ShapeDtypeStruct((num_slots + 1, *array.shape), dtype, sharding=beside(like, _spec(array)))

    return tuple(tuple(map(struct, of_layer)) for of_layer in states)


def kept_specs(states: States, first: int, end: int) -> Any:
    """How several devices cut what consecutive layers keep."""
    if not states:
        return PAGES_SPEC
    return tuple(tuple(map(_spec, of_layer)) or PAGES_SPEC for of_layer in states[first:end])


def slot_bytes(states: States, dtype: DTypeLike, num_devices: int = 1) -> int:
    """Bytes of one sequence's states over all layers, on each of the devices.

    Args:
        dtype: of the weights.
    """

    def num_bytes(array: StateArray) -> int:
        parts = 1 if array.cut_axis is None else num_devices
        return math.prod(array.shape) * jnp.dtype(array.dtype or dtype).itemsize // parts

    return sum(num_bytes(array) for of_layer in states for array in of_layer)


def _spec(array: StateArray) -> PartitionSpec:
    return PartitionSpec() if array.cut_axis is None else PartitionSpec(*(None,) * (1 + array.cut_axis), AXIS)


@final
class LayerStates:
    """The states of all layers of a model; `reset` allocates them.

    Args:
        shapes: see `state_shapes`; () if no layer has states.

    Attributes:
        arrays: of every layer; () while there are none.
    """

    def __init__(self, shapes: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]) -> None:
        self._shapes = shapes
        self.arrays: tuple[tuple[Array, ...], ...] = ()

    def reset(self) -> None:
        """Allocate the arrays, or forget all states."""
        self.arrays = ()
        self.arrays = tuple(
            tuple(jnp.zeros(shape.shape, shape.dtype, device=shape.sharding) for shape in of_layer)
            for of_layer in self._shapes
        )

    def close(self) -> None:
        """Free the arrays."""
        self.arrays = ()

    def beside(self, pages: Sequence[Array]) -> list[Any]:
        """What every layer keeps, of the pages of those that have some."""
        return list(with_states(pages, self.arrays))

    def take(self, kept: Sequence[Any]) -> tuple[Array, ...]:
        """Take what the layers keep behind a step; returns the pages."""
        self.arrays = tuple(array if shapes else () for array, shapes in zip(kept, self._shapes, strict=True))
        return tuple(array for array, shapes in zip(kept, self._shapes, strict=True) if not shapes)
