"""Weights that are rows of other tensors in a checkpoint: of fused ones (Phi-3), or in another order (Qwen3-Next, Qwen3.5)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64, Shaped

from jinfercept.errors import ModelError
from jinfercept.models.checkpoint import PackedRows, Packing, common, joined
from jinfercept.models.config import ModelConfig


class RecurrentNames(NamedTuple):
    """Last parts of the names of a recurrent layer's weights, whose rows are ordered head by head, and of the tensors that have
    these rows in a checkpoint: one behind the other, they have all heads' queries first, then all keys, and so on."""

    qkvz: tuple[str, tuple[str, ...]]  # queries, keys, values and gates
    ba: tuple[str, tuple[str, ...]]  # betas and steps
    taps: str  # of the convolution
    by_value_head: tuple[str, ...] = ()  # tensors with a number for each value head
    # value heads are stored with the first of all key heads in front; else those of one key head side by side
    tiled: bool = False


OF_TRANSFORMERS = RecurrentNames(
    (".linear_attn.in_proj_qkvz.weight", (".linear_attn.in_proj_qkv.weight", ".linear_attn.in_proj_z.weight")),
    (".linear_attn.in_proj_ba.weight", (".linear_attn.in_proj_b.weight", ".linear_attn.in_proj_a.weight")),
    ".linear_attn.conv1d.weight",
)
type Fused = Mapping[str, Sequence[str]]
"""The last parts of the names of a layer's fused tensors, and of their parts' names in order."""
type Read = Callable[[str, slice], Shaped[np.ndarray, "rows ..."]]
type ReadPacked = Callable[[str, slice], PackedRows]


class StoredRows(NamedTuple):
    """A weight whose rows are rows of tensors."""

    tensors: tuple[tuple[str, int], ...]  # that have the rows, and how many each has
    order: Int64[np.ndarray, "rows"]  # of every row of the weight, its place in the tensors one behind the other
    shape: tuple[int, ...]

    def spans(self, rows: slice) -> list[tuple[str, slice]]:
        """Where some of the rows are; consecutive ones of a tensor are one span."""
        places = self.order[rows]
        owners = np.searchsorted(np.cumsum([size for _, size in self.tensors]), places, side="right")
        pieces = np.split(places, np.flatnonzero((np.diff(places) != 1) | (np.diff(owners) != 0)) + 1)
        return [self._span(int(piece[0]), len(piece)) for piece in pieces if len(piece)]

    def read(self, rows: slice, read: Read) -> Shaped[np.ndarray, "rows *columns"]:
        """Rows of the weight. Raises `ModelError` for tensors of several types that are not all floating-point numbers."""
        parts = [read(tensor, span).reshape(-1, *self.shape[1:]) for tensor, span in self.spans(rows)]
        types = {part.dtype for part in parts}
        if len(types) > 1 and not all(jnp.issubdtype(dtype, jnp.floating) for dtype in types):
            got = f"{', '.join(sorted(map(str, types)))} in {', '.join(name for name, _ in self.tensors)}"
            raise ModelError("parts of one weight have one type of numbers", got=got, fix="use another checkpoint")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def packing(self, packing_of: Callable[[str], Packing | None]) -> Packing | None:
        """How the weight is stored if all its tensors are quantised (`checkpoint.common`); else None."""
        packings = {packing_of(tensor) for tensor, size in self.tensors if size}
        return None if None in packings else common({packing for packing in packings if packing is not None})

    def read_packed(self, rows: slice, packing_of: Callable[[str], Packing | None], read: ReadPacked) -> PackedRows:
        """Rows of a quantised weight, stored as `packing` says."""
        target, parts = self.packing(packing_of), list[PackedRows]()
        assert target is not None
        for tensor, span in self.spans(rows):
            have = packing_of(tensor)
            assert have is not None
            parts.append(read(tensor, span).stored_as(have, target))
        return parts[0] if len(parts) == 1 else joined(parts)

    def _span(self, place: int, count: int) -> tuple[str, slice]:
        for tensor, size in self.tensors:
            if place < size:
                return tensor, slice(place, place + count)
            place -= size
        raise AssertionError("no tensor has the row")


