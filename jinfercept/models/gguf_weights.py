"""Checkpoints in one `.gguf` file, Llama architecture, as llama.cpp's converter writes them.

The converter permutes the rows of Q and K so that rotary pairs are neighbours; reading puts them half a head apart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float

from jinfercept.errors import ModelError
from jinfercept.gguf_header import Header, TensorInfo, read_header
from jinfercept.models.checkpoint import Names, Stored
from jinfercept.models.config import ModelConfig, RopeConfig

_NAMES = Names(
    embed={"embedding": Stored("token_embd.weight")},
    layer={
        "attn_norm": Stored("blk.{i}.attn_norm.weight"),
        "q": Stored("blk.{i}.attn_q.weight", inputs=1),
        "k": Stored("blk.{i}.attn_k.weight", inputs=1),
        "v": Stored("blk.{i}.attn_v.weight", inputs=1),
        "o": Stored("blk.{i}.attn_output.weight", inputs=2),
        "ffn_norm": Stored("blk.{i}.ffn_norm.weight"),
        "gate": Stored("blk.{i}.ffn_gate.weight", inputs=1),
        "up": Stored("blk.{i}.ffn_up.weight", inputs=1),
        "down": Stored("blk.{i}.ffn_down.weight", inputs=1),
    },
    head={"norm": Stored("output_norm.weight"), "unembed": Stored("output.weight")},
)
_TYPES = ("F32", "F16", "Q8_0", "Q4_1")
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class GGUFCheckpoint:
    """An opened file: its config, and where its tensors are."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    _file: Path
    _tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, file: Path) -> "GGUFCheckpoint":
        """Read the header.

        Raises:
            ModelError: not a GGUF file, not a Llama model, metadata missing, or a quantisation that is not supported.
        """
        header = read_header(file)
        unknown = sorted({_type_name(info.kind) for info in header.tensors.values()} - set(_TYPES))
        if unknown:
            raise ModelError(
                "the file's quantisation is not supported",
                got=", ".join(unknown),
                fix=f"use one of {', '.join(_TYPES)}",
            )
        shapes = {name: info.shape for name, info in header.tensors.items()}
        return cls(config_from_gguf(header), shapes, file, header.tensors)

    @property
    def names(self) -> Names:
        return _NAMES

    def read(self, name: str) -> Float[np.ndarray, "..."]:
        shape, number, offset = self._tensors[name]
        kind = gguf.GGMLQuantizationType(number)
        stored = gguf.quants.quant_shape_to_byte_shape(shape, kind)
        try:
            data = np.memmap(self._file, np.uint8, "r", offset, stored)
        except ValueError as error:
            raise ModelError(
                "the GGUF file ends too early", got=f"{self._file}: {error}", fix="download it again"
            ) from error
        values = gguf.quants.dequantize(data, kind).reshape(shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            return halves_apart(values, self.config.head_dim)
        return values


def _type_name(kind: int) -> str:
    known = {member.value: member.name for member in gguf.GGMLQuantizationType}
    return known.get(kind, f"type {kind}")


def halves_apart(rows: Float[np.ndarray, "HD E"], head_dim: int) -> Float[np.ndarray, "HD E"]:
    """Undo llama.cpp's permutation: within each head, rows `2i, 2i + 1` go to `i, i + D / 2`."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def config_from_gguf(header: Header) -> ModelConfig:
    """The model's config from a file's metadata.

    Raises:
        ModelError: another architecture than Llama, a rope scaling other than linear, or keys missing.
    """
    meta = _Metadata(header.metadata)
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ModelError("the GGUF file's architecture is not supported", got=architecture, fix="use a Llama model")
    hidden_size, num_layers, num_heads, ffn_size, max_position, norm_eps = meta.require(
        "llama.embedding_length",
        "llama.block_count",
        "llama.attention.head_count",
        "llama.feed_forward_length",
        "llama.context_length",
        "llama.attention.layer_norm_rms_epsilon",
    )
    head_dim = meta.get("llama.attention.key_length", hidden_size // num_heads)
    embedding = header.tensors.get("token_embd.weight")
    stop_ids = [meta.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    return ModelConfig(
        family="llama",
        vocab_size=embedding.shape[0] if embedding else 0,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=ffn_size,
        norm_eps=_decimal(norm_eps),
        rope=_rope(meta, head_dim),
        tie_embeddings="output.weight" not in header.tensors,
        max_position=max_position,
        eos_token_ids=tuple(dict.fromkeys(id_ for id_ in stop_ids if id_ is not None)),
        activation="silu",
    )


def _rope(meta: "_Metadata", head_dim: int) -> RopeConfig:
    theta = float(meta.get("llama.rope.freq_base", 10_000.0))
    rotary_dim = meta.get("llama.rope.dimension_count", head_dim)
    scaling = meta.get("llama.rope.scaling.type", "none")
    if rotary_dim != head_dim:
        raise ModelError("partial rotary embedding in GGUF is not supported", got=rotary_dim, fix="use another model")
    if scaling == "none":
        return RopeConfig(theta, rotary_dim)
    if scaling == "linear":
        (factor,) = meta.require("llama.rope.scaling.factor")
        return RopeConfig(theta, rotary_dim, scaling="linear", factor=float(factor))
    raise ModelError("the GGUF file's rope scaling is not supported", got=scaling, fix="use the Hugging Face directory")


class _Metadata:
    """A file's key-value pairs."""

    def __init__(self, pairs: Mapping[str, Any]) -> None:
        self._pairs = pairs

    def get(self, key: str, default: Any = None) -> Any:
        return self._pairs.get(key, default)

    def require(self, *keys: str) -> tuple[Any, ...]:
        missing = [key for key in keys if key not in self._pairs]
        if missing:
            raise ModelError(
                "the GGUF file lacks metadata", got=f"no {', '.join(missing)}", fix="convert the model again"
            )
        return tuple(self._pairs[key] for key in keys)


def _decimal(stored: float) -> float:
    """The short decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(f"{stored:.6g}") if math.isfinite(stored) else stored
