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
_WITH_EXPERTS = ("llama", "qwen3moe", "gpt-oss")
_HARMLESS = re.compile(r"vocab_size|tensor_data_layout|pooling_type|attention\.layer_norm_epsilon|(mm|vision)\..*")
"""Keys of the model that change nothing for text."""
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
    kinds, own = _kinds(meta, architecture, num_layers, rope), dict[str, Any]()
    if architecture in _WIDEST:
        own = _gemma(meta, architecture, hidden_size // num_heads if num_layers == _WIDEST[architecture] else head_dim)
    if architecture == "granite":
        own = {name: float(meta.of_model(key, 0.0)) or 1.0 for name, key in _GRANITE.items()}
        rope = rope.scoring(float(meta.of_model("attention.scale", 0.0)) or head_dim**-0.5)
    if architecture == "smollm3":
        still = replace(rope, scaling="proportional", turning_pairs=0, attention_factor=1.0)
        kinds = tuple(LayerKind(rope=None if (index + 1) % 4 else still) for index in range(num_layers))
    if rope.long_factors:
        max_position = rope.original_max_position
    num_kv_heads = meta.of_model("attention.head_count_kv", num_heads)
    experts = _experts(meta, architecture, ffn_size) if architecture in _WITH_EXPERTS else None
    _check_read(meta, architecture, hidden_size, head_dim, rope)
    biases = {name: tensor in header.tensors for name, tensor in _BIASES.items()}
    stop_ids = [meta.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    return ModelConfig(
        family=named.family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
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
        experts=experts,
        **{**biases, **named.parts, **own},
    )


def _check_read(meta: "_Metadata", architecture: str, hidden_size: int, head_dim: int, rope: RopeConfig) -> None:
    """Raise `ModelError` for keys of the model that were not read and could change its numbers: those of other architectures,
    as in llama.cpp, unless they have one of these values, which are what this architecture does anyway."""
    usual: dict[str, tuple[Any, ...]] = {
        "attention.causal": (True,),
        "attention.scale": (0.0, head_dim**-0.5),
        "attention.value_length": (head_dim,),
        "attention.key_length_swa": (head_dim,),
        "attention.value_length_swa": (head_dim,),
        "embedding_length_out": (hidden_size,),
        "expert_gating_func": (0, 1, 3) if architecture == "gpt-oss" else (0, 1),
        "expert_weights_scale": (0.0, 1.0),
        "rope.dimension_count_swa": (rope.rotary_dim,),
        "rope.freq_base_swa": (rope.theta,),
        "rope.scaling.finetuned": (True,) if architecture == "granite" else (False, True),
        "rope.scaling.yarn_attn_factor": (1.0, 0.1 * math.log(max(rope.factor, 1.0)) + 1),
        "rope.scaling.yarn_ext_factor": (-1.0, 1.0 if rope.scaling == "yarn" else 0.0),
        **dict.fromkeys(_GRANITE.values(), (0.0, 1.0)),
    }
    unread = {
        f"{architecture}.{key}": value
        for key, value in meta.unread().items()
        if _HARMLESS.fullmatch(key) is None and not _is_one_of(value, usual.get(key))
    }
    refuse_keys(unread, where="the GGUF file")


def _is_one_of(value: Any, usual: tuple[Any, ...] | None) -> bool:
    """Whether this is one of the values that change nothing, up to the rounding of a float32; None: 0, false and nothing."""
    if usual is None:
        return not value
    is_number = isinstance(value, int | float)
    return any(value == number or (is_number and number and abs(value / number - 1) < 1e-5) for number in usual)


def _kinds(meta: "_Metadata", architecture: str, num_layers: int, rope: RopeConfig) -> tuple[LayerKind, ...]:
    """The kind of every layer; () if none is windowed."""
    if architecture not in _FULL_EVERY:
        return ()
    window = meta.of_model("attention.sliding_window", 4096 if architecture == "gemma2" else 0)
    pattern = meta.of_model("attention.sliding_window_pattern", _FULL_EVERY[architecture])
    if isinstance(pattern, int):
        pattern = [not pattern or bool((index + 1) % pattern) for index in range(num_layers)]
    near = rope
    if architecture in ("gemma3", "olmo2"):  # whose windowed layers are not scaled
        theta = meta.of_model("rope.freq_base_swa", 10_000.0 if architecture == "gemma3" else rope.theta)
        near = RopeConfig(float(theta), rope.rotary_dim)
        if architecture == "gemma3":
            near = replace(near, attention_factor=float(meta.of_model("rope.scaling.attn_factor", 1.0)))
    windowed = LayerKind(window, None if near == rope else near)
    return tuple(windowed if is_windowed else PLAIN_KIND for is_windowed in pattern) if window else ()


def _gemma(meta: "_Metadata", architecture: str, scaled_by: int) -> dict[str, Any]:
    """Fields of Gemma 2 and 3; scores are divided by the root of `scaled_by`, unless the file says otherwise."""
    is_second = architecture == "gemma2"
    return {
        "query_scale": meta.of_model("attention.scale", None) or scaled_by**-0.5,
        "soft_cap": meta.of_model("attn_logit_softcapping", 50.0) or None if is_second else None,
        "logit_cap": meta.of_model("final_logit_softcapping", 30.0 if is_second else None) or None,
    }


def _experts(meta: "_Metadata", architecture: str, ffn_size: int) -> ExpertsConfig | None:
    """The experts of every layer, of a model that has some: Mixtral's architecture is that of Llama."""
    count, used, columns = (
        meta.of_model(f"expert_{key}", default)
        for key, default in (("count", 0), ("used_count", 0), ("feed_forward_length", ffn_size))
    )
    normalised = meta.of_model("expert_weights_norm", True)
    if not count:
        return None
    if architecture == "gpt-oss":  # whose numbers llama.cpp has in its code, too
        return ExpertsConfig(count, used, columns, normalised=True, swiglu=(7.0, 1.702), biased=True)
    return ExpertsConfig(count, used, columns, normalised=normalised)


def _rope(meta: "_Metadata", head_dim: int, factors: RopeFactors) -> RopeConfig:
    theta = float(meta.of_model("rope.freq_base", 10_000.0))
    rotary_dim = meta.of_model("rope.dimension_count", head_dim)
    factor = float(meta.of_model("rope.scaling.factor", meta.of_model("rope.scale_linear", 0.0))) or 1.0
    scaling = meta.of_model("rope.scaling.type", "none" if factor == 1 else "linear")
    attention_factor = float(meta.of_model("rope.scaling.attn_factor", 1.0))
    architecture = meta.get("general.architecture")
    if rotary_dim != head_dim and not ARCHITECTURES[_SERVED[architecture]].turns_partly:
        raise ModelError("partial rotary embedding in GGUF is not supported", got=rotary_dim, fix="use another model")
    longest, *_ = meta.require("context_length")
    original = meta.of_model("rope.scaling.original_context_length", longest)
    betas = [
        float(meta.of_model(f"rope.scaling.yarn_beta_{name}", usual)) for name, usual in (("fast", 32), ("slow", 1))
    ]
    plain = RopeConfig(theta, rotary_dim, attention_factor=attention_factor)
    if any(factors):
        return _divided(plain, factors, scaling, original, longest)
    if scaling == "none" or (scaling == "linear" and factor == 1):
        return plain
    if scaling == "linear":
        return replace(plain, scaling="linear", factor=factor)
    if scaling == "yarn":
        return replace(
            plain,
            scaling="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=betas[0],
            beta_slow=betas[1],
            truncate=architecture != "gpt-oss",
            attention_factor=attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1),
        )
    raise ModelError("the GGUF file's rope scaling is not supported", got=scaling, fix="use the Hugging Face directory")


def _divided(plain: RopeConfig, factors: RopeFactors, scaling: str, original: int, longest: int) -> RopeConfig:
    counts = [len(divisors) for divisors in factors if divisors]
    expected = [plain.rotary_dim // 2] * (1 if factors.every else 2)
    if counts != expected or scaling not in ("none", "longrope"):
        raise ModelError(
            "the GGUF file's rotary factors do not fit its heads",
            got=f"{', '.join(map(str, counts))} factors, {plain.rotary_dim} dimensions that turn, scaling {scaling}",
            fix="use the Hugging Face directory",
        )
    scaled = replace(plain, scaling="factors", factors=factors.every or factors.short)
    if not factors.long or longest <= original:
        return scaled
    return replace(scaled, original_max_position=original, long_factors=factors.long, long_max_position=longest)


class _Metadata:
    """A file's key-value pairs; keys of the model begin with the name of its architecture."""

    def __init__(self, pairs: Mapping[str, Any]) -> None:
        self._pairs, self._read = pairs, set[str]()

    def get(self, key: str) -> Any:
        return self._pairs.get(key)

    def of_model(self, key: str, default: Any) -> Any:
        name = self._name(key)
        self._read.add(name)
        return self._pairs.get(name, default)

    def require(self, *keys: str) -> tuple[Any, ...]:
        """The values of keys of the model. Raises `ModelError` if one is missing."""
        missing = [name for name in map(self._name, keys) if name not in self._pairs]
        if missing:
            raise ModelError(
                "the GGUF file lacks metadata", got=f"no {', '.join(missing)}", fix="convert the model again"
            )
        return tuple(self.of_model(key, None) for key in keys)

    def unread(self) -> dict[str, Any]:
        """The values of the model that nothing has read, by keys without the name of its architecture."""
        start, unread = self._name(""), self._pairs.keys() - self._read
        return {key.removeprefix(start): self._pairs[key] for key in sorted(unread) if key.startswith(start)}

    def _name(self, key: str) -> str:
        return f"{self._pairs['general.architecture']}.{key}"
