"""Weights of a checkpoint that stay quantised: which they are, and how devices get them without an unquantised copy."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ConfigError
from jinfercept.models.checkpoint import Checkpoint, StoredExperts, StoredTensor
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.packed_rows import PackedRows, Packing, common
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.models.quantized_formats import E4M3
from jinfercept.models.sharding import cut_axis, partition_spec
from jinfercept.models.stored_weights import StoredWeight, rows_of
from jinfercept.models.weight_axes import WEIGHT_AXES
from jinfercept.pallas.layouts.packed_weights import WIDTH


def keep_quantized(checkpoint: Checkpoint, shapes: Params, num_devices: int) -> Params:
    """The shapes of a model's weights with `QuantizedTensor`s of shapes where the checkpoint's weights stay quantised.

    Those do whose stored numbers a `QuantizedTensor` can hold in all layers, and for all experts, if there are as many outputs
    as whole blocks have.

    Args:
        shapes: of the weights as so many devices serve them.

    Raises:
        ConfigError: a device's part of such a weight is not of whole blocks or groups.
    """
    names = checkpoint.names

    def block(
        places: Mapping[str, StoredTensor | StoredExperts], weights: Weights, layers: Iterable[int] = (0,)
    ) -> Weights:
        return {
            name: _kept(checkpoint, name, places[name], shape, layers, num_devices) for name, shape in weights.items()
        }

    alike = defaultdict[tuple[str, ...], list[int]](list)
    for index, layer in enumerate(shapes.layers):
        alike[tuple(layer)].append(index)
    blocks = {key: block(names.layer, shapes.layers[indexes[0]], indexes) for key, indexes in alike.items()}
    layers = tuple(blocks[tuple(layer)] for layer in shapes.layers)
    return Params(block(names.embed, shapes.embed), layers, block(names.head, shapes.head))


def _kept(
    checkpoint: Checkpoint,
    name: str,
    place: StoredTensor | StoredExperts,
    shape: Any,
    layers: Iterable[int],
    num_devices: int,
) -> Any:
    """A weight's shape, quantised if it stays so."""
    if isinstance(place, StoredExperts):
        return _kept_experts(checkpoint, place, shape, layers, by_inputs=WEIGHT_AXES[name][-1] != "expert_ffn")
    if len(shape.shape) < 2 or place.flat:
        return shape
    num_outputs, num_inputs = place.shape(shape.shape)
    packing = _common_packing(checkpoint, [place.name.format(i=i) for i in layers], num_outputs, num_inputs)
    if packing is None:
        return shape
    tensor = QuantizedTensor.of_shape(shape.shape, place.inputs, packing, shape.dtype)
    spec = partition_spec(name, tensor)
    parts = [num_devices if axis is not None else 1 for axis in (*spec, None, None)]
    if num_outputs % (WIDTH * parts[0]) or num_inputs % (packing.group * parts[1]):
        raise _cut_between(place.name, num_outputs, num_inputs, packing.group, f"tensor_parallel_size={num_devices}")
    return tensor


def _kept_experts(
    checkpoint: Checkpoint, place: StoredExperts, shape: Any, layers: Iterable[int], *, by_inputs: bool
) -> Any:
    """The shape of the stacked weights of experts, or of their parts, quantised if they stay so.

    Args:
        by_inputs: whether parts have some of an expert's inputs; else some of its outputs.
    """
    experts = checkpoint.config.experts
    assert experts is not None
    if len(shape.shape) < 3:
        return shape
    num_stacked, num_inputs, *outputs = shape.shape
    num_parts, num_outputs = num_stacked // experts.num_experts, math.prod(outputs)
    whole_inputs = num_inputs * (num_parts if by_inputs else 1)
    names = [name for i in layers for name in place.tensors((experts.num_experts, *shape.shape[1:]), i)]
    packing = _common_packing(checkpoint, names, num_outputs * (1 if by_inputs else num_parts), whole_inputs)
    if packing is None:
        return shape
    if num_outputs % WIDTH or num_inputs % packing.group:
        raise _cut_between(place.names[0], num_outputs, num_inputs, packing.group, f"experts in {num_parts} parts")
    return QuantizedTensor.of_shape(shape.shape[1:], 1, packing, shape.dtype, (num_stacked,))


