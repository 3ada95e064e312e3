"""Weights of GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) checkpoints: words of 4- or 8-bit numbers, zeros and scales.

A linear layer `name` has `name.qweight`, `name.qzeros` and `name.scales` in place of `name.weight`; groups of inputs share a
scale and a zero. GPTQ joins neighbouring inputs of a column in a word, AWQ neighbouring columns in an order of its own. Layouts
as AutoGPTQ's `qlinear_cuda.py` and AutoAWQ's `gemm.py` write them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from jinfercept.errors import ModelError, shown
from jinfercept.models.packed_rows import PackedRows, Packing

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
    """How a checkpoint's linear layers are stored.

    Attributes:
        method: gptq or awq.
        bits: of a number.
        group_size: inputs with the same scale; None: all inputs.
        symmetric: all zeros are in the middle.
        stored_zero: what is added to stored zeros.
        unquantised: patterns of the names of layers that are stored as usual, see `is_named`.
        head: whether the head is stored so too.
    """

    method: str
    bits: int
    group_size: int | None
    symmetric: bool
    stored_zero: int
    unquantised: tuple[str, ...] = ()
    head: bool = False

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Self:
        """Of `quantization_config` in `config.json`. Raises `ModelError` for layouts that are not supported."""
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

    def packed(self, stored: Mapping[str, StoredType]) -> frozenset[str]:
        """Names of the weights that are stored in words, of all tensors. Raises `ModelError` for words that cannot be read."""
        layers = [name.removesuffix("qweight") for name in stored if name.endswith(".qweight")]
        for layer in layers:
            self._check_parts(layer, stored)
        return frozenset(f"{layer}weight" for layer in layers)

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

    def shapes(self, stored: Mapping[str, tuple[int, ...]], packed: frozenset[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, of those of all tensors: weights in place of their words."""
        layers = {name.removesuffix("weight") for name in packed}
        parts = {layer + part for layer in layers for part in PARTS}
        rest = {name: shape for name, shape in stored.items() if name not in parts}
        return rest | {f"{layer}weight": self._shape(stored[f"{layer}qweight"]) for layer in layers}

    def _shape(self, qweight: tuple[int, ...]) -> tuple[int, int]:
        """Outputs and inputs of a layer."""
        first, second, times = *qweight, 32 // self.bits
        return (second, first * times) if self.method == "gptq" else (second * times, first)

    def packing(self, num_inputs: int) -> Packing:
        """How a layer with so many inputs is kept."""
        kind, middle = ("uint32", 8) if self.bits == 4 else ("int8", 0)
        group = self.group_size or num_inputs
        return Packing(kind, group, "float32", offset=not self.symmetric, zero=middle if self.symmetric else 0)

    def rows(self, read: Read, rows: slice) -> PackedRows:
        """The outputs of a layer from one to another. Raises `ModelError` if its zeros are not as the config says."""
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
        """The numbers in words, along an axis."""
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
    """Whether a weight's layer is one of those that a config leaves unquantised.

    Args:
        patterns: parts of layers' names, or regular expressions for how they begin, behind `re:` as in compressed-tensors.
    """
    layer = name.removesuffix(".weight")
    return any(
        _matches(pattern.removeprefix("re:"), layer) if pattern.startswith("re:") else pattern in layer
        for pattern in patterns
    )


def _matches(pattern: str, layer: str) -> bool:
    """Whether the name of a layer begins as a pattern. Raises `ModelError` for a pattern that is none."""
    try:
        return re.match(pattern, layer) is not None
    except re.error as error:
        raise ModelError(
            "quantization_config has a pattern that is no regular expression",
            got=f"{pattern[:80]}: {error}",
            fix="correct config.json",
        ) from error
