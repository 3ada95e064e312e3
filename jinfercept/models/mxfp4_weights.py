"""Experts in MXFP4 of safetensors checkpoints (gpt-oss): numbers of 4 bits (e2m1), a scale for 32 neighbouring inputs.

A stack of matrices `name` has `name_blocks [X, out, in / 32, 16]`, two numbers in a byte, and `name_scales [X, out, in / 32]`,
exponents of powers of two with 127 added, both uint8, in place of `name [X, in, out]`. No other weights are stored so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jinfercept.errors import ModelError
from jinfercept.layouts.packed_weights import from_e2m1
from jinfercept.models.gptq_weights import Read, StoredType
from jinfercept.models.packed_rows import PackedRows, Packing

GROUP = 32
PACKING = Packing("uint32", GROUP, "uint8")
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class MXFP4Format:
    """How a checkpoint's experts are stored."""

    method: ClassVar[str] = "mxfp4"
    head: ClassVar[bool] = False
    unquantised: ClassVar[tuple[str, ...]] = ()
    group_size: ClassVar[int] = GROUP

    def packed(self, stored: Mapping[str, StoredType]) -> frozenset[str]:
        """Names of the stacks in MXFP4, of all tensors. Raises `ModelError` for blocks without scales, or of other sizes."""
        names = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
        for name in names:
            blocks, scales = stored[name + _BLOCKS], stored.get(name + _SCALES)
            right = len(blocks.shape) == 4 and blocks.dtype == "uint8" and blocks.shape[3] == GROUP // 2
            if not right or scales != StoredType(blocks.shape[:3], "uint8"):
                raise ModelError(
                    "experts in MXFP4 have blocks of 16 bytes, and a scale of one byte for each",
                    got=f"{name}{_BLOCKS} {list(blocks.shape)} of {blocks.dtype}, "
                    f"scales {'missing' if scales is None else f'{list(scales.shape)} of {scales.dtype}'}"[:300],
                    fix="download the checkpoint again, or use another one",
                )
        return frozenset(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]], packed: frozenset[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, of those of all tensors: stacks of matrices in place of their blocks."""
        parts = {name + part for name in packed for part in (_BLOCKS, _SCALES)}
        rest = {name: shape for name, shape in stored.items() if name not in parts}

        def whole(num_matrices: int, outputs: int, groups: int, _: int) -> tuple[int, ...]:
            return num_matrices, groups * GROUP, outputs

        return rest | {name: whole(*stored[name + _BLOCKS]) for name in packed}

    def packing(self, num_inputs: int) -> Packing:
        """How a matrix with so many inputs is kept."""
        return PACKING

    def rows(self, read: Read, rows: slice) -> PackedRows:
        """The rows of the matrices from one to another."""
        blocks, scales = read(_BLOCKS, (rows,)), read(_SCALES, (rows,))
        numbers = from_e2m1(np.stack([blocks & 15, blocks >> 4], axis=-1))
        num_rows = scales.shape[0] * scales.shape[1]
        return PackedRows.of_4_bits(numbers.reshape(num_rows, -1), np.ascontiguousarray(scales.reshape(num_rows, -1)))
