"""Weights in float8 (e4m3) of safetensors checkpoints, with a scale for a tensor, for every output, or for blocks of both axes.

A linear layer has its `weight` in float8, and `weight_scale` (compressed-tensors, vLLM's fp8), which multiplies all of it or
each output, or `weight_scale_inv` for blocks of `weight_block_size`, which multiplies too. Scales of inputs and of KV are not
used: products are of 16-bit numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError, shown
from jinfercept.models.gptq_weights import Read, StoredType
from jinfercept.models.packed_rows import PackedRows, Packing

E4M3 = "float8_e4m3fn"
SCALES = ("weight_scale", "weight_scale_inv")
"""Last parts of the name of a weight's scales, of which it has one."""
_FLOAT8 = ("float8", "F8_")


@dataclass(frozen=True)
class Float8Format:
    """How a checkpoint's linear layers are stored.

    Attributes:
        block: outputs and inputs of a block with one scale; None: a scale for all or for every output.
        unquantised: patterns of the names of layers that are stored as usual, see `is_named`.
    """

    block: tuple[int, int] | None
    unquantised: tuple[str, ...] = ()
    method: ClassVar[str] = "fp8"
    parts: ClassVar[tuple[str, ...]] = (*SCALES, "input_scale", "activation_scale", "k_scale", "v_scale")
    head: ClassVar[bool] = False

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Self:
        """Of `quantization_config` in `config.json`. Raises `ModelError` for another quantisation of compressed-tensors."""
        if stated.get("quant_method") == "compressed-tensors" and stated.get("format") != "float-quantized":
            raise ModelError(
                "compressed tensors are in float8", got=shown(stated.get("format")), fix="use a checkpoint in FP8"
            )
        if stated.get("transform_config"):
            got = repr(stated["transform_config"])[:80]
            raise ModelError(
                "transforms of compressed tensors are not supported", got=got, fix="use another checkpoint"
            )
        block = stated.get("weight_block_size") or _block_of_groups(stated)
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        ):
            raise ModelError("weight_block_size is two sizes", got=shown(block), fix="correct config.json")
        without = stated.get("ignore") or stated.get("ignored_layers") or stated.get("modules_to_not_convert") or ()
        return cls(None if block is None else (block[0], block[1]), tuple(map(str, without)))

    def packed(self, stored: Mapping[str, StoredType]) -> frozenset[str]:
        """Names of the weights in float8, of all tensors. Raises `ModelError` for one without scales, or in another float8."""
        weights = {name: of for name, of in stored.items() if name.endswith(".weight") and of.dtype.startswith(_FLOAT8)}
        for name, of in weights.items():
            if of.dtype != E4M3 or len(of.shape) != 2:
                got = f"{name} {list(of.shape)} of {of.dtype}"
                raise ModelError("numbers of 8 bits are matrices in e4m3", got=got[:200], fix="use another checkpoint")
            self._check_scales(name, of.shape, stored)
        return frozenset(weights)

    def _check_scales(self, name: str, shape: tuple[int, ...], stored: Mapping[str, StoredType]) -> None:
        layer, (outputs, inputs) = name.removesuffix("weight"), shape
        scales = {layer + part: stored[layer + part].shape for part in SCALES if layer + part in stored}
        right: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is not None:
            right = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        if len(scales) != 1 or not set(scales.values()) <= set(right) or inputs % (self.group_size or inputs):
            how = "a tensor or an output" if self.block is None else f"blocks of {list(self.block)}"
            have = ", ".join(f"{scale} {list(size)}" for scale, size in scales.items()) or f"no {layer}{SCALES[0]}"
            raise ModelError(
                f"a weight in float8 has scales for {how}",
                got=f"{name} {list(shape)}, {have}"[:300],
                fix="download the checkpoint again, or use another one",
            )

    def shapes(self, stored: Mapping[str, tuple[int, ...]], packed: frozenset[str]) -> dict[str, tuple[int, ...]]:
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
        """The outputs of a layer from one to another."""
        values, num_rows = read("weight", (rows,)), rows.stop - rows.start
        if self.block is not None:
            outputs = np.arange(rows.start, rows.stop) // self.block[0]
            scales = _scales(read, (slice(outputs[0], outputs[-1] + 1),))[outputs - outputs[0]]
        else:
            scales = _scales(read, ()).reshape(-1, 1)
            scales = np.broadcast_to(scales, (num_rows, 1)) if len(scales) == 1 else scales[rows]
        return PackedRows(values, np.ascontiguousarray(scales, np.float32))


def _scales(read: Read, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
    try:
        return read(SCALES[0], index)
    except KeyError:
        return read(SCALES[1], index)


def _block_of_groups(stated: Mapping[str, Any]) -> Any:
    """`block_structure` of compressed-tensors, the same in all groups of layers; None without one."""
    groups = stated.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    blocks = [how.get("block_structure") for how in weights if isinstance(how, Mapping)]
    if any(block != blocks[0] for block in blocks):
        raise ModelError(
            "groups of layers have blocks of the same size", got=shown(blocks), fix="use another checkpoint"
        )
    return blocks[0] if blocks else None
