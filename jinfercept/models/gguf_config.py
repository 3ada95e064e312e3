"""Reads a `ModelConfig` from the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jinfercept.errors import ModelError
from jinfercept.models.config import (
    ARCHITECTURES,
    PLAIN_KIND,
    ExpertsConfig,
    LayerKind,
    ModelConfig,
    RopeConfig,
    check_num_layers,
)
from jinfercept.models.gguf_header import Header

_SERVED = {name: name for name in ("llama", "qwen2", "qwen3", "olmo2", "phi3", "granite", "smollm3", "gemma", "gemma2")}
_SERVED |= {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "gemma3": "gemma3_text"}
"""`general.architecture`, and our name for it."""
_GEMMA_PATTERNS = {"gemma2": (2, 46), "gemma3": (6, 62)}
"""One layer of so many is full, the others are windowed; and the layers of the 27B model, whose scale is by its width. As in
llama.cpp, where the file does not state them."""
_BIASES = {"qkv_bias": "blk.0.attn_q.bias", "o_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
"""A tensor of every kind of bias that a model may have."""
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_divisor": "logit_scale",
}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class RopeFactors(NamedTuple):
    """Divisors of the rotary frequencies, from a file's tensors: those of all sequences, which is how Llama 3's scaling is
    stored; or those of sequences within a longrope's original length, and of longer ones."""

    every: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


def config_from_gguf(header: Header, rope_factors: RopeFactors | None = None) -> ModelConfig:
    """The config of a model from a GGUF file's header.

    Args:
        rope_factors: from the file's tensors.

    Raises:
        ModelError: the architecture or the rope scaling is not supported, or metadata are missing or of wrong types.
    """
    try:
        return _config(header, rope_factors or RopeFactors())
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ModelError(
            "the GGUF file's metadata are of other types than they should be",
            got=str(error)[:200],
            fix="convert the model again",
        ) from error


