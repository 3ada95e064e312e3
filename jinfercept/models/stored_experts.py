"""Reads the stacked weights of a layer's experts onto the devices: each device gets its experts, or its parts of experts."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jinfercept.models.checkpoint import Checkpoint, PackedCheckpoint, StoredExperts
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.packed_rows import PackedRows
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.models.quantized_weights import arrays_of, fill, placed
from jinfercept.models.sharding import expert_parts, partition_spec
from jinfercept.models.stored_weights import read_floats
from jinfercept.models.weight_axes import WEIGHT_AXES


def read_experts(
    checkpoint: Checkpoint, place: StoredExperts, layer: int, name: str, target: jax.ShapeDtypeStruct, mesh: ModelMesh
) -> jax.Array:
    """A weight of a layer's experts on its devices. The host holds one device's part of it at a time.

    Args:
        name: of the weight, ours.
        target: its shape as the devices cut it, and its dtype.
    """
    experts = checkpoint.config.experts
    assert experts is not None
    num_parts = target.shape[0] // experts.num_experts
    axes = zip(WEIGHT_AXES[name], target.shape, strict=True)
    whole = tuple(size * num_parts if axis == "expert_ffn" else size for axis, size in axes)[1:]

    def stored(tensor: str, expert: int) -> Shaped[np.ndarray, "N ..."]:
        if "{x}" in tensor:
            return read_floats(checkpoint, tensor.format(i=layer, x=expert), slice(None))
        return read_floats(checkpoint, tensor.format(i=layer), slice(expert, expert + 1))[0]

    @lru_cache(1)
    def parts(expert: int) -> list[Shaped[np.ndarray, "..."]]:
        weight = np.concatenate(
            [stored(tensor, expert) for tensor in place.names], dtype=target.dtype, casting="unsafe"
        )
        return expert_parts(name, place.as_ours(weight, whole), num_parts)

    def of_device(index: Any) -> Shaped[np.ndarray, "..."]:
        numbers = range(target.shape[0])[index[0]]
        weights = np.empty((len(numbers), *target.shape[1:]), target.dtype)
        for place_here, number in enumerate(numbers):
            weights[place_here] = parts(number // num_parts)[number % num_parts]
        return weights

    sharding = mesh.sharding(partition_spec(name))
    return jax.block_until_ready(jax.make_array_from_callback(target.shape, sharding, of_device))


def read_quantized_experts(
    checkpoint: PackedCheckpoint, place: StoredExperts, layer: int, name: str, target: QuantizedTensor, mesh: ModelMesh
) -> QuantizedTensor:
    """As `read_experts`, of weights that stay quantised.

    Args:
        target: the shapes of the weight's arrays.
    """
    experts = checkpoint.config.experts
    assert experts is not None
    num_parts, packing = len(target) // experts.num_experts, target.packing
    num_sides = 2 if target.outputs else 1

    def stored(tensor: str, expert: int) -> PackedRows:
        apart = "{x}" in tensor
        tensor = tensor.format(i=layer, x=expert)
        have, rows = checkpoint.packing(tensor), slice(None) if apart else slice(expert, expert + 1)
        assert have is not None, tensor
        return checkpoint.read_packed(tensor, rows).stored_as(have, packing)

    @lru_cache(1)
    def parts(expert: int) -> list[PackedRows]:
        rows = jax.tree.map(lambda *sides: np.concatenate(sides), *(stored(tensor, expert) for tensor in place.names))
        if place.order == "interleaved":
            rows = rows.changed(
                lambda array: array.reshape(-1, num_sides, array.shape[1]).swapaxes(0, 1).reshape(array.shape)
            )
        return _expert_parts(rows, num_parts, num_sides)

    @cache
    def of_experts(first: int, end: int) -> PackedRows:
        shapes = arrays_of(target)
        stacks = jax.tree.map(lambda struct: np.empty((end - first, *struct.shape[1:]), struct.dtype), shapes)
        for number in range(first, end):
            own = parts(number // num_parts)[number % num_parts]
            jax.tree.map(lambda to, new, at=number - first: fill(to[at], new), stacks, own)
        return stacks

    def of_device(index: Any) -> PackedRows:
        return of_experts(*index[0].indices(len(target))[:2])

    return placed(target, mesh.sharding(partition_spec(name, target)), of_device)


def _expert_parts(rows: PackedRows, count: int, num_sides: int) -> list[PackedRows]:
    """The parts of an expert's matrix: some columns of both its sides, or, of a matrix without sides, some inputs."""
    if count == 1:
        return [rows]

    def part(number: int) -> Callable[[Shaped[np.ndarray, "R _"]], Shaped[np.ndarray, "S _"]]:
        def cut(array: Shaped[np.ndarray, "R _"]) -> Shaped[np.ndarray, "S _"]:
            if num_sides == 1:
                return np.split(array, count, axis=1)[number]
            return array.reshape(num_sides, count, -1, array.shape[1])[:, number].reshape(-1, array.shape[1])

        return cut

    return [rows.changed(part(number)) for number in range(count)]
