"""Weights whose rows a checkpoint stores in another order than ours, or in several tensors (recurrent layers of Qwen)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped

from jinfercept.errors import ModelError
from jinfercept.models.checkpoint import StoredTensor
from jinfercept.models.config import DeltaNetConfig

QWEN3_NEXT_NAMES = {
    "delta_qkvz": StoredTensor("model.layers.{i}.linear_attn.in_proj_qkvz.weight", inputs=1),
    "delta_ba": StoredTensor("model.layers.{i}.linear_attn.in_proj_ba.weight", inputs=1),
    "delta_taps": StoredTensor("model.layers.{i}.linear_attn.conv1d.weight", inputs=1),
    "delta_decay": StoredTensor("model.layers.{i}.linear_attn.A_log", flat=True),
    "delta_step_bias": StoredTensor("model.layers.{i}.linear_attn.dt_bias", flat=True),
    "delta_norm": StoredTensor("model.layers.{i}.linear_attn.norm.weight"),
    "delta_o": StoredTensor("model.layers.{i}.linear_attn.out_proj.weight", inputs=2),
    "shared_gate": StoredTensor("model.layers.{i}.mlp.shared_expert.gate_proj.weight", inputs=1),
    "shared_up": StoredTensor("model.layers.{i}.mlp.shared_expert.up_proj.weight", inputs=1),
    "shared_down": StoredTensor("model.layers.{i}.mlp.shared_expert.down_proj.weight", inputs=1),
    "shared_factor": StoredTensor("model.layers.{i}.mlp.shared_expert_gate.weight", inputs=1),
}
"""Where Qwen3-Next's weights are that others do not have."""
_TOGETHER = {
    "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
    "in_proj_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
    "conv1d.weight": ("conv1d.weight",),
}
"""Tensors whose rows, one behind the other, are those of a weight with all heads' queries first, then all keys, and so on."""

type Read = Callable[[str, slice], Shaped[np.ndarray, "rows ..."]]


class ReorderedRows(NamedTuple):
    """A weight of rows of tensors.

    Attributes:
        tensors: that the rows are in, and how many each has.
        order: of every row of the weight, its place in the tensors one behind the other.
        shape: of the weight.
    """

    tensors: tuple[tuple[str, int], ...]
    order: Int64[np.ndarray, "rows"]
    shape: tuple[int, int]

    def read(self, rows: slice, read: Read) -> Shaped[np.ndarray, "rows columns"]:
        """Rows of the weight; consecutive ones are read together."""
        places = self.order[rows]
        pieces = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        parts = [self._consecutive(int(piece[0]), len(piece), read) for piece in pieces if len(piece)]
        if len(types := {str(piece.dtype) for piece in parts}) > 1:
            got = f"{', '.join(sorted(types))} in {', '.join(name for name, _ in self.tensors)}"
            raise ModelError("parts of one weight have one type of numbers", got=got, fix="use another checkpoint")
        return np.concatenate(parts)

    def _consecutive(self, place: int, count: int, read: Read) -> Shaped[np.ndarray, "rows columns"]:
        for tensor, size in self.tensors:
            if place < size:
                return read(tensor, slice(place, place + count)).reshape(count, -1)
            place -= size
        raise AssertionError("no tensor has the row")


def reordered_rows(shapes: Mapping[str, tuple[int, ...]], sizes: DeltaNetConfig) -> dict[str, ReorderedRows]:
    """The weights of recurrent layers that are stored head by head with us and part by part in a checkpoint."""
    keys, values = (sizes.key_dim,) * 2, (sizes.group * sizes.value_dim,)
    parts = {
        "in_proj_qkvz.weight": (*keys, *values * 2),
        "in_proj_ba.weight": (sizes.group,) * 2,
        "conv1d.weight": (*keys, *values),
    }
    reordered = dict[str, ReorderedRows]()
    for end, tensors in _TOGETHER.items():
        order = _by_head(parts[end], sizes.num_key_heads)
        for name in [name for name in shapes if name.endswith(f".linear_attn.{tensors[0]}")]:
            base = name.removesuffix(tensors[0])
            stored = {base + tensor: shapes.get(base + tensor) or (0,) for tensor in tensors}
            sizes_of = tuple((tensor, shape[0]) for tensor, shape in stored.items())
            if sum(size for _, size in sizes_of) == len(order) and len({shape[1:] for shape in stored.values()}) == 1:
                reordered[base + end] = ReorderedRows(sizes_of, order, (len(order), int(np.prod(shapes[name][1:]))))
    return reordered


def _by_head(widths: tuple[int, ...], num_heads: int) -> Int64[np.ndarray, "rows"]:
    """The places of rows that are stored part by part, in the order head by head; a head has so many rows of each part."""
    ends = np.cumsum([width * num_heads for width in widths])
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    return np.concatenate([part.reshape(num_heads, -1) for part in parts], axis=1).reshape(-1)
