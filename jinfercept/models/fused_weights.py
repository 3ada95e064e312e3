"""Weights that a checkpoint stores as rows of one tensor, under the names that they have where each is a tensor (Phi-3)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jinfercept.models.config import ModelConfig


class Part(NamedTuple):
    """Rows of a stored tensor: its name, the first of them, and how many they are."""

    tensor: str
    start: int
    size: int

    def rows(self, span: slice) -> slice:
        """The stored rows, of rows of this part."""
        start, stop, _ = span.indices(self.size)
        return slice(self.start + start, self.start + stop)


type Fused = Mapping[str, Sequence[str]]
"""The last parts of the names of a layer's fused tensors, and of their parts' names in order."""


def fused_parts(shapes: Mapping[str, tuple[int, ...]], fused: Fused, config: ModelConfig) -> dict[str, Part]:
    """The parts of the fused tensors by name; a tensor that has other rows than its parts together is left whole.

    Args:
        shapes: of the stored tensors.
        fused: names that end with the name of a projection, as our weights' names say: those of three parts are queries, keys
            and values, those of two a gate and its up.
    """
    d, parts = config.head_dim, {}
    sizes = {3: (config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d), 2: (config.ffn_size,) * 2}
    for tensor, shape in shapes.items():
        end = next((end for end in fused if tensor.endswith(end)), None)
        if end is None or sum(sizes[len(fused[end])]) != shape[0]:
            continue
        start = 0
        for name, size in zip(fused[end], sizes[len(fused[end])], strict=True):
            parts[tensor.removesuffix(end) + name] = Part(tensor, start, size)
            start += size
    return parts


def stored_rows(parts: Mapping[str, Part], name: str, rows: slice) -> tuple[str, slice]:
    """The stored tensor that has rows of a weight, and the rows there."""
    part = parts.get(name)
    return (name, rows) if part is None else (part.tensor, part.rows(rows))


def split_shapes(shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, Part]) -> dict[str, tuple[int, ...]]:
    """The shapes with parts in place of the fused tensors."""
    whole = {part.tensor for part in parts.values()}
    rest = {name: shape for name, shape in shapes.items() if name not in whole}
    return rest | {name: (part.size, *shapes[part.tensor][1:]) for name, part in parts.items()}
