"""Weights of a checkpoint that stay quantised: which they are, and how devices get them without an unquantised copy."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ConfigError
from jinfercept.layouts.packed_weights import WIDTH
from jinfercept.models.checkpoint import PackedCheckpoint, StoredExperts, StoredTensor
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.packed_rows import PackedRows, common
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.models.sharding import cut_axis, partition_spec
from jinfercept.models.stored_weights import StoredWeight, rows_of


def keep_quantized(checkpoint: PackedCheckpoint, shapes: Params, num_devices: int) -> Params:
    """The shapes of a model's weights with `QuantizedTensor`s of shapes where the checkpoint's weights stay quantised.

    Those do whose stored numbers a `QuantizedTensor` can hold in all layers, if there are as many outputs as whole blocks have;
    those of experts do not.

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
    kept = {key: block(names.layer, shapes.layers[indexes[0]], indexes) for key, indexes in alike.items()}
    layers = tuple(kept[tuple(layer)] for layer in shapes.layers)
    return Params(block(names.embed, shapes.embed), layers, block(names.head, shapes.head))


def _kept(
    checkpoint: PackedCheckpoint,
    name: str,
    place: StoredTensor | StoredExperts,
    shape: Any,
    layers: Iterable[int],
    num_devices: int,
) -> Any:
    """A weight's shape, quantised if it stays so."""
    if isinstance(place, StoredExperts) or len(shape.shape) < 2 or place.flat:
        return shape
    packings = {checkpoint.packing(place.name.format(i=i)) for i in layers}
    quantised = {packing for packing in packings if packing is not None}
    num_outputs, num_inputs = place.shape(shape.shape)
    if (
        len(quantised) < len(packings)
        or num_outputs % WIDTH
        or any(num_inputs % packing.group for packing in quantised)
    ):
        return shape
    packing = common(quantised)
    tensor = QuantizedTensor.of_shape(shape.shape, place.inputs, packing, shape.dtype)
    spec = partition_spec(name, tensor)
    parts = [num_devices if axis is not None else 1 for axis in (*spec, None, None)]
    if num_outputs % (WIDTH * parts[0]) or num_inputs % (packing.group * parts[1]):
        raise ConfigError(
            "a quantised weight is cut between blocks of 32 outputs and groups of inputs",
            got=f"{place.name} of {num_outputs} outputs and {num_inputs} inputs in groups of {packing.group}, "
            f"tensor_parallel_size={num_devices}",
            fix="quantization=none, or fewer devices",
        )
    return tensor


def weight_bytes(shapes: Params, num_devices: int) -> int:
    """Memory of the weights on each of the devices, of shapes that have every array once."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // (1 if cut_axis(name) is None else num_devices)
        for block in (shapes.embed, *shapes.layers, shapes.head)
        for name, weight in block.items()
        for leaf in jax.tree.leaves(weight)
    )


def read_quantized(
    checkpoint: PackedCheckpoint, stored: StoredWeight, wanted: QuantizedTensor, piece_bytes: int, mesh: ModelMesh
) -> QuantizedTensor:
    """A weight on its devices, each of which gets its own part.

    Args:
        wanted: its shapes.
        piece_bytes: read at a time, as float32.
    """
    have, packing, head_dim = checkpoint.packing(stored.tensor), wanted.packing, checkpoint.config.head_dim
    assert have is not None, stored.tensor
    aligned = math.lcm(WIDTH, head_dim) // WIDTH
    num_inputs = stored.stored_shape[1]
    step = max(1, piece_bytes // (4 * num_inputs * WIDTH * aligned)) * aligned

    def read(rows: slice) -> PackedRows:
        return checkpoint.read_packed(stored.tensor, rows).stored_as(have, packing)

    @cache
    def part(first: int, end: int) -> PackedRows:
        """Blocks of outputs, all inputs: arrays `[blocks, rows, WIDTH]`."""
        blocks = jax.tree.map(lambda struct: np.empty((end - first, *struct.shape[1:]), struct.dtype), arrays)
        for start in range(first, end, step):
            stop = min(end, start + step)
            rows = rows_of(stored, head_dim, read, slice(start * WIDTH, stop * WIDTH))
            jax.tree.map(lambda to, new, at=slice(start - first, stop - first): _fill(to[at], new), blocks, rows)
        return blocks

    arrays = PackedRows(wanted.values, wanted.scales, wanted.offsets)
    sharding = mesh.sharding(partition_spec(stored.name, wanted))

    def placed(name: str) -> jax.Array | None:
        struct = getattr(arrays, name)
        if struct is None:
            return None

        def of_device(index: Any) -> Shaped[np.ndarray, "B R W"]:
            first, end, _ = index[0].indices(struct.shape[0])
            return getattr(part(first, end), name)[:, *index[1:]]

        return jax.make_array_from_callback(struct.shape, sharding, of_device)

    made = jax.block_until_ready(PackedRows(*(placed(name) for name in PackedRows._fields)))  # pyright: ignore[reportArgumentType]
    return jax.tree.unflatten(jax.tree.structure(wanted), jax.tree.leaves(tuple(made)))


def _fill(blocks: Shaped[np.ndarray, "B R W"], rows: Shaped[np.ndarray, "N R"]) -> None:
    """Write rows into blocks of columns."""
    blocks[:] = rows.reshape(len(blocks), WIDTH, -1).swapaxes(1, 2)
