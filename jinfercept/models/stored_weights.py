"""Reads one weight of a checkpoint onto the devices, in pieces, so that the host holds little of it at a time.

Every device gets its own part of a piece: no device and no host holds a weight that is cut.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.checkpoint import Checkpoint, PackedRows, Packing, StoredExperts, StoredTensor, common
from jinfercept.models.mesh import EVERYWHERE, ModelMesh
from jinfercept.models.parallel import AXIS
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.models.quantized_formats import E4M3
from jinfercept.models.sharding import cut_axis, expert_parts, partition_spec
from jinfercept.models.weight_axes import WEIGHT_AXES, WHOLE_NUMBERS
from jinfercept.pallas.layouts.packed_weights import WIDTH

type Rows = Shaped[np.ndarray, "rows ..."]


@final
@dataclass(frozen=True, eq=False)
class LazyWeight:
    """A weight that is read, or made of other arrays, when its block is written, so that few of these exist at a time.

    Attributes:
        shape: of the array that `make` returns.
    """

    shape: tuple[int, ...]
    make: Callable[[], Any]


class StoredWeight(NamedTuple):
    """A weight in a checkpoint, as the devices that serve it cut it.

    Attributes:
        name: of the weight, ours.
        tensor: its name in the checkpoint.
        place: how it is stored.
        num_rows: that the checkpoint has.
        shape: of our array; with repeated KV heads or a padded vocabulary it is larger than what is stored.
    """

    name: str
    tensor: str
    place: StoredTensor
    num_rows: int
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the weight as it is stored, all rows included that ours has."""
        return self.place.shape(self.shape)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head, whose rows are read together: heads may be repeated, and their rows in another order."""
        return dict(zip(WEIGHT_AXES[self.name], self.shape, strict=True)).get("head_dim", 1)

    @property
    def stored_spec(self) -> PartitionSpec:
        """How devices cut the stored weight: outputs are rows, inputs are columns."""
        axis = cut_axis(self.name)
        if axis is None:
            return EVERYWHERE
        return PartitionSpec(AXIS) if axis >= self.place.inputs else PartitionSpec(None, AXIS)


def read_weight(
    checkpoint: Checkpoint, stored: StoredWeight, dtype: str, piece_bytes: int, mesh: ModelMesh
) -> Shaped[Array, "..."]:
    """A weight on its devices. A large one is copied in pieces of so many bytes, as float32, to bound host memory."""
    placing = _Placing(mesh, stored.stored_spec, partition_spec(stored.name), stored.place.inputs, stored.shape, dtype)
    pieces = _pieces(stored, piece_bytes, mesh)
    if len(pieces) == 1:
        return jax.block_until_ready(_place(placing)(_piece(checkpoint, stored, *pieces[0], mesh)))
    placed = jnp.zeros(stored.shape, dtype, device=None if mesh.size == 1 else mesh.sharding(placing.spec))
    for start, count in pieces:
        piece = _piece(checkpoint, stored, start, count, mesh)
        placed = jax.block_until_ready(_place_rows(placing)(placed, piece, start))
    return placed


def _num_parts(stored: StoredWeight, mesh: ModelMesh) -> int:
    return mesh.size if stored.stored_spec == PartitionSpec(AXIS) else 1


def _pieces(stored: StoredWeight, piece_bytes: int, mesh: ModelMesh) -> list[tuple[int, int]]:
    """The first row of every piece in every part, and how many rows there are."""
    num_rows, *columns = stored.stored_shape
    num_parts, head_dim = _num_parts(stored, mesh), stored.head_dim
    part_rows = num_rows // num_parts
    step = max(1, piece_bytes // (4 * num_parts * math.prod(columns) * head_dim)) * head_dim
    return [(start, min(step, part_rows - start)) for start in range(0, part_rows, step)]


def _piece(
    checkpoint: Checkpoint, stored: StoredWeight, start: int, count: int, mesh: ModelMesh
) -> Shaped[Array, "..."] | Rows:
    """Rows `start` to `start + count` of every part, on the devices; on the host for a single one."""
    num_parts = _num_parts(stored, mesh)
    part_rows = stored.stored_shape[0] // num_parts

    def read(rows: slice) -> Rows:
        if stored.name in WHOLE_NUMBERS:
            return checkpoint.read(stored.tensor, rows).astype(np.float32)
        return read_floats(checkpoint, stored.tensor, rows)

    @cache
    def part(index: int) -> Rows:
        first = index * part_rows + start
        return rows_of(stored, read, slice(first, first + count))

    if mesh.size == 1:
        return part(0)
    shape = (num_parts * count, *stored.stored_shape[1:])

    def of_device(index: Any) -> Rows:
        return part((index[0].start or 0) // count)[:, *index[1:]]

    return jax.make_array_from_callback(shape, mesh.sharding(stored.stored_spec), of_device)


def rows_of[X](stored: StoredWeight, read: Callable[[slice], X], span: slice) -> X:
    """Rows of a weight as it is stored; of repeated heads and of a padded vocabulary too.

    Args:
        read: returns rows that the checkpoint has, as one array or as a tree of arrays of so many rows each.
    """
    if stored.stored_shape[0] == stored.num_rows:
        return read(span)
    if "kv_heads" in WEIGHT_AXES[stored.name]:
        head_dim, repeats = stored.head_dim, stored.stored_shape[0] // stored.num_rows
        heads = np.arange(span.start, span.stop, head_dim) // head_dim // repeats

        def repeated(rows: Rows) -> Rows:
            by_head = rows.reshape(-1, head_dim, *rows.shape[1:])[heads - heads[0]]
            return by_head.reshape(-1, *rows.shape[1:])

        return jax.tree.map(repeated, read(slice(heads[0] * head_dim, (heads[-1] + 1) * head_dim)))

    def padded(rows: Rows) -> Rows:
        rows = rows[: max(0, stored.num_rows - span.start)]
        missing = span.stop - span.start - len(rows)
        return np.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1)))

    there = slice(min(span.start, stored.num_rows - 1), min(span.stop, stored.num_rows))
    return jax.tree.map(padded, read(there))


def read_floats(checkpoint: Checkpoint, tensor: str, span: slice) -> Rows:
    """Rows of a tensor. Raises `ModelError` if they are not floating-point numbers."""
    rows = checkpoint.read(tensor, span)
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ModelError(
            "weights are floating-point numbers", got=f"{tensor} of {rows.dtype}", fix="use another checkpoint"
        )
    return rows


class _Placing(NamedTuple):
    """The key of the executables that place a weight."""

    mesh: ModelMesh
    stored_spec: PartitionSpec
    spec: PartitionSpec
    inputs: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one device's part."""
        return self.mesh.sharding(self.spec).shard_shape(self.shape)


