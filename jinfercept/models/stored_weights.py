"""Reads one weight of a checkpoint onto the devices, in pieces, so that the host holds little of it at a time.

Every device gets its own part of a piece: no device and no host holds a weight that is cut.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from jinfercept.errors import ModelError
from jinfercept.models.checkpoint import Checkpoint, StoredTensor
from jinfercept.models.mesh import EVERYWHERE, ModelMesh
from jinfercept.models.parallel import AXIS
from jinfercept.models.sharding import cut_axis, partition_spec
from jinfercept.models.weight_axes import WEIGHT_AXES, WHOLE_NUMBERS

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
