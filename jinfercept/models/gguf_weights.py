"""Checkpoints in `.gguf` files, as llama.cpp's converter writes them: Llama (so also Mistral and Mixtral), Qwen2, Qwen3,
Qwen3-MoE, Qwen3-Next, Qwen3.5, gpt-oss, OLMo 2, Phi-3, Granite, SmolLM3 and Gemma.

Types in `_FORMATS` can be read as they are: their blocks of bytes, whose layouts are those of llama.cpp's `ggml-common.h`,
become `PackedRows`, number for number; 5 and 6 bits are stored in 8. The `gguf` package dequantises all types.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Float, Float32, Shaped, UInt8

from jinfercept.errors import ModelError
from jinfercept.models.checkpoint import PackedRows, Packing, StoredExperts, TensorNames
from jinfercept.models.config import ModelConfig
from jinfercept.models.gguf_config import RopeFactors, config_from_gguf
from jinfercept.models.gguf_header import TensorInfo, read_header
from jinfercept.models.stored_rows import Fused, RecurrentNames, StoredRows, rows_in, shapes_with
from jinfercept.pallas.layouts.packed_weights import from_e2m1

type Blocks = UInt8[np.ndarray, "R B bytes"]
"""Rows of blocks as they lie in the file."""


def packed_rows(rows: UInt8[np.ndarray, "R bytes"], kind: int) -> PackedRows:
    """Read rows of a tensor of one of the types in `PACKINGS`."""
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


_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# the converter makes rotary pairs neighbours in the rows of their Q and K; reading puts them half a head apart
_PERMUTING = ("llama", "granite", "smollm3")
_PERMUTED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
_FUSED: Fused = {
    "attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "ffn_up.weight": ("ffn_gate.weight", "ffn_up.weight"),
}
_NAMES = TensorNames.of(
    "token_embd.weight",
    layer={
        "attn_norm": "blk.{i}.attn_norm.weight",
        "q": "blk.{i}.attn_q.weight",
        "k": "blk.{i}.attn_k.weight",
        "v": "blk.{i}.attn_v.weight",
        "o": "blk.{i}.attn_output.weight",
        "q_bias": "blk.{i}.attn_q.bias",
        "k_bias": "blk.{i}.attn_k.bias",
        "v_bias": "blk.{i}.attn_v.bias",
        "o_bias": "blk.{i}.attn_output.bias",
        "gate_bias": "blk.{i}.ffn_gate.bias",
        "up_bias": "blk.{i}.ffn_up.bias",
        "down_bias": "blk.{i}.ffn_down.bias",
        "q_norm": "blk.{i}.attn_q_norm.weight",
        "k_norm": "blk.{i}.attn_k_norm.weight",
        "q_row_norm": "blk.{i}.attn_q_norm.weight",
        "k_row_norm": "blk.{i}.attn_k_norm.weight",
        "attn_post_norm": "blk.{i}.post_attention_norm.weight",
        "ffn_post_norm": "blk.{i}.post_ffw_norm.weight",
        "ffn_norm": "blk.{i}.ffn_norm.weight",
        "gate": "blk.{i}.ffn_gate.weight",
        "up": "blk.{i}.ffn_up.weight",
        "down": "blk.{i}.ffn_down.weight",
        "router": "blk.{i}.ffn_gate_inp.weight",
        "experts_gate_up": StoredExperts(("blk.{i}.ffn_gate_exps.weight", "blk.{i}.ffn_up_exps.weight")),
        "experts_down": StoredExperts(("blk.{i}.ffn_down_exps.weight",)),
        "shared_gate": "blk.{i}.ffn_gate_shexp.weight",
        "shared_up": "blk.{i}.ffn_up_shexp.weight",
        "shared_down": "blk.{i}.ffn_down_shexp.weight",
        "shared_factor": "blk.{i}.ffn_gate_inp_shexp.weight",
    },
    head={"norm": "output_norm.weight", "unembed": "output.weight"},
    ignored=_FACTORS,
)
_GPT_OSS = _NAMES.with_layer(
    {
        "ffn_norm": "blk.{i}.post_attention_norm.weight",
        "sinks": "blk.{i}.attn_sinks.weight",
        "router_bias": "blk.{i}.ffn_gate_inp.bias",
        "experts_gate_up_bias": StoredExperts(("blk.{i}.ffn_gate_exps.bias", "blk.{i}.ffn_up_exps.bias"), "ours"),
        "experts_down_bias": StoredExperts(("blk.{i}.ffn_down_exps.bias",), "ours"),
    },
)
_GEMMA4 = _NAMES.with_layer(
    {
        "router_norm": "blk.{i}.ffn_gate_inp.scale",
        "router_scale": "blk.{i}.ffn_down_exps.scale",
        "dense_post_norm": "blk.{i}.post_ffw_norm_1.weight",
        "experts_norm": "blk.{i}.pre_ffw_norm_2.weight",
        "experts_post_norm": "blk.{i}.post_ffw_norm_2.weight",
        "per_layer_gate": "blk.{i}.inp_gate.weight",
        "per_layer_up": "blk.{i}.proj.weight",
        "per_layer_norm": "blk.{i}.post_norm.weight",
        "layer_scale": "blk.{i}.layer_output_scale.weight",
    }
).with_embed(
    {
        "per_layer_embedding": "per_layer_token_embd.weight",
        "per_layer_projection": "per_layer_model_proj.weight",
        "per_layer_projection_norm": "per_layer_proj_norm.weight",
    }
)
_QWEN3_NEXT = _NAMES.with_layer(
    {
        "ffn_norm": "blk.{i}.post_attention_norm.weight",
        "delta_qkvz": "blk.{i}.ssm_in.weight",
        "delta_ba": "blk.{i}.ssm_ba.weight",
        "delta_taps": "blk.{i}.ssm_conv1d.weight",
        "delta_decay": "blk.{i}.ssm_a",
        "delta_step_bias": "blk.{i}.ssm_dt.bias",
        "delta_norm": "blk.{i}.ssm_norm.weight",
        "delta_o": "blk.{i}.ssm_out.weight",
        "draft_embedding_norm": "blk.{i}.nextn.enorm.weight",
        "draft_hidden_norm": "blk.{i}.nextn.hnorm.weight",
        "draft_fc": "blk.{i}.nextn.eh_proj.weight",
        "draft_norm": "blk.{i}.nextn.shared_head_norm.weight",
    }
)
_STACKED = {"experts_gate_up": StoredExperts(("blk.{i}.ffn_gate_up_exps.weight",))}
_RECURRENT = RecurrentNames(
    ("ssm_in.weight", ("attn_qkv.weight", "attn_gate.weight")),
    ("ssm_ba.weight", ("ssm_beta.weight", "ssm_alpha.weight")),
    "ssm_conv1d.weight",
)
_TILED = _RECURRENT._replace(by_value_head=("ssm_a", "ssm_dt.bias"), tiled=True)
"""Of Qwen3.5; Qwen3-Next's value heads stand as in transformers."""
_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)

