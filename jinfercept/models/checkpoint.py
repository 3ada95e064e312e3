"""`Checkpoint`: a checkpoint of any format for `load.py`: a config, named tensors, and their names by weight."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from jaxtyping import Float32, Shaped

from jinfercept.models.config import ModelConfig
from jinfercept.models.weight_axes import NUM_INPUTS, WEIGHT_AXES
from jinfercept.pallas.layouts.packed_weights import E2M1

_SIGNED_E2M1 = np.array([*E2M1, *(-number for number in E2M1)], np.float32)


class Packing(NamedTuple):
    """How a weight's numbers are stored."""

    values: str  # dtype of the stored numbers; uint32 has eight of 4 bits
    group: int  # neighbouring inputs of a column that have the same scale
    scales: str = "float16"  # of offsets too; uint8: exponents of MXFP4, see `packed_weights.py`
    offset: bool = False
    zero: int = 0  # subtracted from the stored numbers

    @property
    def per_value(self) -> int:
        """Numbers in one stored value."""
        return 8 if self.values == "uint32" else 1


class PackedRows(NamedTuple):
    """Rows of a quantised weight."""

    # int8 [rows, K], or uint32 [rows, K / 8]: 4-bit numbers in the order of `packed_weights.ORDER`
    values: Shaped[np.ndarray, "R _"]
    scales: Shaped[np.ndarray, "R G"]  # [rows, K / group]
    offsets: Shaped[np.ndarray, "R G"] | None = None

    @classmethod
    def of_4_bits(
        cls,
        numbers: Shaped[np.ndarray, "R K"],
        scales: Shaped[np.ndarray, "R G"],
        offsets: Shaped[np.ndarray, "R G"] | None = None,
    ) -> Self:
        """Pack numbers of 0 to 15, of type uint8."""
        eight = np.ascontiguousarray(numbers).view("<u8")
        pairs = eight | eight >> np.uint64(12)  # bytes 0, 1, 4 and 5: a number, and above it the second after it
        low = pairs & np.uint64(0xFF) | (pairs & np.uint64(0xFF00)) << np.uint64(8)
        high = pairs >> np.uint64(24) & np.uint64(0xFF00) | pairs >> np.uint64(16) & np.uint64(0xFF000000)
        return cls((low | high).astype("<u4"), scales, offsets)

    def changed(self, change: Callable[[Shaped[np.ndarray, "R _"]], Shaped[np.ndarray, "R _"]]) -> Self:
        """A copy in which the rows of every array are changed alike."""
        offsets = None if self.offsets is None else change(self.offsets)
        return self._replace(values=change(self.values), scales=change(self.scales), offsets=offsets)

    def dense(self, zero: int) -> Float32[np.ndarray, "R K"]:
        """The numbers that are stored, in float32."""
        numbers = _signed(self.values, zero).reshape(*self.scales.shape, -1)
        if self.scales.dtype == np.uint8:
            wide = np.ldexp(_SIGNED_E2M1[numbers], self.scales[..., None].astype(np.int32) - 127)
        else:
            wide = numbers.astype(np.float32) * self.scales[..., None].astype(np.float32)
        if self.offsets is not None:
            wide += self.offsets[..., None].astype(np.float32)
        return wide.reshape(len(self.values), -1)

    def stored_as(self, have: Packing, target: Packing) -> Self:
        """The same numbers, stored as `target`: as they are, or as `common` says for these and others."""
        if have == target:
            return self
        times = have.group // target.group
        scales = np.repeat(self.scales, times, axis=1).astype(target.scales)
        offsets = self.offsets
        if target.offset:
            offsets = np.zeros_like(scales) if offsets is None else np.repeat(offsets, times, axis=1)
            offsets = offsets.astype(target.scales)
        return self._replace(values=_signed(self.values, have.zero), scales=scales, offsets=offsets)


def joined(parts: Sequence[PackedRows]) -> PackedRows:
    """Rows of several weights that are stored alike, one behind the other."""
    values, scales, offsets = zip(*parts, strict=True)
    return PackedRows(
        np.concatenate(values), np.concatenate(scales), None if offsets[0] is None else np.concatenate(offsets)
    )


def common(packings: set[Packing]) -> Packing:
    """How weights of several packings are all stored, without any loss: in 8 bits if they differ."""
    if len(packings) == 1:
        return next(iter(packings))
    groups = [packing.group for packing in packings]
    assert not any(group % min(groups) for group in groups), groups
    scales = "float16" if all(packing.scales == "float16" for packing in packings) else "float32"
    return Packing("int8", min(groups), scales, offset=any(packing.offset for packing in packings))


def _signed(values: Shaped[np.ndarray, "R _"], zero: int) -> Shaped[np.ndarray, "R K"]:
    if values.dtype == np.uint32:
        words = values.view(np.uint8).reshape(len(values), -1, 2, 2).swapaxes(-2, -1)
        values = np.stack([words & 15, words >> 4], axis=3).reshape(len(values), -1).view(np.int8)
    return values - np.int8(zero) if zero else values


