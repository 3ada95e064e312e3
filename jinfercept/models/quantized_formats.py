"""How safetensors checkpoints store quantised weights: in words (GPTQ, AWQ), in float8, and experts in MXFP4.

* GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978): a linear layer `name` has `name.qweight`, `name.qzeros` and `name.scales`,
  words of 4- or 8-bit numbers, in place of `name.weight`; groups of inputs share a scale and a zero. GPTQ joins neighbouring
  inputs of a column in a word, AWQ neighbouring columns in an order of its own. Layouts as AutoGPTQ's `qlinear_cuda.py` and
  AutoAWQ's `gemm.py` write them.
* Float8 (e4m3): a layer has its `weight` in float8, and `weight_scale` (compressed-tensors, vLLM's fp8, NVIDIA's modelopt),
  which multiplies all of it or each output, or `weight_scale_inv` for blocks of `weight_block_size`, which multiplies too.
  Scales of inputs and of KV are not used: products are of 16-bit numbers.
* MXFP4 (gpt-oss): a stack of matrices `name` has `name_blocks [X, out, in / 32, 16]`, two numbers of e2m1 in a byte, and
  `name_scales [X, out, in / 32]`, exponents of powers of two with 127 added, both uint8, in place of `name [X, in, out]`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from jinfercept.errors import ModelError, shown
from jinfercept.models.checkpoint import PackedRows, Packing
from jinfercept.pallas.layouts.packed_weights import from_e2m1

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""The last parts of the names of a layer's tensors; `g_idx` has the group of every input."""
_AGAIN = "download the checkpoint again, or use another one"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of a word, from the lowest bits


class StoredType(NamedTuple):
    """Shape and type of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


type Read = Callable[[str, tuple[slice, ...]], Shaped[np.ndarray, "..."]]
"""Reads a part of one of a layer's tensors, by the last part of its name. Raises `KeyError` if there is none of it."""


