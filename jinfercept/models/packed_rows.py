"""`PackedRows`: rows of a quantised weight as a checkpoint has them, an output each, before devices get them in blocks.

`gguf_weights.py` and `quantized_formats.py` make such rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float32, Shaped

from jinfercept.pallas.layouts.packed_weights import E2M1

_SIGNED_E2M1 = np.array([*E2M1, *(-number for number in E2M1)], np.float32)


class Packing(NamedTuple):
    """How a weight's numbers are stored.

    Attributes:
        values: type of the stored numbers; uint32 has eight of 4 bits.
        group: neighbouring inputs of a column that have the same scale.
        scales: type of scales and offsets; uint8 of the exponents of MXFP4, see `packed_weights.py`.
        offset: whether there are offsets.
        zero: subtracted from the stored numbers.
    """

    values: str
    group: int
    scales: str = "float16"
    offset: bool = False
    zero: int = 0

    @property
    def per_value(self) -> int:
        """Numbers in one stored value."""
        return 8 if self.values == "uint32" else 1


class PackedRows(NamedTuple):
    """Rows of a weight.

    Attributes:
        values: int8 `[rows, K]`, or uint32 `[rows, K / 8]`: 4-bit numbers, in the order of `packed_weights.ORDER`.
        scales, offsets: `[rows, K / group]`; None: no offsets.
    """

    values: Shaped[np.ndarray, "R _"]
    scales: Shaped[np.ndarray, "R G"]
    offsets: Shaped[np.ndarray, "R G"] | None = None

    @classmethod
    def of_4_bits(
        cls,
        numbers: Shaped[np.ndarray, "R K"],
        scales: Shaped[np.ndarray, "R G"],
        offsets: Shaped[np.ndarray, "R G"] | None = None,
    ) -> Self:
        """Packs numbers of 0 to 15, of type uint8."""
        eight = np.ascontiguousarray(numbers).view("<u8")
        pairs = eight | eight >> np.uint64(12)  # bytes 0, 1, 4 and 5: a number, and above it the second after it
        low = pairs & np.uint64(0xFF) | (pairs & np.uint64(0xFF00)) << np.uint64(8)
        high = pairs >> np.uint64(24) & np.uint64(0xFF00) | pairs >> np.uint64(16) & np.uint64(0xFF000000)
        return cls((low | high).astype("<u4"), scales, offsets)

    def changed(self, change: Callable[[Shaped[np.ndarray, "R _"]], Shaped[np.ndarray, "R _"]]) -> Self:
        """A copy with other rows, of every array alike."""
        offsets = None if self.offsets is None else change(self.offsets)
        return self._replace(values=change(self.values), scales=change(self.scales), offsets=offsets)

    def dense(self, zero: int) -> Float32[np.ndarray, "R K"]:
        """The numbers that these stand for."""
        numbers = _signed(self.values, zero).reshape(*self.scales.shape, -1)
        if self.scales.dtype == np.uint8:
            wide = np.ldexp(_SIGNED_E2M1[numbers], self.scales[..., None].astype(np.int32) - 127)
        else:
            wide = numbers.astype(np.float32) * self.scales[..., None].astype(np.float32)
        if self.offsets is not None:
            wide += self.offsets[..., None].astype(np.float32)
        return wide.reshape(len(self.values), -1)

    def stored_as(self, have: Packing, target: Packing) -> Self:
        """The same numbers, stored as `target`, which is what they have or what `common` makes of it and others."""
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
    """Rows of several that are stored alike, one behind the other."""
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
    """Stored numbers without their zero."""
    if values.dtype == np.uint32:
        words = values.view(np.uint8).reshape(len(values), -1, 2, 2).swapaxes(-2, -1)
        values = np.stack([words & 15, words >> 4], axis=3).reshape(len(values), -1).view(np.int8)
    return values - np.int8(zero) if zero else values