_VALUES = 32768
"""Of a row that is dequantised: short rows are joined, since the package takes 16 rows at a time."""


@dataclass(frozen=True)
class GGUFCheckpoint:
    """An opened model: its config, and the places of its tensors."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    permuted: bool  # Q and K have rotary pairs side by side
    tiled: bool  # value heads are tiled (`RecurrentNames`)
    _files: Mapping[str, Path]
    _tensors: Mapping[str, TensorInfo]
    _rows: Mapping[str, StoredRows]

    @classmethod
    def open(cls, file: Path, *, draft_layer: bool = False) -> "GGUFCheckpoint":
        """Read the headers of a model, of which `file` is the only one or the first. `draft_layer`: with the layer that drafts.

        Raises:
            ModelError: not a GGUF file, not a model of a supported family, metadata or a part missing, or an unsupported
                quantisation.
        """
        header, files = read_header(file), {}
        for part in _parts(file, header.metadata):
            tensors = header.tensors if part == file else read_header(part).tensors
            if unknown := sorted({_type_name(info.kind) for info in tensors.values()} - set(_TYPES)):
                fix = f"use one of {', '.join(_TYPES)}"
                raise ModelError("the file's quantisation is not supported", got=", ".join(unknown), fix=fix)
            _check_sizes(part, tensors)
            if twice := tensors.keys() & files.keys():
                got = f"{min(twice)[:100]} in {part.name} and {files[min(twice)].name}"
                raise ModelError("two files of the model have the same tensor", got=got, fix="download them again")
            files |= dict.fromkeys(tensors, part)
            header = header._replace(tensors=header.tensors | tensors)
        factors = [
            tuple(_values(files[name], header.tensors[name]).tolist()) if name in header.tensors else ()
            for name in _FACTORS
        ]
        config = config_from_gguf(header, RopeFactors(*factors))
        architecture, tiled = header.metadata["general.architecture"], False
        if draft_layer:
            config = config.with_draft_layer()
        shapes = {name: info.shape for name, info in header.tensors.items()}
        if config.delta_net is not None:
            behind, tiled = f"blk.{config.num_layers}.", architecture != "qwen3next"
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(behind)}
        fused, recurrent = _FUSED if architecture == "phi3" else {}, _TILED if tiled else _RECURRENT
        rows = rows_in(shapes, config, fused, recurrent)
        shapes = shapes_with(shapes, rows)
        return cls(config, shapes, architecture in _PERMUTING, tiled, files, header.tensors, rows)

    @property
    def names(self) -> TensorNames:
        names = {"gemma4": _GEMMA4, "qwen3_next": _QWEN3_NEXT}.get(self.config.family, _NAMES)
        if any(name.endswith("ffn_gate_up_exps.weight") for name in self.shapes):
            names = names.with_layer(_STACKED)
        is_gpt_oss = self.config.experts is not None and self.config.experts.biased
        return _GPT_OSS if is_gpt_oss else names

    @property
    def quantization(self) -> str | None:
        return "gguf" if any(self.packing(name) is not None for name in self.shapes) else None

    def packing(self, name: str) -> Packing | None:
        if name in self._rows:
            return self._rows[name].packing(self._packing_of)
        packing, delta = self._packing_of(name), self.config.delta_net
        if packing is not None and delta is not None and self._has_tiled_columns(name):
            return None if delta.value_dim % math.lcm(packing.group, 8) else packing
        return packing

    def _packing_of(self, tensor: str) -> Packing | None:
        info = self._tensors[tensor]
        return PACKINGS.get(_type_name(info.kind)) if len(info.shape) in (2, 3) else None

    def read(self, name: str, rows: slice) -> Float[np.ndarray, "..."]:
        values = self._rows[name].read(rows, self._dense) if name in self._rows else self._dense(name, rows)
        if self.config.family == "gemma" and name.endswith("norm.weight"):
            return values - 1  # of the converter, so that llama.cpp need not know
        if self.config.family == "qwen3_next" and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            return values - 1
        if name.endswith("ssm_a"):
            return np.log(-values)
        if self._has_tiled_columns(name):
            return self._grouped(values)
        return halves_apart(values, self.config.head_dim) if self._is_permuted(name) else values

    def read_packed(self, name: str, rows: slice) -> PackedRows:
        if name in self._rows:
            return self._rows[name].read_packed(rows, self._packing_of, self._packed)
        packed = self._packed(name, rows)
        if self._has_tiled_columns(name):
            return packed.changed(self._grouped)
        if not self._is_permuted(name):
            return packed
        return packed.changed(lambda rows: halves_apart(rows, self.config.head_dim))

    def _dense(self, tensor: str, rows: slice) -> Float[np.ndarray, "..."]:
        return _values(self._files[tensor], self._tensors[tensor], rows)

    def _packed(self, tensor: str, rows: slice) -> PackedRows:
        data = _bytes(self._files[tensor], self._tensors[tensor])[rows]
        return packed_rows(data.reshape(-1, data.shape[-1]), self._tensors[tensor].kind)

    def _is_permuted(self, name: str) -> bool:
        return self.permuted and name.endswith(_PERMUTED)

    def _has_tiled_columns(self, name: str) -> bool:
        return self.tiled and name.endswith("ssm_out.weight")

    def _grouped(self, rows: Shaped[np.ndarray, "R _"]) -> Shaped[np.ndarray, "R _"]:
        """Rows whose columns are those of value heads, with the heads of one key head side by side."""
        assert self.config.delta_net is not None
        by_head = rows.reshape(len(rows), self.config.delta_net.group, self.config.delta_net.num_key_heads, -1)
        return by_head.swapaxes(1, 2).reshape(rows.shape)


def _parts(file: Path, metadata: Mapping[str, Any]) -> list[Path]:
    # `llama-gguf-split` splits a model into several files, of which the first has the metadata
    count, place = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if count in (0, 1):
        return [file]
    end = f"-00001-of-{count:05}.gguf" if isinstance(count, int) else ""
    if place != 0 or not end or not file.name.endswith(end):
        raise ModelError(
            "the GGUF file is a part of a model, and not the first by its name",
            got=f"{file}, part {place} of {count}"[:500],
            fix=f"name the file that ends with {end or '-00001-of-….gguf'}",
        )
    parts = [
        file,
        *(file.with_name(f"{file.name.removesuffix(end)}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)),
    ]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError("parts of the model are missing", got=", ".join(missing)[:500], fix="download them")
    return parts


def _check_sizes(file: Path, tensors: Mapping[str, TensorInfo]) -> None:
    size = file.stat().st_size
    for name, tensor in tensors.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
        whole = tensor.shape and all(tensor.shape) and tensor.shape[-1] % block == 0
        if not whole or tensor.offset + math.prod(tensor.shape) // block * block_bytes > size:
            raise ModelError(
                "a tensor of the GGUF file is not within it",
                got=f"{file}, {size} bytes: {name[:100]} of {list(tensor.shape)} at {tensor.offset}",
                fix="download it again",
            )


def _values(file: Path, tensor: TensorInfo, rows: slice = slice(None)) -> Float[np.ndarray, "..."]:
    kind = gguf.GGMLQuantizationType(tensor.kind)
    data = _bytes(file, tensor).view(np.ndarray)  # each slice of a memmap costs time
    if len(tensor.shape) == 1:
        return gguf.quants.dequantize(data, kind)[rows]
    data = data[rows]
    longer = math.gcd(len(data), 1 << max(0, (_VALUES // tensor.shape[-1]).bit_length() - 1))
    values = gguf.quants.dequantize(data.reshape(len(data) // longer, *data.shape[1:-1], -1), kind)
    return values.reshape(len(data), *tensor.shape[1:])


def _bytes(file: Path, tensor: TensorInfo) -> UInt8[np.ndarray, "..."]:
    stored = gguf.quants.quant_shape_to_byte_shape(tensor.shape, gguf.GGMLQuantizationType(tensor.kind))
    try:
        return np.memmap(file, np.uint8, "r", tensor.offset, stored)
    except ValueError as error:
        raise ModelError("the GGUF file ends too early", got=f"{file}: {error}", fix="download it again") from error


def _type_name(kind: int) -> str:
    names = {member.value: member.name for member in gguf.GGMLQuantizationType}
    return names.get(kind, f"type {kind}")


def halves_apart(rows: Shaped[np.ndarray, "HD *E"], head_dim: int) -> Shaped[np.ndarray, "HD *E"]:
    """Undo llama.cpp's permutation: within each head, rows `2i, 2i + 1` go to `i, i + D / 2`."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
