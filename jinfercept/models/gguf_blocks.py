"""The quantised types of GGUF files that stay quantised: their blocks of bytes as `PackedRows`, number for number.

The layouts are those of llama.cpp's `ggml-common.h`. Types of 5 and 6 bits are stored in 8; types that are not here are
dequantised by the `gguf` package.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Float32, Shaped, UInt8

from jinfercept.layouts.packed_weights import from_e2m1
from jinfercept.models.packed_rows import PackedRows, Packing

type Blocks = UInt8[np.ndarray, "R B bytes"]
"""Rows of blocks as they lie in the file."""


def packed_rows(rows: UInt8[np.ndarray, "R bytes"], kind: int) -> PackedRows:
    """Rows of a tensor, of one of the types in `PACKINGS`."""
    of_type = GGMLQuantizationType(kind)
    return _FORMATS[of_type.name].read(rows.reshape(len(rows), -1, GGML_QUANT_SIZES[of_type][1]))


def _q4_0(blocks: Blocks) -> PackedRows:
    return PackedRows.of_4_bits(_nibbles(blocks[..., 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> PackedRows:
    return PackedRows.of_4_bits(_nibbles(blocks[..., 4:], 16), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Blocks) -> PackedRows:
    return PackedRows(_flat(blocks[..., 2:]).view(np.int8), _halves(blocks, 0))


def _q5_0(blocks: Blocks) -> PackedRows:
    return PackedRows(_five_bits(blocks[..., 2:6], blocks[..., 6:]), _halves(blocks, 0))


def _q5_1(blocks: Blocks) -> PackedRows:
    return PackedRows(_five_bits(blocks[..., 4:8], blocks[..., 8:]), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(blocks: Blocks) -> PackedRows:
    return PackedRows.of_4_bits(_nibbles(blocks[..., 16:], 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: Blocks) -> PackedRows:
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [R, B, 8, 32]
    numbers = _nibbles(blocks[..., 48:], 32) | _flat(high) << np.uint8(4)
    return PackedRows(numbers.view(np.int8), *_scales_and_offsets(blocks))


def _q6_k(blocks: Blocks) -> PackedRows:
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    numbers = _nibbles(blocks[..., :128], 64) | _flat(high) << np.uint8(4)
    scales = _halves(blocks, 208)[..., None].astype(np.float32) * blocks[..., 192:208].view(np.int8)
    return PackedRows(numbers.view(np.int8), _flat(scales))


def _mxfp4(blocks: Blocks) -> PackedRows:
    return PackedRows.of_4_bits(from_e2m1(_nibbles(blocks[..., 1:], 16)), np.ascontiguousarray(blocks[..., 0]))


class _Format(NamedTuple):
    packing: Packing
    read: Callable[[Blocks], PackedRows]


_FORMATS: Mapping[str, _Format] = {
    "Q4_0": _Format(Packing("uint32", 32, zero=8), _q4_0),
    "Q4_1": _Format(Packing("uint32", 32, offset=True), _q4_1),
    "Q5_0": _Format(Packing("int8", 32, zero=16), _q5_0),
    "Q5_1": _Format(Packing("int8", 32, offset=True), _q5_1),
    "Q8_0": _Format(Packing("int8", 32), _q8_0),
    "Q4_K": _Format(Packing("uint32", 32, "float32", offset=True), _q4_k),
    "Q5_K": _Format(Packing("int8", 32, "float32", offset=True), _q5_k),
    "MXFP4": _Format(Packing("uint32", 32, "uint8"), _mxfp4),
    "Q6_K": _Format(Packing("int8", 16, "float32", zero=32), _q6_k),
}
PACKINGS = {name: layout.packing for name, layout in _FORMATS.items()}
"""How the types are stored, by their names."""


def _flat(blocks: Shaped[np.ndarray, "R ..."]) -> Shaped[np.ndarray, "R _"]:
    return np.ascontiguousarray(blocks).reshape(len(blocks), -1)


def _halves(blocks: Blocks, start: int) -> Shaped[np.ndarray, "R B"]:
    """The float16 numbers at a byte of all blocks."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: Blocks, run: int) -> Shaped[np.ndarray, "R K"]:
    """Numbers of 4 bits: of every run of bytes the low ones, then the high ones."""
    runs = packed.reshape(*packed.shape[:2], -1, run)
    numbers = np.empty((*runs.shape[:3], 2, run), np.uint8)
    np.bitwise_and(runs, 15, out=numbers[..., 0, :])
    np.right_shift(runs, 4, out=numbers[..., 1, :])
    return numbers.reshape(len(packed), -1)


def _five_bits(high: UInt8[np.ndarray, "R B 4"], low: UInt8[np.ndarray, "R B 16"]) -> Shaped[np.ndarray, "R K"]:
    bits = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    return (_nibbles(low, 16) | _flat(bits) << np.uint8(4)).view(np.int8)


def _scales_and_offsets(blocks: Blocks) -> tuple[Float32[np.ndarray, "R G"], Float32[np.ndarray, "R G"]]:
    """Scales and offsets of 256 numbers with eight scales and eight minima of 6 bits, packed into 12 bytes."""
    low, middle, top = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 63, (top & 15) | (low >> 2 & 48)], axis=-1)
    minima = np.concatenate([middle & 63, (top >> 4) | (middle >> 2 & 48)], axis=-1)
    wide = _halves(blocks, 0)[..., None].astype(np.float32) * scales
    return _flat(wide), -_flat(_halves(blocks, 2)[..., None].astype(np.float32) * minima)