class StoredTensor(NamedTuple):
    """The place of a weight in a checkpoint.

    `name` has `{i}` for the layer. Matrices are stored `[out, in]`: the first `inputs` axes of our array are the input,
    and an array with `inputs=0` is stored as it is, or with all its axes in one if `flat`.
    """

    name: str
    inputs: int = 0
    flat: bool = False

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The stored shape of a weight whose shape with us is `ours`."""
        if self.flat:
            return (math.prod(ours),)
        if self.inputs == 0:
            return ours
        return math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])

    def tensors(self, ours: tuple[int, ...], i: int) -> dict[str, tuple[int, ...]]:
        """The stored shape of layer i's weight, by name."""
        return {self.name.format(i=i): self.shape(ours)}


class StoredExperts(NamedTuple):
    """The places of the stacked weights `[X, in, out]` of a layer's experts, or `[X, in, 2, out]` of their two sides.

    The names have `{i}` for the layer, and `{x}` for the expert where experts are apart. Each expert's matrix is stored
    `[out, in]`, or as ours, or as ours with a column's sides side by side on the last axis (`interleaved`). Two sides
    have a name each, or one name for both.
    """

    names: tuple[str, ...]
    order: Literal["out_in", "ours", "interleaved"] = "out_in"

    def tensors(self, ours: tuple[int, ...], i: int) -> dict[str, tuple[int, ...]]:
        """The stored shapes of layer i's weights, by name."""
        if self.order != "out_in":
            joined = *ours[:-2], math.prod(ours[-2:]) // len(self.names)
            stored = ours if self.order == "ours" and len(self.names) == 1 else joined
            return {name.format(i=i): stored for name in self.names}
        num_experts, depth, *outputs = ours
        matrix = math.prod(outputs) // len(self.names), depth
        return {
            name.format(i=i, x=x): matrix if "{x}" in name else (num_experts, *matrix)
            for name in self.names
            for x in range(num_experts)
        }

    def as_ours(self, weight: Any, ours: tuple[int, ...]) -> Any:
        """An expert's stored matrix, its tensors joined, in the order and the shape `ours`."""
        match self.order:
            case "out_in":
                return weight.T.reshape(ours)
            case "interleaved":
                return weight.reshape(*weight.shape[:-1], -1, 2).swapaxes(-1, -2)
            case "ours":
                return weight.reshape(ours)


@dataclass(frozen=True)
class TensorNames:
    """The stored tensors of the three kinds of block, by our names; tensors whose name ends in one of `ignored` are not
    used."""

    embed: Mapping[str, StoredTensor]
    layer: Mapping[str, StoredTensor | StoredExperts]
    head: Mapping[str, StoredTensor]
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        embedding: str,
        layer: Mapping[str, str | StoredExperts],
        head: Mapping[str, str],
        ignored: tuple[str, ...] = (),
    ) -> "TensorNames":
        """Of tensors with these names, in the layouts of PyTorch."""
        embed = {"embedding": _of_torch("embedding", embedding)}
        in_head = {ours: _of_torch(ours, name) for ours, name in head.items()}
        return cls(embed, {}, in_head, ignored).with_layer(layer)

    def with_embed(self, names: Mapping[str, str]) -> "TensorNames":
        """The same with these names of further weights of the embedding."""
        return replace(self, embed={**self.embed, **{ours: _of_torch(ours, name) for ours, name in names.items()}})

    def with_head(self, names: Mapping[str, str]) -> "TensorNames":
        """The same with these names of further weights of the head."""
        return replace(self, head={**self.head, **{ours: _of_torch(ours, name) for ours, name in names.items()}})

    def with_layer(self, names: Mapping[str, str | StoredExperts]) -> "TensorNames":
        """The same with these names of a layer's weights beside or in place of others."""
        new = {ours: _of_torch(ours, name) if isinstance(name, str) else name for ours, name in names.items()}
        return replace(self, layer={**self.layer, **new})


def _of_torch(ours: str, name: str) -> StoredTensor:
    num_inputs = NUM_INPUTS[ours]
    return StoredTensor(name, num_inputs, flat=not num_inputs and "vocab" not in WEIGHT_AXES[ours])


class Checkpoint(Protocol):
    """An opened checkpoint: shapes are known, weights are read piece by piece."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def names(self) -> TensorNames: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every stored tensor's shape, rows first."""
        ...

    @property
    def quantization(self) -> str | None:
        """Name of the format of its quantised weights, as `quantization` has it; None: there are none."""
        ...

    def packing(self, name: str) -> Packing | None:
        """How a tensor is stored; None if its numbers are not quantised, or in a way that can only be dequantised."""
        ...

    def read(self, name: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        """Rows of one tensor, with rotary pairs in our order; dequantised if necessary.

        `rows` begins and ends between heads where the rows are those of heads.
        """
        ...

    def read_packed(self, name: str, rows: slice) -> PackedRows:
        """As `read`, of a tensor that has a packing, with its numbers as they are stored. Of a stack of matrices these are the
        rows of some of them, one matrix after the other: `[out, in]` each, whatever order `read` has."""
        ...
