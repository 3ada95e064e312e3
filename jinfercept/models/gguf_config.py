"""Reads a `ModelConfig` from the metadata of a GGUF file."""

import math
import re
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
from jinfercept.models.hf_keys import refuse_keys

_SERVED = {name: name for name in ("llama", "qwen2", "qwen3", "olmo2", "phi3", "granite", "smollm3", "gemma", "gemma2")}
_SERVED |= {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "gemma3": "gemma3_text"}
"""`general.architecture`, and our name for it."""
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "gpt-oss": 2, "llama": 0, "phi3": 0}
"""Architectures that may have windows: in all layers but each of that number, 0: in all. As in llama.cpp, where the file does
not state it; Mistral (`llama`) and Phi-3, which have none there, as in transformers."""
_WIDEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B model, whose scale is by its width."""
_BIASES = {"qkv_bias": "blk.0.attn_q.bias", "o_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
"""A tensor of every kind of bias that a model may have."""
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_divisor": "logit_scale",
}
_EXPERTS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm"))
_WINDOWS = frozenset(("attention.sliding_window", "attention.sliding_window_pattern"))
_NEAR = _WINDOWS | {"rope.freq_base_swa"}
_UNDERSTOOD = {
    "llama": _EXPERTS | {"attention.sliding_window"},
    "qwen3moe": _EXPERTS,
    "phi3": frozenset(("attention.sliding_window",)),
    "olmo2": _NEAR,
    "granite": frozenset((*_GRANITE.values(), "attention.scale")),
    "gemma2": _WINDOWS | {"attention.scale", "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": _NEAR | {"attention.scale", "final_logit_softcapping"},
    "gpt-oss": _EXPERTS | _WINDOWS | {"expert_gating_func"},
}
"""Keys that are read of some architectures alone, as in llama.cpp."""
_COMMON = re.compile(
    r"vocab_size|context_length|embedding_length|block_count|feed_forward_length|tensor_data_layout|pooling_type"
    r"|attention\.(head_count(_kv)?|key_length|layer_norm(_rms)?_epsilon)|rope\.(dimension_count|freq_base|scale_linear)"
    r"|rope\.scaling\.(type|factor|attn_factor|original_context_length|yarn_beta_fast|yarn_beta_slow)|(mm|vision)\..*"
)
"""Keys that are read of every architecture, or that change nothing for text."""
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
    named = ARCHITECTURES[_SERVED[architecture]]
    rope = _rope(meta, head_dim, rope_factors)
    _check_understood(meta, architecture, hidden_size, head_dim, rope)
    kinds, own = _kinds(meta, architecture, num_layers, rope), dict[str, Any]()
    if architecture in _WIDEST:
        own = _gemma(meta, architecture, hidden_size // num_heads if num_layers == _WIDEST[architecture] else head_dim)
    if architecture == "granite":
        own = {name: float(meta.of_model(key, 0.0)) or 1.0 for name, key in _GRANITE.items()}
        rope = rope.scoring(float(meta.of_model("attention.scale", 0.0)) or head_dim**-0.5)
    if architecture == "smollm3":
        still = replace(rope, scaling="proportional", turning_pairs=0)
        kinds = tuple(LayerKind(rope=None if (index + 1) % 4 else still) for index in range(num_layers))
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


def _check_understood(meta: "_Metadata", architecture: str, hidden_size: int, head_dim: int, rope: RopeConfig) -> None:
    """Raise `ModelError` for keys of the model that would change its numbers and are read of other architectures or of none."""
    scales, yarn = (0.0, 1.0), rope.scaling == "yarn"
    usual: dict[str, tuple[Any, ...]] = {
        "attention.causal": (True,),
        "attention.scale": (0.0, head_dim**-0.5),
        "embedding_length_out": (hidden_size,),
        "expert_gating_func": (0, 1),
        "rope.dimension_count_swa": (rope.rotary_dim,),
        "rope.freq_base_swa": (rope.theta,),
        "rope.scaling.finetuned": (True,) if architecture == "granite" else (False, True),
        "rope.scaling.yarn_attn_factor": (1.0, 0.1 * math.log(rope.factor) + 1),
        "rope.scaling.yarn_ext_factor": (-1.0, 1.0) if yarn else (-1.0, 0.0),
        **dict.fromkeys(
            ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"), (head_dim,)
        ),
        **dict.fromkeys(("expert_weights_scale", *_GRANITE.values()), scales),
    }
    understood = _UNDERSTOOD.get(architecture, frozenset())
    refuse_keys(
        {
            f"{architecture}.{key}": value
            for key, value in meta.model.items()
            if key not in understood and _COMMON.fullmatch(key) is None and not _is_one_of(value, usual.get(key))
        },
        where="the GGUF file",
    )


def _is_one_of(value: Any, usual: tuple[Any, ...] | None) -> bool:
    """Whether this is one of the values that change nothing, up to the rounding of a float32; None: 0, false and nothing."""
    if usual is None:
        return not value
    is_number = isinstance(value, int | float)
    return any(value == number or (is_number and number and abs(value / number - 1) < 1e-5) for number in usual)


def _kinds(meta: "_Metadata", architecture: str, num_layers: int, rope: RopeConfig) -> tuple[LayerKind, ...]:
    """The kind of every layer; () if none is windowed."""
    window = meta.of_model("attention.sliding_window", 4096 if architecture == "gemma2" else 0)
    if not window:
        return ()
    pattern = meta.of_model("attention.sliding_window_pattern", _FULL_EVERY[architecture])
    if isinstance(pattern, int):
        pattern = [not pattern or bool((index + 1) % pattern) for index in range(num_layers)]
    near = rope
    if "rope.freq_base_swa" in _UNDERSTOOD[architecture]:  # windowed layers are not scaled
        theta = meta.of_model("rope.freq_base_swa", 10_000.0 if architecture == "gemma3" else rope.theta)
        near = RopeConfig(float(theta), rope.rotary_dim)
        if architecture == "gemma3":
            near = replace(near, attention_factor=float(meta.of_model("rope.scaling.attn_factor", 1.0)))
    windowed = LayerKind(window, None if near == rope else near)
    return tuple(windowed if is_windowed else PLAIN_KIND for is_windowed in pattern)


def _gemma(meta: "_Metadata", architecture: str, scaled_by: int) -> dict[str, Any]:
    """Fields of Gemma 2 and 3; scores are divided by the root of `scaled_by`, unless the file says otherwise."""
    soft_cap, logit_cap = (50.0, 30.0) if architecture == "gemma2" else (None, None)
    return {
        "query_scale": meta.of_model("attention.scale", None) or scaled_by**-0.5,
        "soft_cap": meta.of_model("attn_logit_softcapping", soft_cap) or None,
        "logit_cap": meta.of_model("final_logit_softcapping", logit_cap) or None,
    }


def _experts(meta: "_Metadata", ffn_size: int) -> ExpertsConfig | None:
    """The experts of every layer, of a model that has some: Mixtral's architecture is that of Llama."""
    count, used, columns = (
        meta.of_model(f"expert_{key}", default)
        for key, default in (("count", 0), ("used_count", 0), ("feed_forward_length", ffn_size))
    )
    if not count:
        return None
    if meta.get("general.architecture") == "gpt-oss":  # whose numbers llama.cpp has in its code, too
        return ExpertsConfig(count, used, columns, normalised=True, swiglu=(7.0, 1.702), biased=True)
    return ExpertsConfig(count, used, columns, normalised=meta.of_model("expert_weights_norm", True))