@dataclass(frozen=True)
class WordFormat:
    """Linear layers that are stored in words (GPTQ, AWQ)."""

    method: str  # gptq or awq
    bits: int  # of a number
    group_size: int | None  # inputs with the same scale; None: all inputs
    symmetric: bool  # all zeros are in the middle
    stored_zero: int  # added to stored zeros
    unquantised: tuple[str, ...] = ()  # patterns of layers that are stored as usual, see `is_named`
    head: bool = False  # whether the head is stored so too
    parts: ClassVar[tuple[str, ...]] = tuple(f".{part}" for part in PARTS)

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Self:
        """Read `quantization_config` of `config.json`. Raises `ModelError` for layouts that are not supported."""
        method, bits, group = str(stated.get("quant_method")), stated.get("bits"), stated.get("group_size")
        supported = {"gptq": (4, 8), "awq": (4,)}
        if type(bits) is not int or bits not in supported[method]:
            raise ModelError(
                f"numbers of {method} checkpoints have other sizes",
                got=f"bits {bits!r}"[:80],
                fix=f"use {supported[method]}",
            )
        if type(group) is not int or not (group == -1 or (group > 0 and group % 8 == 0)):
            raise ModelError("group_size is a multiple of 8, or -1", got=shown(group), fix="correct config.json")
        if method == "gptq" and stated.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            got = repr(stated["checkpoint_format"])[:80]
            raise ModelError("GPTQ has the checkpoint_format gptq or gptq_v2", got=got, fix="use another checkpoint")
        if method == "gptq" and stated.get("desc_act"):
            raise ModelError(
                "inputs of GPTQ in order of activation are not supported", got="desc_act", fix="use another file"
            )
        if method == "awq" and str(stated.get("version", "gemm")).lower() != "gemm":
            raise ModelError("AWQ has the version gemm", got=shown(stated["version"]), fix="use another checkpoint")
        first = method == "gptq" and stated.get("checkpoint_format", "gptq") != "gptq_v2"  # stores zeros less one
        symmetric = method == "gptq" and stated.get("sym") is True
        without = (*map(str, stated.get("modules_to_not_convert") or ()), *_left_out(stated.get("dynamic") or {}))
        return cls(
            method, bits, None if group == -1 else group, symmetric, int(first), without, stated.get("lm_head") is True
        )

    def weights(self, stored: Mapping[str, StoredType]) -> dict[str, tuple[int, int]]:
        """The shapes of the weights in words, of all tensors. Raises `ModelError` for words that cannot be read."""
        layers = [name.removesuffix("qweight") for name in stored if name.endswith(".qweight")]
        for layer in layers:
            self._check_parts(layer, stored)
        return {f"{layer}weight": self._shape(stored[f"{layer}qweight"].shape) for layer in layers}

    def _check_parts(self, layer: str, stored: Mapping[str, StoredType]) -> None:
        missing = [layer + part for part in PARTS[:3] if layer + part not in stored]
        if missing or f"{layer}weight" in stored:
            got = f"no {', '.join(missing)}" if missing else f"{layer}weight and {layer}qweight"
            raise ModelError(
                f"a layer of {self.method} has its words, zeros and scales, and no weight", got=got[:300], fix=_AGAIN
            )
        qweight, qzeros, scales, *_ = (stored.get(layer + part) for part in PARTS)
        assert qweight is not None
        assert qzeros is not None
        assert scales is not None
        if {qweight.dtype, qzeros.dtype} != {"int32"} or len(qweight.shape) != 2 or "float" not in scales.dtype:
            got = f"{layer}qweight {list(qweight.shape)} of {qweight.dtype}, zeros of {qzeros.dtype}, scales of {scales.dtype}"
            raise ModelError("words are a matrix of int32, scales are numbers", got=got[:300], fix=_AGAIN)
        outputs, inputs = self._shape(qweight.shape)
        groups = inputs / (self.group_size or inputs)
        expected = (groups, -(-outputs * self.bits // 32)), (groups, outputs)
        if (qzeros.shape, scales.shape) != expected:
            raise ModelError(
                "a layer has another number of groups than group_size says",
                got=f"{layer}qweight {list(qweight.shape)}, zeros {list(qzeros.shape)}, scales {list(scales.shape)}"[
                    :300
                ],
                fix="correct config.json",
            )

    def _shape(self, qweight: tuple[int, ...]) -> tuple[int, int]:
        first, second, times = *qweight, 32 // self.bits
        return (second, first * times) if self.method == "gptq" else (second * times, first)  # outputs, inputs

    def packing(self, num_inputs: int) -> Packing:
        """How a layer with so many inputs is kept."""
        kind, middle = ("uint32", 8) if self.bits == 4 else ("int8", 0)
        group = self.group_size or num_inputs
        return Packing(kind, group, "float32", offset=not self.symmetric, zero=middle if self.symmetric else 0)

    def rows(self, read: Read, rows: slice) -> PackedRows:
        """Some outputs of a layer. Raises `ModelError` if its zeros are not as the config says."""
        times, every = 32 // self.bits, slice(None)
        words = slice(rows.start // times, -(-rows.stop // times))
        own = slice(rows.start - words.start * times, rows.stop - words.start * times)
        scales = read("scales", (every, rows)).astype(np.float32).T
        zeros = self._apart(read("qzeros", (every, words)), axis=1)[:, own].T
        zeros = (zeros + self.stored_zero).astype(np.uint8) & np.uint8((1 << self.bits) - 1)
        if self.method == "gptq":
            numbers = self._apart(read("qweight", (every, rows)), axis=0).T
            self._check_groups(read, numbers.shape[1])
        else:
            numbers = self._apart(read("qweight", (every, words)), axis=1)[:, own].T
        return self._packed(np.ascontiguousarray(numbers), scales, zeros)

    def _packed(
        self, numbers: UInt8[np.ndarray, "R K"], scales: Shaped[np.ndarray, "R G"], zeros: UInt8[np.ndarray, "R G"]
    ) -> PackedRows:
        middle, scales = 1 << self.bits - 1, np.ascontiguousarray(scales)
        if self.symmetric and (zeros != middle).any():
            raise ModelError(
                "zeros of a symmetric checkpoint are in the middle", got="others", fix="correct config.json: sym"
            )
        if self.bits == 4:
            offsets = None if self.symmetric else -scales * zeros
            return PackedRows.of_4_bits(numbers, scales, offsets)
        offsets = None if self.symmetric else -scales * (zeros.astype(np.int16) - middle)
        return PackedRows((numbers ^ np.uint8(128)).view(np.int8), scales, offsets)

    def _apart(self, words: Int32[np.ndarray, "r c"], axis: int) -> UInt8[np.ndarray, "R C"]:
        places = np.arange(0, 32, self.bits, dtype=np.uint32)
        if self.method == "awq":
            places = places[np.argsort(_AWQ_ORDER)]
        apart = np.expand_dims(words.view(np.uint32), axis + 1) >> (places[:, None] if axis == 0 else places)
        apart = (apart & np.uint32((1 << self.bits) - 1)).astype(np.uint8)
        return apart.reshape(-1, words.shape[1]) if axis == 0 else apart.reshape(len(words), -1)

    def _check_groups(self, read: Read, num_inputs: int) -> None:
        try:
            groups = read("g_idx", (slice(None),))
        except KeyError:  # not all writers store it
            return
        if groups.shape != (num_inputs,) or (groups != np.arange(num_inputs) // (self.group_size or num_inputs)).any():
            raise ModelError(
                "inputs of GPTQ in order of activation are not supported", got="g_idx", fix="use another file"
            )


def _left_out(dynamic: Any) -> list[str]:
    """Patterns of the layers that `dynamic` of GPTQModel leaves unquantised. Raises `ModelError` if it has others."""
    rules = [rule for rule in dynamic if not str(rule).startswith("-:")] if isinstance(dynamic, Mapping) else [dynamic]
    if rules:
        raise ModelError(
            "dynamic of quantization_config gives layers bits and groups of their own",
            got=", ".join(map(str, rules))[:200],
            fix="use a checkpoint of one kind of words",
        )
    return [f"re:{rule.removeprefix('-:')}" for rule in dynamic]


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a weight's layer matches one of the patterns of layers that a config leaves unquantised: parts of names, or
    regular expressions for how names begin, behind `re:` as in compressed-tensors."""
    layer = name.removesuffix(".weight")
    return any(
        _matches(pattern.removeprefix("re:"), layer) if pattern.startswith("re:") else pattern in layer
        for pattern in patterns
    )


def _matches(pattern: str, layer: str) -> bool:
    try:
        return re.match(pattern, layer) is not None
    except re.error as error:
        raise ModelError(
            "quantization_config has a pattern that is no regular expression",
            got=f"{pattern[:80]}: {error}",
            fix="correct config.json",
        ) from error


E4M3 = "float8_e4m3fn"
SCALES = ("weight_scale", "weight_scale_inv")
"""Last parts of the name of a weight's scales, of which it has one."""
_FLOAT8 = ("float8", "F8_")


@dataclass(frozen=True)
class Float8Format:
    """Linear layers that are stored in float8."""

    # outputs and inputs of a block with one scale, fewer in the last ones; None: a scale for all or for every output
    block: tuple[int, int] | None
    unquantised: tuple[str, ...] = ()  # as of `WordFormat`
    method: ClassVar[str] = "fp8"
    parts: ClassVar[tuple[str, ...]] = tuple(
        f".{part}" for part in (*SCALES, "input_scale", "activation_scale", "k_scale", "v_scale")
    )
    head: ClassVar[bool] = False

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Self:
        """Read `quantization_config` of `config.json`. Raises `ModelError` for other quantisations of its method."""
        numbers = stated.get("format", stated.get("quant_algo"))
        if stated.get("quant_method") != "fp8" and numbers not in ("float-quantized", "FP8"):
            raise ModelError("compressed tensors are in float8", got=shown(numbers), fix="use a checkpoint in FP8")
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

    def weights(self, stored: Mapping[str, StoredType]) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights in e4m3, of all tensors. Raises `ModelError` for one without scales, or in other bytes."""
        weights = {name: of for name, of in stored.items() if name.endswith(".weight") and of.dtype.startswith(_FLOAT8)}
        for name, of in weights.items():
            if of.dtype != E4M3 or len(of.shape) != 2:
                got = f"{name} {list(of.shape)} of {of.dtype}"
                raise ModelError("numbers of 8 bits are matrices in e4m3", got=got[:200], fix="use another checkpoint")
            self._check_scales(name, of.shape, stored)
        return {name: of.shape for name, of in weights.items()}

    def _check_scales(self, name: str, shape: tuple[int, ...], stored: Mapping[str, StoredType]) -> None:
        layer, (outputs, inputs) = name.removesuffix("weight"), shape
        scales = {layer + part: stored[layer + part].shape for part in SCALES if layer + part in stored}
        right: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is not None:
            right = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        if len(scales) != 1 or not set(scales.values()) <= set(right):
            how = "a tensor or an output" if self.block is None else f"blocks of {list(self.block)}"
            have = ", ".join(f"{scale} {list(size)}" for scale, size in scales.items()) or f"no {layer}{SCALES[0]}"
            raise ModelError(
                f"a weight in float8 has scales for {how}",
                got=f"{name} {list(shape)}, {have}"[:300],
                fix="download the checkpoint again, or use another one",
            )

    @property
    def group_size(self) -> int | None:
        """Inputs with the same scale; None: all inputs."""
        return None if self.block is None else self.block[1]

    def packing(self, num_inputs: int) -> Packing:
        return Packing(E4M3, math.gcd(num_inputs, self.group_size or num_inputs), "float32")

    def rows(self, read: Read, rows: slice) -> PackedRows:
        values, num_rows = read("weight", (rows,)), rows.stop - rows.start
        if self.block is not None:
            outputs = np.arange(rows.start, rows.stop) // self.block[0]
            scales = _scales(read, (slice(outputs[0], outputs[-1] + 1),))[outputs - outputs[0]]
            group = self.packing(values.shape[1]).group  # of a last block with fewer inputs there are whole groups too
            scales = scales.repeat(self.block[1] // group, axis=1)[:, : values.shape[1] // group]
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


GROUP = 32
PACKING = Packing("uint32", GROUP, "uint8")
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class MXFP4Format:
    """Experts that are stored in MXFP4."""

    method: ClassVar[str] = "mxfp4"
    parts: ClassVar[tuple[str, ...]] = (_BLOCKS, _SCALES)
    head: ClassVar[bool] = False
    unquantised: ClassVar[tuple[str, ...]] = ()
    group_size: ClassVar[int] = GROUP

    def weights(self, stored: Mapping[str, StoredType]) -> dict[str, tuple[int, int, int]]:
        """The shapes of the stacks, of all tensors. Raises `ModelError` for blocks without scales, or of other sizes."""
        stacks = dict[str, tuple[int, int, int]]()
        for name in [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]:
            blocks, scales = stored[name + _BLOCKS], stored.get(name + _SCALES)
            right = len(blocks.shape) == 4 and blocks.dtype == "uint8" and blocks.shape[3] == GROUP // 2
            if not right or scales != StoredType(blocks.shape[:3], "uint8"):
                raise ModelError(
                    "experts in MXFP4 have blocks of 16 bytes, and a scale of one byte for each",
                    got=f"{name}{_BLOCKS} {list(blocks.shape)} of {blocks.dtype}, "
                    f"scales {'missing' if scales is None else f'{list(scales.shape)} of {scales.dtype}'}"[:300],
                    fix="download the checkpoint again, or use another one",
                )
            num_matrices, outputs, groups, _ = blocks.shape
            stacks[name] = num_matrices, groups * GROUP, outputs
        return stacks

    def packing(self, num_inputs: int) -> Packing:
        return PACKING

    def rows(self, read: Read, rows: slice) -> PackedRows:
        blocks, scales = read(_BLOCKS, (rows,)), read(_SCALES, (rows,))
        numbers = from_e2m1(np.stack([blocks & 15, blocks >> 4], axis=-1))
        num_rows = scales.shape[0] * scales.shape[1]
        return PackedRows.of_4_bits(numbers.reshape(num_rows, -1), np.ascontiguousarray(scales.reshape(num_rows, -1)))


type QuantizedFormat = WordFormat | Float8Format | MXFP4Format


def format_of(stated: Any) -> QuantizedFormat | None:
    """How weights are quantised, by `quantization_config`; None: they are not. Raises `ModelError` for other quantisations."""
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError("quantization_config is an object", got=shown(stated), fix="correct config.json")
    match stated.get("quant_method"):
        case "gptq" | "awq":
            return WordFormat.from_config(stated)
        case "fp8" | "compressed-tensors" | "modelopt":
            return Float8Format.from_config(stated)
        case "mxfp4":
            return MXFP4Format()
        case other:
            raise ModelError(
                "the checkpoint's quantisation is not supported",
                got=shown(other),
                fix="use a checkpoint of gptq, awq, fp8 or mxfp4, a GGUF file, or one that is not quantised",
            )