def rows_in(
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    fused: Fused,
    recurrent: RecurrentNames = OF_TRANSFORMERS,
) -> dict[str, StoredRows]:
    """The weights, by name, that are rows of tensors of these shapes; a tensor with other rows than they need is left whole. A
    tensor of three parts in `fused` has queries, keys and values, one of two a gate and its up."""
    return _of_fused(shapes, config, fused) | _by_heads(shapes, config, recurrent)


def shapes_with(shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, StoredRows]) -> dict[str, tuple[int, ...]]:
    """The shapes with the weights in place of the tensors whose rows they are."""
    used = {tensor for weight in rows.values() for tensor, _ in weight.tensors}
    rest = {name: shape for name, shape in shapes.items() if name not in used}
    return rest | {name: weight.shape for name, weight in rows.items()}


def _of_fused(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, fused: Fused) -> dict[str, StoredRows]:
    queries, keys = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    sizes = {3: (queries, keys, keys), 2: (config.ffn_size,) * 2}
    by_name = dict[str, StoredRows]()
    for tensor, shape in shapes.items():
        end = next((end for end in fused if tensor.endswith(end)), None)
        if end is None or shape[:1] != (sum(sizes[len(fused[end])]),):
            continue
        start = 0
        for name, size in zip(fused[end], sizes[len(fused[end])], strict=True):
            order = np.arange(start, start + size)
            by_name[tensor.removesuffix(end) + name] = StoredRows(((tensor, shape[0]),), order, (size, *shape[1:]))
            start += size
    return by_name


def _by_heads(
    shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, names: RecurrentNames
) -> dict[str, StoredRows]:
    """The weights of recurrent layers, which are stored head by head with us and part by part in a checkpoint."""
    if (sizes := config.delta_net) is None:
        return {}
    keys, values, each = _Part(sizes.key_dim), _Part(sizes.value_dim, sizes.group), _Part(1, sizes.group)
    weights = {
        names.qkvz[0]: (names.qkvz[1], (keys, keys, values, values)),
        names.ba[0]: (names.ba[1], (each, each)),
        names.taps: ((names.taps,), (keys, keys, values)),
        **{name: ((name,), (each,)) for name in names.by_value_head},
    }
    if config.family == "nemotron_h":
        mixed = (values, keys, keys)
        of_mamba2 = {".linear_attn.in_proj.weight": (values, *mixed, each), ".linear_attn.conv1d.bias": mixed}
        weights = {name: ((name,), parts) for name, parts in {**of_mamba2, names.taps: mixed}.items()}
    by_name = dict[str, StoredRows]()
    for end, (tensors, parts) in weights.items():
        order = _by_head(parts, sizes.num_key_heads, tiled=names.tiled)
        for name in [name for name in shapes if name.endswith(tensors[0])]:
            base = name.removesuffix(tensors[0])
            stored = {base + tensor: shapes.get(base + tensor) or (0,) for tensor in tensors}
            num_rows = tuple((tensor, shape[0]) for tensor, shape in stored.items())
            if sum(count for _, count in num_rows) == len(order) and len({shape[1:] for shape in stored.values()}) == 1:
                columns = shapes[name][1:]
                shape = (len(order), math.prod(columns)) if columns else (len(order),)
                by_name[base + end] = StoredRows(num_rows, order, shape)
    return by_name


class _Part(NamedTuple):
    """Rows that a key head has: `size` for each of so many value heads, or `size` of its own."""

    size: int
    heads: int = 1


def _by_head(parts: Sequence[_Part], num_heads: int, *, tiled: bool) -> Int64[np.ndarray, "rows"]:
    places, start = list[Int64[np.ndarray, "heads _"]](), 0
    for size, heads in parts:
        rows = np.arange(start, start + num_heads * heads * size)
        by_head = rows.reshape(heads, num_heads, size).swapaxes(0, 1) if tiled else rows
        places.append(by_head.reshape(num_heads, -1))
        start += len(rows)
    return np.concatenate(places, axis=1).reshape(-1)