def _rope(meta: "_Metadata", head_dim: int, factors: RopeFactors) -> RopeConfig:
    theta = float(meta.of_model("rope.freq_base", 10_000.0))
    rotary_dim = meta.of_model("rope.dimension_count", head_dim)
    factor = float(meta.of_model("rope.scaling.factor", meta.of_model("rope.scale_linear", 0.0))) or 1.0
    scaling = meta.of_model("rope.scaling.type", "none" if factor == 1 else "linear")
    attention_factor = float(meta.of_model("rope.scaling.attn_factor", 1.0))
    architecture = meta.get("general.architecture")
    if rotary_dim != head_dim and not ARCHITECTURES[_SERVED[architecture]].turns_partly:
        raise ModelError("partial rotary embedding in GGUF is not supported", got=rotary_dim, fix="use another model")
    plain = RopeConfig(theta, rotary_dim, attention_factor=attention_factor)
    if any(factors):
        return _divided(meta, plain, factors, scaling)
    if scaling == "none" or (scaling == "linear" and factor == 1):
        return plain
    if scaling == "linear":
        return replace(plain, scaling="linear", factor=factor)
    if scaling == "yarn":
        (longest,) = meta.require("context_length")
        return replace(
            plain,
            scaling="yarn",
            factor=factor,
            original_max_position=meta.of_model("rope.scaling.original_context_length", longest),
            beta_fast=float(meta.of_model("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(meta.of_model("rope.scaling.yarn_beta_slow", 1.0)),
            truncate=architecture != "gpt-oss",
            attention_factor=attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1),
        )
    raise ModelError("the GGUF file's rope scaling is not supported", got=scaling, fix="use the Hugging Face directory")


def _divided(meta: "_Metadata", plain: RopeConfig, factors: RopeFactors, scaling: str) -> RopeConfig:
    counts = [len(divisors) for divisors in factors if divisors]
    expected = [plain.rotary_dim // 2] * (1 if factors.every else 2)
    if counts != expected or scaling not in ("none", "longrope"):
        raise ModelError(
            "the GGUF file's rotary factors do not fit its heads",
            got=f"{', '.join(map(str, counts))} factors, {plain.rotary_dim} dimensions that turn, scaling {scaling}",
            fix="use the Hugging Face directory",
        )
    longest = meta.require("context_length")[0]
    original = meta.of_model("rope.scaling.original_context_length", longest)
    scaled = replace(plain, scaling="factors", factors=factors.every or factors.short)
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

    @property
    def model(self) -> dict[str, Any]:
        """The values of the model, by keys without the name of its architecture."""
        start = self._name("")
        return {key.removeprefix(start): value for key, value in self._pairs.items() if key.startswith(start)}

    def _name(self, key: str) -> str:
        return f"{self._pairs['general.architecture']}.{key}"