def _common_packing(checkpoint: Checkpoint, names: Iterable[str], num_outputs: int, num_inputs: int) -> Packing | None:
    """How matrices are all stored that stay quantised; None: they do not."""
    packings = {checkpoint.packing(name) for name in names}
    quantised = {packing for packing in packings if packing is not None}
    if (
        len(quantised) < len(packings)
        or num_outputs % WIDTH
        or any(num_inputs % packing.group for packing in quantised)
        or (len(quantised) > 1 and any(packing.values == E4M3 or packing.scales == "uint8" for packing in quantised))
    ):
        return None
    return common(quantised)


def _cut_between(name: str, num_outputs: int, num_inputs: int, group: int, cut: str) -> ConfigError:
    return ConfigError(
        "a quantised weight is cut between blocks of 32 outputs and groups of inputs",
        got=f"{name} of {num_outputs} outputs and {num_inputs} inputs in groups of {group}, {cut}",
        fix="quantization=none, or fewer devices",
    )


def weight_bytes(shapes: Params, num_devices: int) -> int:
    """Memory of the weights on each of the devices, of shapes that have every array once."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // (1 if cut_axis(name) is None else num_devices)
        for block in (shapes.embed, *shapes.layers, shapes.head)
        for name, weight in block.items()
        for leaf in jax.tree.leaves(weight)
    )


def read_quantized(
    checkpoint: Checkpoint, stored: StoredWeight, target: QuantizedTensor, piece_bytes: int, mesh: ModelMesh
) -> QuantizedTensor:
    """A weight on its devices, each of which gets its own part.

    Args:
        target: its shapes.
        piece_bytes: read at a time, as float32.
    """
    aligned = math.lcm(WIDTH, stored.head_dim) // WIDTH
    num_inputs = stored.stored_shape[1]
    step = max(1, piece_bytes // (4 * num_inputs * WIDTH * aligned)) * aligned

    def read(rows: slice) -> PackedRows:
        return read_stored(checkpoint, stored.tensor, rows, target.packing)

    @cache
    def part(first: int, end: int) -> list[Shaped[np.ndarray, "B R W"]]:
        """Blocks of outputs, all inputs: arrays `[blocks, rows, WIDTH]`."""
        blocks = empty(target, first, end)
        for start in range(first, end, step):
            stop = min(end, start + step)
            rows = rows_of(stored, read, slice(start * WIDTH, stop * WIDTH))
            for array, new in zip(blocks, jax.tree.leaves(rows), strict=True):
                fill(array[start - first : stop - first], new)
        return blocks

    def of_device(index: Any) -> list[Shaped[np.ndarray, "B R W"]]:
        first, end, _ = index[0].indices(target.values.shape[0])
        return [array[:, *index[1:]] for array in part(first, end)]

    return placed(target, mesh.sharding(partition_spec(stored.name, target)), of_device)


def read_stored(checkpoint: Checkpoint, tensor: str, rows: slice, packing: Packing) -> PackedRows:
    """Rows of a tensor that is quantised, in this packing or one that `common` makes it of."""
    have = checkpoint.packing(tensor)
    assert have is not None, tensor
    return checkpoint.read_packed(tensor, rows).stored_as(have, packing)


def empty(target: Any, first: int, end: int) -> list[Shaped[np.ndarray, "..."]]:
    """Arrays for this span of the first axis of a weight, which is an array or a `QuantizedTensor` of shapes."""
    return [np.empty((end - first, *struct.shape[1:]), struct.dtype) for struct in jax.tree.leaves(target)]


def placed[W](target: W, sharding: Any, of_device: Callable[[Any], list[Shaped[np.ndarray, "..."]]]) -> W:
    """A weight on its devices.

    Args:
        target: the shape of an array, or a `QuantizedTensor` of shapes.
        of_device: the arrays of a part. All arrays are cut alike: it gets an index of each.
    """
    structs, tree = jax.tree.flatten(target)
    arrays = [
        jax.make_array_from_callback(struct.shape, sharding, lambda index, number=number: of_device(index)[number])
        for number, struct in enumerate(structs)
    ]
    return jax.tree.unflatten(tree, jax.block_until_ready(arrays))


def fill(blocks: Shaped[np.ndarray, "B R W"], rows: Shaped[np.ndarray, "N R"]) -> None:
    """Write rows into blocks of columns."""
    blocks[:] = rows.reshape(len(blocks), WIDTH, -1).swapaxes(1, 2)