def _config(header: Header, rope_factors: RopeFactors) -> ModelConfig:
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
    check_num_layers(num_layers)
    head_dim = meta.of_model("attention.key_length", hidden_size // num_heads)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the GGUF file has no embedding", got="no token_embd.weight", fix="download it again")
    window = meta.of_model("attention.sliding_window", None)
    named = ARCHITECTURES[_SERVED[architecture]]
    rope = _rope(meta, head_dim, rope_factors)
    kinds, own = (LayerKind(window),) * num_layers if window else (), dict[str, Any]()
    if architecture in _GEMMA_PATTERNS:
        kinds, own = _gemma(meta, architecture, num_layers, head_dim, hidden_size // num_heads)
    if architecture == "granite":
        own = {name: float(meta.of_model(key, 1.0)) for name, key in _GRANITE.items()}
        rope = rope.scoring(float(meta.of_model("attention.scale", head_dim**-0.5)))
    if architecture == "smollm3":
        still = replace(rope, scaling="proportional", turning_pairs=0)
        kinds = tuple(LayerKind(rope=None if (index + 1) % 4 else still) for index in range(num_layers))
    if architecture == "gpt-oss":
        kinds = tuple(PLAIN_KIND if index % 2 else LayerKind(window) for index in range(num_layers))
    if rope.long_factors:
        max_position = rope.original_max_position
    biases = {name: tensor in header.tensors for name, tensor in _BIASES.items()}
    stop_ids = [meta.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    return ModelConfig(
        family=named.family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.of_model("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=ffn_size,
        # the short decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06
        norm_eps=float(f"{norm_eps:.6g}") if math.isfinite(norm_eps) else norm_eps,
        rope=rope,
        tie_embeddings="output.weight" not in header.tensors,
        max_position=max_position,
        eos_token_ids=tuple(dict.fromkeys(id_ for id_ in stop_ids if id_ is not None)),
        activation="gelu_new" if named.family == "gemma" else "silu",
        kinds=kinds,
        experts=_experts(meta, ffn_size),
        **{**biases, **named.parts, **own},
    )


def _gemma(
    meta: "_Metadata", architecture: str, num_layers: int, head_dim: int, width: int
) -> tuple[tuple[LayerKind, ...], dict[str, Any]]:
    """The layers' kinds of Gemma 2 and 3, and their other fields.

    Args:
        width: of the residual stream, by query heads.
    """
    every, widest = _GEMMA_PATTERNS[architecture]
    pattern = meta.of_model("attention.sliding_window_pattern", every)
    near = (
        RopeConfig(float(meta.of_model("rope.freq_base_swa", 10_000.0)), head_dim) if architecture == "gemma3" else None
    )
    windowed = LayerKind(meta.of_model("attention.sliding_window", 4096), near)
    if isinstance(pattern, int):
        pattern = [bool((index + 1) % pattern) for index in range(num_layers)]
    kinds = tuple(windowed if is_windowed else PLAIN_KIND for is_windowed in pattern)
    scale = meta.of_model("attention.scale", (width if num_layers == widest else head_dim) ** -0.5)
    return kinds, {
        "query_scale": scale,
        "soft_cap": meta.of_model("attn_logit_softcapping", None),
        "logit_cap": meta.of_model("final_logit_softcapping", None),
    }


def _experts(meta: "_Metadata", ffn_size: int) -> ExpertsConfig | None:
    """The experts of every layer, of a model that has some: Mixtral's architecture is that of Llama."""
    count, used, columns = (
        meta.of_model(f"expert_{key}", default)
        for key, default in (("count", 0), ("used_count", 0), ("feed_forward_length", ffn_size))
    )
    if not count:
        return None
    gating, factor = meta.of_model("expert_gating_func", 1), meta.of_model("expert_weights_scale", 0.0)
    if gating != 1 or factor not in (0.0, 1.0) or meta.of_model("expert_shared_count", 0):
        raise ModelError(
            "the GGUF file's experts are chosen by a softmax, without a scale, and none is shared",
            got=f"gating function {gating}, scale {factor}, {meta.of_model('expert_shared_count', 0)} shared",
            fix="use another model",
        )
    if meta.get("general.architecture") == "gpt-oss":  # whose numbers llama.cpp has in its code, too
        return ExpertsConfig(count, used, columns, normalised=True, swiglu=(7.0, 1.702), biased=True)
    return ExpertsConfig(count, used, columns, normalised=meta.of_model("expert_weights_norm", True))


def _rope(meta: "_Metadata", head_dim: int, factors: RopeFactors) -> RopeConfig:
    theta = float(meta.of_model("rope.freq_base", 10_000.0))
    rotary_dim = meta.of_model("rope.dimension_count", head_dim)
    scaling = meta.of_model("rope.scaling.type", "none")
    if rotary_dim != head_dim and not ARCHITECTURES[_SERVED[meta.get("general.architecture")]].turns_partly:
        raise ModelError("partial rotary embedding in GGUF is not supported", got=rotary_dim, fix="use another model")
    if any(factors):
        return _divided(meta, theta, rotary_dim, factors, scaling)
    if scaling == "none":
        return RopeConfig(theta, rotary_dim)
    if scaling == "linear":
        (factor,) = meta.require("rope.scaling.factor")
        return RopeConfig(theta, rotary_dim, scaling="linear", factor=float(factor))
    if scaling == "yarn" and meta.get("general.architecture") == "gpt-oss":
        factor, original = meta.require("rope.scaling.factor", "rope.scaling.original_context_length")
        turned = {"original_max_position": original, "truncate": False, "attention_factor": 0.1 * math.log(factor) + 1}
        return RopeConfig(theta, rotary_dim, scaling="yarn", factor=float(factor), **turned)
    raise ModelError("the GGUF file's rope scaling is not supported", got=scaling, fix="use the Hugging Face directory")


def _divided(meta: "_Metadata", theta: float, rotary_dim: int, factors: RopeFactors, scaling: str) -> RopeConfig:
    counts = [len(divisors) for divisors in factors if divisors]
    expected = [rotary_dim // 2] * (1 if factors.every else 2)
    if counts != expected or scaling not in ("none", "longrope"):
        raise ModelError(
            "the GGUF file's rotary factors do not fit its heads",
            got=f"{', '.join(map(str, counts))} factors, {rotary_dim} dimensions that turn, scaling {scaling}",
            fix="use the Hugging Face directory",
        )
    longest = meta.require("context_length")[0]
    original = meta.of_model("rope.scaling.original_context_length", longest)
    scaled = RopeConfig(
        theta,
        rotary_dim,
        scaling="factors",
        factors=factors.every or factors.short,
        attention_factor=float(meta.of_model("rope.scaling.attn_factor", 1.0)),
    )
    if not factors.long or longest <= original:
        return scaled
    return replace(scaled, original_max_position=original, long_factors=factors.long, long_max_position=longest)


class _Metadata:
    """A file's key-value pairs; keys of the model begin with the name of its architecture."""

    def __init__(self, pairs: Mapping[str, Any]) -> None:
        self._pairs = pairs

    def get(self, key: str, default: Any = None) -> Any:
        return self._pairs.get(key, default)

    def of_model(self, key: str, default: Any) -> Any:
        return self._pairs.get(self._name(key), default)

    def require(self, *keys: str) -> tuple[Any, ...]:
        """The values of keys of the model. Raises `ModelError` if one is missing."""
        missing = [name for name in map(self._name, keys) if name not in self._pairs]
        if missing:
            raise ModelError(
                "the GGUF file lacks metadata", got=f"no {', '.join(missing)}", fix="convert the model again"
            )
        return tuple(self._pairs[self._name(key)] for key in keys)

    def _name(self, key: str) -> str:
        return f"{self._pairs['general.architecture']}.{key}"
