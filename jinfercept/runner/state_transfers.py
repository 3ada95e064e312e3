"""The executables that gather a sequence's states of recurrent layers for the host, and scatter them back.

They cross the link as one array for each dtype, in which the parts of all layers follow each other. Each of several devices
moves its own parts.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Num

from jinfercept.models.mesh import EVERYWHERE, beside, over_devices
from jinfercept.models.parallel import AXIS
from jinfercept.runner.executables import Executables
from jinfercept.runner.step_upload import CommonShape

STATE_SPEC = PartitionSpec(AXIS)
"""Several devices cut the arrays that cross the link."""

HostState = Sequence[Num[Array, "_"]]
"""A sequence's states over all layers, an array for each dtype."""


def _gather(
    common_shape: CommonShape,
    layers: tuple[tuple[Num[Array, "N ..."], ...], ...],
    common: Int[Array, "common"],
    transfer: Int[Array, ""],
) -> tuple[Num[Array, "_"], ...]:
    """The states of the sequence whose device slot a transfer names, joined by dtype."""
    [slot] = common_shape.slots(common, transfer, 1)
    parts: dict[Any, list[Array]] = {}
    for array in chain.from_iterable(layers):
        parts.setdefault(array.dtype, []).append(jax.lax.dynamic_index_in_dim(array, slot, keepdims=False).reshape(-1))
    return tuple(map(jnp.concatenate, parts.values()))


def _scatter(
    common_shape: CommonShape,
    layers: tuple[tuple[Num[Array, "N ..."], ...], ...],
    common: Int[Array, "common"],
    transfer: Int[Array, ""],
    state: tuple[Num[Array, "_"], ...],
) -> tuple[tuple[Num[Array, "N ..."], ...], ...]:
    """The states of all layers, with these ones in the device slot that a transfer names."""
    [slot] = common_shape.slots(common, transfer, 1)
    joined, places = {part.dtype: part for part in state}, {part.dtype: 0 for part in state}

    def written(array: Array) -> Array:
        first, size = places[array.dtype], prod(array.shape[1:])
        places[array.dtype] += size
        part = joined[array.dtype][first : first + size].reshape(array.shape[1:])
        return jax.lax.dynamic_update_index_in_dim(array, part, slot, 0)

    return tuple(tuple(map(written, of_layer)) for of_layer in layers)


def add_state_transfers(
    run: Executables, shapes: tuple[tuple[jax.ShapeDtypeStruct, ...], ...], common_shape: CommonShape
) -> None:
    """Add the executables `gather` and `scatter`, each of one sequence's states.

    Args:
        run: to which they are added.
        shapes: of the states of every layer, see `layer_states.state_shapes`.
    """
    home = beside(next(chain.from_iterable(shapes)))
    common = jax.ShapeDtypeStruct((common_shape.size,), jnp.int32, sharding=home)
    arguments = shapes, common, jax.ShapeDtypeStruct((), jnp.int32, sharding=home)
    gather = over_devices(partial(_gather, common_shape), arguments, STATE_SPEC)
    run.add("gather", gather, *arguments)
    on_link = beside(next(chain.from_iterable(shapes)), STATE_SPEC)
    state = tuple(
        jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=on_link) for part in jax.eval_shape(gather, *arguments)
    )
    specs = jax.tree.map(lambda shape: getattr(shape.sharding, "spec", EVERYWHERE), shapes)
    scatter = over_devices(partial(_scatter, common_shape), (*arguments, state), specs)
    run.add("scatter", scatter, *arguments, state, donate=(0,))
