"""Reads the stacked weights of a layer's experts onto the devices: each device gets its experts, or its parts of experts."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jinfercept.models.checkpoint import Checkpoint, StoredExperts
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.packed_rows import PackedRows
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.models.quantized_weights import empty, fill, placed, read_stored
from jinfercept.models.sharding import expert_parts, partition_spec
from jinfercept.models.stored_weights import read_floats
from jinfercept.models.weight_axes import WEIGHT_AXES


def read_experts(
    checkpoint: Checkpoint, place: StoredExperts, layer: int, name: str, target: Any, mesh: ModelMesh
) -> jax.Array | QuantizedTensor:
    """A weight of a layer's experts on its devices.

    Of a weight that is not quantised, the host holds one device's part at a time.

    Args:
        name: of the weight, ours.
        target: its shape as the devices cut it, and its dtype; a `QuantizedTensor` of shapes if it stays quantised.
    """
    experts = checkpoint.config.experts
    assert experts is not None
    num_parts = target.shape[0] // experts.num_experts

    def places(expert: int) -> list[tuple[str, slice]]:
        return [
            (tensor.format(i=layer, x=expert), slice(None) if "{x}" in tensor else slice(expert, expert + 1))
            for tensor in place.names
        ]

    def dense_parts(expert: int) -> list[Shaped[np.ndarray, "..."]]:
        axes = zip(WEIGHT_AXES[name], target.shape, strict=True)
        whole = tuple(size * num_parts if axis == "expert_ffn" else size for axis, size in axes)[1:]
        tensors = [read_floats(checkpoint, tensor, rows) for tensor, rows in places(expert)]
        tensors = [
            tensor[0] if rows.stop else tensor for tensor, (_, rows) in zip(tensors, places(expert), strict=True)
        ]
        weight = np.concatenate(tensors, dtype=target.dtype, casting="unsafe")
        return expert_parts(name, place.as_ours(weight, whole), num_parts)

    def packed_parts(expert: int) -> list[PackedRows]:
        tensors = [read_stored(checkpoint, tensor, rows, target.packing) for tensor, rows in places(expert)]
        return _packed_parts(tensors, num_parts, WEIGHT_AXES[name], place)

    is_packed = isinstance(target, QuantizedTensor)
    parts = lru_cache(1)(packed_parts if is_packed else dense_parts)

    def stacks(first: int, end: int) -> list[Shaped[np.ndarray, "X ..."]]:
        arrays = empty(target, first, end)
        for number in range(first, end):
            part = parts(number // num_parts)[number % num_parts]
            for array, new in zip(arrays, jax.tree.leaves(part), strict=True):
                if is_packed:
                    fill(array[number - first], new)
                else:
                    array[number - first] = new
        return arrays

    if is_packed:
        stacks = cache(stacks)  # its arrays are placed one after the other

    def of_device(index: Any) -> list[Shaped[np.ndarray, "X ..."]]:
        return stacks(*index[0].indices(target.shape[0])[:2])

    return placed(target, mesh.sharding(partition_spec(name, target)), of_device)


def _packed_parts(tensors: list[PackedRows], count: int, axes: Sequence[str], place: StoredExperts) -> list[PackedRows]:
    """The parts of an expert's matrix: some columns of each of its sides, or some inputs."""
    num_sides = 2 if "side" in axes else 1

    def part(number: int, *arrays: Shaped[np.ndarray, "R _"]) -> Shaped[np.ndarray, "S _"]:
        array, width = np.concatenate(arrays), arrays[0].shape[1]
        if place.order == "interleaved":
            array = array.reshape(-1, num_sides, width).swapaxes(0, 1).reshape(-1, width)
        if axes[-1] != "expert_ffn":
            return np.split(array, count, axis=1)[number]
        return array.reshape(num_sides, count, -1, width)[:, number].reshape(-1, width)

    return [jax.tree.map(lambda *arrays, number=number: part(number, *arrays), *tensors) for number in range(count)]
