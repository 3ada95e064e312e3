"""Checkpoints in one `.gguf` file, as llama.cpp's converter writes them: Llama (so also Mistral), Qwen2 and Qwen3.

The converter permutes the rows of a Llama's Q and K so that rotary pairs are neighbours; reading puts them half a head apart.
Quantised weights are dequantised by the `gguf` package: on the device they take what unquantised ones would take.
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
from jinfercept.models.checkpoint import StoredTensor, TensorNames
from jinfercept.models.config import ARCHITECTURES, ModelConfig, RopeConfig
from jinfercept.models.gguf_header import Header, TensorInfo, read_header

_NAMES = TensorNames(
    embed={"embedding": StoredTensor("token_embd.weight")},
    layer={
        "attn_norm": StoredTensor("blk.{i}.attn_norm.weight"),
        "q": StoredTensor("blk.{i}.attn_q.weight", inputs=1),
        "k": StoredTensor("blk.{i}.attn_k.weight", inputs=1),
        "v": StoredTensor("blk.{i}.attn_v.weight", inputs=1),
        "o": StoredTensor("blk.{i}.attn_output.weight", inputs=2),
        "q_bias": StoredTensor("blk.{i}.attn_q.bias", flat=True),
        "k_bias": StoredTensor("blk.{i}.attn_k.bias", flat=True),
        "v_bias": StoredTensor("blk.{i}.attn_v.bias", flat=True),
        "q_norm": StoredTensor("blk.{i}.attn_q_norm.weight"),
        "k_norm": StoredTensor("blk.{i}.attn_k_norm.weight"),
        "ffn_norm": StoredTensor("blk.{i}.ffn_norm.weight"),
        "gate": StoredTensor("blk.{i}.ffn_gate.weight", inputs=1),
        "up": StoredTensor("blk.{i}.ffn_up.weight", inputs=1),
        "down": StoredTensor("blk.{i}.ffn_down.weight", inputs=1),
    },
    head={"norm": StoredTensor("output_norm.weight"), "unembed": StoredTensor("output.weight")},
    ignored=("rope_freqs.weight",),
)
_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *(
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
    ),
)
_SERVED = ("llama", "qwen2", "qwen3")  # of general.architecture
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class GGUFCheckpoint:
    """An opened file: its config, and where its tensors are; `permuted` if its Q and K have rotary pairs side by side."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    permuted: bool
    _file: Path
    _tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, file: Path) -> "GGUFCheckpoint":
        """Read the header.

        Raises:
            ModelError: not a GGUF file, not a model of a family that is served, metadata missing, or a quantisation that is
                not supported.
        """
        header = read_header(file)
        unknown = sorted({_type_name(info.kind) for info in header.tensors.values()} - set(_TYPES))
        if unknown:
            raise ModelError(
                "the file's quantisation is not supported",
                got=", ".join(unknown),
                fix=f"use one of {', '.join(_TYPES)}",
            )
        _check_sizes(file, header.tensors)
        factors = header.tensors.get("rope_freqs.weight")
        config = config_from_gguf(header, () if factors is None else tuple(_values(file, factors).tolist()))
        shapes = {name: info.shape for name, info in header.tensors.items()}
        return cls(config, shapes, header.metadata["general.architecture"] == "llama", file, header.tensors)

    @property
    def names(self) -> TensorNames:
        return _NAMES

    def read(self, name: str, rows: slice) -> Float[np.ndarray, "..."]:
        values = _values(self._file, self._tensors[name], rows)
        if self.permuted and name.endswith(("attn_q.weight", "attn_k.weight")):
            return halves_apart(values, self.config.head_dim)
        return values


