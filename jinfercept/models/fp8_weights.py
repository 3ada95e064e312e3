"""Weights in float8 (e4m3) of safetensors checkpoints, with a scale for a tensor, for every output, or for blocks of both axes.

A linear layer has its `weight` in float8, and `weight_scale` (compressed-tensors, vLLM's fp8), which multiplies all of it or
each output, or `weight_scale_inv` for blocks of `weight_block_size`, which multiplies too. Scales of inputs and of KV are not
used: products are of 16-bit numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jinfercept.errors import ModelError
from jinfercept.models.gptq_weights import Read
from jinfercept.models.packed_rows import PackedRows, Packing

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Float8Format:
    """How a checkpoint's linear layers are stored.

    Attributes:
        block: outputs and inputs of a block with one scale; None: a scale for all or for every output.
        unquantised: parts of the names of layers that are stored as usual.
    """

    block: tuple[int, int] | None
    unquantised: tuple[str, ...] = ()
    method: ClassVar[str] = "fp8"
    parts: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale")

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Self:
        """Of `quantization_config` in `config.json`. Raises `ModelError` for another quantisation of compressed-tensors."""
        if stated.get("quant_method") == "compressed-tensors" and stated.get("format") != "float-quantized":
            raise ModelError(
                "compressed tensors are in float8", got=repr(stated.get("format"))[:80], fix="use a checkpoint in FP8"
            )
        block = stated.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        ):
            raise ModelError("weight_block_size is two sizes", got=repr(block)[:80], fix="correct config.json")
        without = stated.get("ignore") or stated.get("ignored_layers") or stated.get("modules_to_not_convert") or ()
        return cls(None if block is None else (block[0], block[1]), tuple(map(str, without)))

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, of those of all tensors."""
        return {
            name: shape for name, shape in stored.items() if not name.endswith(tuple(f".{part}" for part in self.parts))
        }

    @property
    def group_size(self) -> int | None:
        """Inputs with the same scale; None: all inputs."""
        return None if self.block is None else self.block[1]

    def packing(self, num_inputs: int) -> Packing:
        """How a layer with so many inputs is kept."""
        return Packing(E4M3, self.group_size or num_inputs, "float32")

    def rows(self, read: Read, rows: slice) -> PackedRows:
        """The outputs of a layer from one to another. Raises `ModelError` for numbers that are not in e4m3."""
        values, num_rows = read("weight", (rows,)), rows.stop - rows.start
        if values.dtype.name != E4M3:
            raise ModelError("numbers of 8 bits are e4m3", got=values.dtype.name, fix="use another checkpoint")
        if self.block is not None:
            outputs = np.arange(rows.start, rows.stop) // self.block[0]
            scales = read("weight_scale_inv", (slice(outputs[0], outputs[-1] + 1),))[outputs - outputs[0]]
        else:
            scales = read("weight_scale", ()).reshape(-1, 1)
            scales = np.broadcast_to(scales, (num_rows, 1)) if len(scales) == 1 else scales[rows]
        return PackedRows(values, np.ascontiguousarray(scales, np.float32))