@cache
def _place(how: _Placing) -> Callable[[Shaped[Array, "..."] | Rows], Shaped[Array, "..."]]:
    def place(stored: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A stored tensor as ours: cast, input axes first."""
        array = stored.astype(jnp.dtype(how.dtype))
        return (array.T if how.inputs else array).reshape(how.part_shape)

    return jax.jit(how.mesh.on_parts(place, (how.stored_spec,), how.spec))


@cache
def _place_rows(
    how: _Placing,
) -> Callable[[Shaped[Array, "..."], Shaped[Array, "..."] | Rows, int], Shaped[Array, "..."]]:
    def place_rows(
        placed: Shaped[Array, "..."], rows: Shaped[Array, "..."], start: Int[Array, ""]
    ) -> Shaped[Array, "..."]:
        """`placed` with the stored rows from `start` on written where they belong, in place."""
        rows = rows.astype(placed.dtype)
        if not how.inputs:
            return jax.lax.dynamic_update_slice_in_dim(placed, rows, start, axis=0)
        matrix = placed.reshape(rows.shape[1], -1)
        return jax.lax.dynamic_update_slice_in_dim(matrix, rows.T, start, axis=1).reshape(placed.shape)

    specs = (how.spec, how.stored_spec, EVERYWHERE)
    return jax.jit(how.mesh.on_parts(place_rows, specs, how.spec), donate_argnums=0)


def keep_quantized(checkpoint: Checkpoint, shapes: Params, num_devices: int) -> Params:
    """Put `QuantizedTensor`s in place of the shapes, as so many devices serve them, of weights that stay quantised.

    A weight does if a `QuantizedTensor` can hold its stored numbers in all layers, and for all experts, and its outputs are
    whole blocks. Raises `ConfigError` if a device's part of such a weight is not of whole blocks or groups.
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
    experts = checkpoint.config.experts
    assert experts is not None
    if len(shape.shape) < 3:
        return shape
    num_stacked, num_inputs, *outputs = shape.shape
    num_parts, num_outputs = num_stacked // experts.num_experts, math.prod(outputs)
    # parts have some of an expert's inputs, or else some of its outputs
    whole_inputs = num_inputs * (num_parts if by_inputs else 1)
    names = [name for i in layers for name in place.tensors((experts.num_experts, *shape.shape[1:]), i)]
    packing = _common_packing(checkpoint, names, num_outputs * (1 if by_inputs else num_parts), whole_inputs)
    if packing is None:
        return shape
    if num_outputs % WIDTH or num_inputs % packing.group:
        raise _cut_between(place.names[0], num_outputs, num_inputs, packing.group, f"experts in {num_parts} parts")
    return QuantizedTensor.of_shape(shape.shape[1:], 1, packing, shape.dtype, (num_stacked,))


def _common_packing(checkpoint: Checkpoint, names: Iterable[str], num_outputs: int, num_inputs: int) -> Packing | None:
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
    """Bytes of the weights on each of the devices; `shapes` has every array once."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // (1 if cut_axis(name) is None else num_devices)
        for block in (shapes.embed, *shapes.layers, shapes.head)
        for name, weight in block.items()
        for leaf in jax.tree.leaves(weight)
    )


def read_quantized(
    checkpoint: Checkpoint, stored: StoredWeight, target: QuantizedTensor, piece_bytes: int, mesh: ModelMesh
) -> QuantizedTensor:
    """Read a weight onto its devices, each its own part, and as many rows at a time as have `piece_bytes` in float32."""
    aligned = math.lcm(WIDTH, stored.head_dim) // WIDTH
    num_inputs = stored.stored_shape[1]
    step = max(1, piece_bytes // (4 * num_inputs * WIDTH * aligned)) * aligned

    def read(rows: slice) -> PackedRows:
        return read_stored(checkpoint, stored.tensor, rows, target.packing)

    @cache
    def part(first: int, end: int) -> list[Shaped[np.ndarray, "B R W"]]:
        # blocks of outputs, all inputs: arrays [blocks, rows, WIDTH]
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
    """Rows of a quantised tensor in this packing: its own, or one that `common` makes of it and others."""
    have = checkpoint.packing(tensor)
    assert have is not None, tensor
    return checkpoint.read_packed(tensor, rows).stored_as(have, packing)


def empty(target: Any, first: int, end: int) -> list[Shaped[np.ndarray, "..."]]:
    """Arrays for a span of the first axis of a weight, which is an array or a `QuantizedTensor` of shapes."""
    return [np.empty((end - first, *struct.shape[1:]), struct.dtype) for struct in jax.tree.leaves(target)]


def placed[W](target: W, sharding: Any, of_device: Callable[[Any], list[Shaped[np.ndarray, "..."]]]) -> W:
    """Place a weight on its devices: `target` is an array's shape, or a `QuantizedTensor` of shapes. `of_device` makes the
    arrays of a part; as all are cut alike, it gets an index of each."""
    structs, tree = jax.tree.flatten(target)
    arrays = [
        jax.make_array_from_callback(struct.shape, sharding, lambda index, number=number: of_device(index)[number])
        for number, struct in enumerate(structs)
    ]
    return jax.tree.unflatten(tree, jax.block_until_ready(arrays))


def fill(blocks: Shaped[np.ndarray, "B R W"], rows: Shaped[np.ndarray, "N R"]) -> None:
    """Write rows into blocks of columns."""
    blocks[:] = rows.reshape(len(blocks), WIDTH, -1).swapaxes(1, 2)


def read_experts(
    checkpoint: Checkpoint, place: StoredExperts, layer: int, name: str, target: Any, mesh: ModelMesh
) -> jax.Array | QuantizedTensor:
    """Read a weight of a layer's experts onto its devices. Of a weight that is not quantised, the host holds one device's part
    at a time. `target`: the shape as devices cut it, and dtype; a `QuantizedTensor` of shapes if it stays quantised."""
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
    num_sides = 2 if "side" in axes else 1

    def part(number: int, *arrays: Shaped[np.ndarray, "R _"]) -> Shaped[np.ndarray, "S _"]:
        array, width = np.concatenate(arrays), arrays[0].shape[1]
        if place.order == "interleaved":
            array = array.reshape(-1, num_sides, width).swapaxes(0, 1).reshape(-1, width)
        # parts have some of the inputs, or else some columns of each side
        if axes[-1] != "expert_ffn":
            return np.split(array, count, axis=1)[number]
        return array.reshape(num_sides, count, -1, width)[:, number].reshape(-1, width)

    return [jax.tree.map(lambda *arrays, number=number: part(number, *arrays), *tensors) for number in range(count)]