def _check_sizes(file: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise `ModelError` for a tensor that is not within the file."""
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
    """Rows of a tensor, dequantised."""
    kind = gguf.GGMLQuantizationType(tensor.kind)
    stored = gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)
    try:
        data = np.memmap(file, np.uint8, "r", tensor.offset, stored)
    except ValueError as error:
        raise ModelError("the GGUF file ends too early", got=f"{file}: {error}", fix="download it again") from error
    if len(tensor.shape) == 1:
        return gguf.quants.dequantize(data, kind)[rows]
    return gguf.quants.dequantize(data[rows], kind)


def _type_name(kind: int) -> str:
    known = {member.value: member.name for member in gguf.GGMLQuantizationType}
    return known.get(kind, f"type {kind}")


def halves_apart(rows: Float[np.ndarray, "HD E"], head_dim: int) -> Float[np.ndarray, "HD E"]:
    """Undo llama.cpp's permutation: within each head, rows `2i, 2i + 1` go to `i, i + D / 2`."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def config_from_gguf(header: Header, rope_factors: tuple[float, ...] = ()) -> ModelConfig:
    """As `_config`, whose errors are all `ModelError`s here."""
    try:
        return _config(header, rope_factors)
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ModelError(
            "the GGUF file's metadata are of other types than they should be",
            got=str(error)[:200],
            fix="convert the model again",
        ) from error


def _config(header: Header, rope_factors: tuple[float, ...]) -> ModelConfig:
    """The model's config from a file's metadata.

    Args:
        rope_factors: by which each rotary frequency is divided: the file's tensor `rope_freqs.weight`, which is how Llama 3's
            scaling is stored.

    Raises:
        ModelError: an architecture that is not served, a rope scaling other than linear or factors, or keys missing.
    """
    meta = _Metadata(header.metadata)
    architecture = meta.get("general.architecture")
    if architecture not in _SERVED:
        raise ModelError(
            "the GGUF file's architecture is not supported",
            got=str(architecture)[:100],
            fix=f"use one of {', '.join(_SERVED)}",
        )
    hidden_size, num_layers, num_heads, ffn_size, max_position, norm_eps = meta.require(
        "embedding_length",
        "block_count",
        "attention.head_count",
        "feed_forward_length",
        "context_length",
        "attention.layer_norm_rms_epsilon",
    )
    head_dim = meta.of_model("attention.key_length", hidden_size // num_heads)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the GGUF file has no embedding", got="no token_embd.weight", fix="download it again")
    stop_ids = [meta.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    return ModelConfig(
        family=ARCHITECTURES[architecture].family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.of_model("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=ffn_size,
        norm_eps=_decimal(norm_eps),
        rope=_rope(meta, head_dim, rope_factors),
        tie_embeddings="output.weight" not in header.tensors,
        max_position=min(max_position, meta.of_model("attention.sliding_window", max_position)),
        eos_token_ids=tuple(dict.fromkeys(id_ for id_ in stop_ids if id_ is not None)),
        activation="silu",
        qkv_bias=ARCHITECTURES[architecture].qkv_bias,
        qk_norm=ARCHITECTURES[architecture].qk_norm,
    )


def _rope(meta: "_Metadata", head_dim: int, factors: tuple[float, ...]) -> RopeConfig:
    theta = float(meta.of_model("rope.freq_base", 10_000.0))
    rotary_dim = meta.of_model("rope.dimension_count", head_dim)
    scaling = meta.of_model("rope.scaling.type", "none")
    if rotary_dim != head_dim:
        raise ModelError("partial rotary embedding in GGUF is not supported", got=rotary_dim, fix="use another model")
    if factors and (len(factors) != head_dim // 2 or scaling != "none"):
        raise ModelError(
            "the GGUF file's rotary factors do not fit its heads",
            got=f"{len(factors)} factors, head size {head_dim}, scaling {scaling}",
            fix="use the Hugging Face directory",
        )
    if factors:
        return RopeConfig(theta, rotary_dim, scaling="factors", factors=factors)
    if scaling == "none":
        return RopeConfig(theta, rotary_dim)
    if scaling == "linear":
        (factor,) = meta.require("rope.scaling.factor")
        return RopeConfig(theta, rotary_dim, scaling="linear", factor=float(factor))
    raise ModelError("the GGUF file's rope scaling is not supported", got=scaling, fix="use the Hugging Face directory")


class _Metadata:
    """A file's key-value pairs; those of the model itself begin with its architecture's name."""

    def __init__(self, pairs: Mapping[str, Any]) -> None:
        self._pairs = pairs

    def get(self, key: str, default: Any = None) -> Any:
        return self._pairs.get(key, default)

    def of_model(self, key: str, default: Any) -> Any:
        return self._pairs.get(self._name(key), default)

    def require(self, *keys: str) -> tuple[Any, ...]:
        """Keys of the model, all of them."""
        missing = [name for name in map(self._name, keys) if name not in self._pairs]
        if missing:
            raise ModelError(
                "the GGUF file lacks metadata", got=f"no {', '.join(missing)}", fix="convert the model again"
            )
        return tuple(self._pairs[self._name(key)] for key in keys)

    def _name(self, key: str) -> str:
        return f"{self._pairs['general.architecture']}.{key}"


def _decimal(stored: float) -> float:
    """The short decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(f"{stored:.6g}") if math.isfinite(stored) else stored
