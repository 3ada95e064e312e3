"""Reads a `ModelConfig` from the metadata of a GGUF file, which become the keys of a `config.json` for `hf_config.py`."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jinfercept.errors import ModelError
from jinfercept.models.config import ARCHITECTURES, ModelConfig, RopeConfig, check_num_layers
from jinfercept.models.gguf_header import Header
from jinfercept.models.hf_config import fields_of
from jinfercept.models.hf_keys import refuse_keys
from jinfercept.models.hf_rope import BY_LAYER_TYPE

_SERVED = {name: name for name in ("llama", "qwen2", "qwen3", "olmo2", "phi3", "granite", "smollm3", "gemma", "gemma2")}
_SERVED |= {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "gemma3": "gemma3_text", "gemma4": "gemma4_text"}
_SERVED |= {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
"""`general.architecture`, and the name in `ARCHITECTURES`."""
RECURRENT = ("qwen3next", "qwen35", "qwen35moe")
_VARIANTS = {"llama": {"num_experts": "mixtral", "sliding_window": "mistral"}, "olmo2": {"sliding_window": "olmo3"}}
"""Names in `ARCHITECTURES` of models with experts or windows, whose `general.architecture` is that of models without."""
_REQUIRED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Keys of `config.json`, and what they are called here."""
_WINDOW: dict[str, tuple[str, Any]] = {"sliding_window": ("attention.sliding_window", None)}
_EXPERTS: dict[str, tuple[str, Any]] = {
    "num_experts": ("expert_count", None),
    "num_experts_per_tok": ("expert_used_count", 0),
    "moe_intermediate_size": ("expert_feed_forward_length", None),
}
_RECURRENT: dict[str, tuple[str, Any]] = {
    "linear_num_key_heads": ("ssm.group_count", None),
    "linear_num_value_heads": ("ssm.time_step_rank", None),
    "linear_key_head_dim": ("ssm.state_size", None),
    "linear_conv_kernel_dim": ("ssm.conv_kernel", None),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", None),
}
_OPTIONAL = {
    "llama": _WINDOW | _EXPERTS,
    "olmo2": _WINDOW,
    "phi3": _WINDOW,
    "granite": {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
        "attention_multiplier": ("attention.scale", None),
    },
    "gemma2": {
        "sliding_window": ("attention.sliding_window", 4096),
        "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    },
    "gemma3": _WINDOW | {"final_logit_softcapping": ("final_logit_softcapping", None)},
    "gemma4": _WINDOW
    | {
        "final_logit_softcapping": ("final_logit_softcapping", None),
        "num_kv_shared_layers": ("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": ("embedding_length_per_layer_input", 0),
        "num_experts": ("expert_count", 0),
        "top_k_experts": ("expert_used_count", None),
        "moe_intermediate_size": ("expert_feed_forward_length", None),
    },
    "qwen3moe": _EXPERTS | {"norm_topk_prob": ("expert_weights_norm", True)},
    "gpt-oss": _WINDOW | _EXPERTS,
    "qwen3next": _RECURRENT | _EXPERTS | {"norm_topk_prob": ("expert_weights_norm", True)},
    "qwen35": _RECURRENT,
    "qwen35moe": _RECURRENT | _EXPERTS,
}
"""By `general.architecture`, further keys of `config.json`, what they are called here, and their default values."""
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "olmo2": 4, "gpt-oss": 2}
"""Architectures some of whose layers may have windows: all but each of that number where the file does not state it, as in
llama.cpp. Mistral (`llama`) and Phi-3 have windows in all layers, as in transformers, and none in llama.cpp."""
_WIDEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B model, whose scale is by its width."""
_BIASES = {"qkv_bias": "blk.0.attn_q.bias", "o_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
"""A tensor of every kind of bias that a model may have."""
_HARMLESS = re.compile(
    r"vocab_size|tensor_data_layout|pooling_type|attention\.layer_norm_epsilon|rope\.dimension_sections|(mm|vision)\..*"
)
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
    name, config = _hf_config(meta, architecture, header, rope_factors)
    fields = fields_of(config, name)
    if architecture in _WIDEST:
        is_widest = config["num_hidden_layers"] == _WIDEST[architecture]
        scaled_by = config["hidden_size"] // config["num_attention_heads"] if is_widest else config["head_dim"]
        fields["query_scale"] = meta.of_model("attention.scale", None) or scaled_by**-0.5
    if rope_factors.every and architecture != "gemma4":
        fields["rope"] = replace(fields["rope"], scaling="factors", factors=rope_factors.every)
    if architecture not in ("gemma3", "gemma4"):
        lengthened = fields["rope"].attention_factor * float(meta.of_model("rope.scaling.attn_factor", 1.0))
        fields["rope"] = replace(fields["rope"], attention_factor=lengthened)
    _check_read(meta, architecture, config, fields["rope"])
    stop_ids = [meta.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    fields |= {ours: tensor in header.tensors for ours, tensor in _BIASES.items()} | dict(ARCHITECTURES[name].parts)
    return ModelConfig(
        family=ARCHITECTURES[name].family,
        eos_token_ids=tuple(dict.fromkeys(id_ for id_ in stop_ids if id_ is not None)),
        **fields,
    )


def _hf_config(
    meta: "_Metadata", architecture: str, header: Header, rope_factors: RopeFactors
) -> tuple[str, dict[str, Any]]:
    """The name in `ARCHITECTURES`, and what a `config.json` would say, with all values that transformers fills in."""
    no_size = {"intermediate_size"} if architecture == "qwen35moe" else set[str]()  # all its layers have experts
    config = meta.require({key: name for key, name in _REQUIRED.items() if key not in no_size})
    if architecture in RECURRENT:
        config["num_hidden_layers"] -= meta.of_model("nextn_predict_layers", 0)  # which draft, behind the others
    num_heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    check_num_layers(num_layers)
    head_dim = meta.of_model("attention.key_length", config["hidden_size"] // num_heads)
    if (embedding := header.tensors.get("token_embd.weight")) is None:
        raise ModelError("the GGUF file has no embedding", got="no token_embd.weight", fix="download it again")
    stated = {key: meta.of_model(*place) for key, place in _OPTIONAL.get(architecture, {}).items()}
    config |= {key: value for key, value in stated.items() if value is not None}
    variants = _VARIANTS.get(architecture, {})
    name = next((variant for key, variant in variants.items() if config.get(key)), _SERVED[architecture])
    rotary_dim = meta.of_model("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not ARCHITECTURES[name].turns_partly:
        raise ModelError("partial rotary embedding in GGUF is not supported", got=rotary_dim, fix="use another model")
    # the short decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06
    norm_eps = config["rms_norm_eps"]
    config |= {
        "rms_norm_eps": float(f"{norm_eps:.6g}") if math.isfinite(norm_eps) else norm_eps,
        "vocab_size": embedding.shape[0],
        "head_dim": head_dim,
        "num_key_value_heads": meta.of_model("attention.head_count_kv", num_heads),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _ropes(meta, name, rotary_dim, head_dim, rope_factors),
    }
    match architecture:
        case "granite":
            config.setdefault("attention_multiplier", head_dim**-0.5)
        case "smollm3":
            config["no_rope_layers"] = [int((index + 1) % 4 > 0) for index in range(num_layers)]
        case "gpt-oss":  # llama.cpp has these numbers in its code, too
            config |= {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    if architecture in _FULL_EVERY:
        pattern = meta.of_model("attention.sliding_window_pattern", _FULL_EVERY[architecture])
        if isinstance(pattern, int):
            pattern = [not pattern or (index + 1) % pattern for index in range(num_layers)]
        if config.get("sliding_window"):
            config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in pattern]
    if architecture in RECURRENT:
        values, every = meta.of_model("ssm.inner_size", 0), meta.of_model("full_attention_interval", 4)
        kinds = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(num_layers)]
        config |= {"linear_value_head_dim": values // config["linear_num_value_heads"], "layer_types": kinds}
        if architecture == "qwen3next":
            routers = (f"blk.{index}.ffn_gate_inp.weight" for index in range(num_layers))
            config["mlp_only_layers"] = [index for index, name in enumerate(routers) if name not in header.tensors]
    if architecture == "gemma4":
        config |= _gemma4(meta, config, header, rope_factors)
    return name, config


def _gemma4(meta: "_Metadata", config: Mapping[str, Any], header: Header, rope_factors: RopeFactors) -> dict[str, Any]:
    """What differs between layers, by layer in the file; the pairs that do not turn have huge factors there."""
    types, num_shared = config["layer_types"], config["num_kv_shared_layers"]
    heads, sizes = (
        value if isinstance(value, list) else [value] * len(types)
        for value in (config["num_key_value_heads"], config["intermediate_size"])
    )
    full, window = types.index("full_attention"), types.index("sliding_attention")
    share = sum(factor < 1e20 for factor in rope_factors.every) / max(1, len(rope_factors.every))
    rope = {"rope_type": "proportional", "partial_rotary_factor": share or 1.0}
    rope["rope_theta"] = float(meta.of_model("rope.freq_base", 10_000.0))
    own = {"head_dim": config["head_dim"], "num_key_value_heads": heads[full]}
    return {
        "head_dim": meta.of_model("attention.key_length_swa", config["head_dim"]),
        "num_key_value_heads": heads[window],
        "per_layer_config": {index: own for index, kind in enumerate(types) if kind == "full_attention"},
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": bool(num_shared) and sizes[-1] == 2 * sizes[0],
        "vocab_size_per_layer_input": config["vocab_size"],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in header.tensors,
        "enable_moe_block": config["num_experts"] > 0,
        "rope_parameters": {**config["rope_parameters"], "full_attention": rope},
    }


def _check_read(meta: "_Metadata", architecture: str, config: Mapping[str, Any], rope: RopeConfig) -> None:
    """Raise `ModelError` for keys of the model that were not read and could change its numbers: those of other architectures,
    as in llama.cpp, unless they have one of these values, which are what this architecture does anyway."""
    head_dim = config["head_dim"]
    usual: dict[str, tuple[Any, ...]] = {
        "attention.causal": (True,),
        "attention.scale": (0.0, head_dim**-0.5),
        "attention.value_length": (meta.of_model("attention.key_length", head_dim),),
        "attention.key_length_swa": (head_dim,),
        "attention.value_length_swa": (head_dim,),
        "embedding_length_out": (config["hidden_size"],),
        "expert_gating_func": (0, 1, 3) if architecture == "gpt-oss" else (0, 1),
        "expert_weights_norm": (True,),
        "expert_weights_scale": (0.0, 1.0),
        "rope.dimension_count_swa": (head_dim if architecture == "gemma4" else rope.rotary_dim,),
        "rope.freq_base_swa": (rope.theta,),
        "rope.scaling.attn_factor": (1.0,),
        "rope.scaling.finetuned": (True,) if architecture == "granite" else (False, True),
        "rope.scaling.yarn_attn_factor": (1.0, 0.1 * math.log(max(rope.factor, 1.0)) + 1),
        "rope.scaling.yarn_ext_factor": (-1.0, 1.0 if rope.scaling == "yarn" else 0.0),
        **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (0.0, 1.0)),
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


def _ropes(meta: "_Metadata", name: str, rotary_dim: int, head_dim: int, factors: RopeFactors) -> dict[str, Any]:
    """`rope_parameters` of a `config.json`.

    Args:
        name: in `ARCHITECTURES`.
    """
    theta = float(meta.of_model("rope.freq_base", 10_000.0))
    factor = float(meta.of_model("rope.scaling.factor", meta.of_model("rope.scale_linear", 0.0))) or 1.0
    scaling = meta.of_model("rope.scaling.type", "none" if factor == 1 else "linear")
    if any(factors):
        _check_factors(factors, rotary_dim, scaling)
        scaling = "longrope" if factors.short else "none"
    elif scaling not in ("none", "linear", "yarn"):
        raise ModelError(
            "the GGUF file's rope scaling is not supported", got=scaling, fix="use the Hugging Face directory"
        )
    elif scaling == "linear" and factor == 1:
        scaling = "none"
    full = {
        "rope_theta": theta,
        "rope_type": "default" if scaling == "none" else scaling,
        # the reader rounds down
        "partial_rotary_factor": 1.0 if rotary_dim == head_dim else (rotary_dim + 0.5) / head_dim,
        "factor": factor,
        "beta_fast": float(meta.of_model("rope.scaling.yarn_beta_fast", 32)),
        "beta_slow": float(meta.of_model("rope.scaling.yarn_beta_slow", 1)),
        "truncate": name != "gpt_oss",
    }
    if original := meta.of_model("rope.scaling.original_context_length", None):
        full["original_max_position_embeddings"] = original
    if scaling == "longrope":  # of whose scale llama.cpp's converter writes `attn_factor`
        full |= {"short_factor": [*factors.short], "long_factor": [*factors.long], "attention_factor": 1.0}
    if name not in BY_LAYER_TYPE:
        return full
    near = meta.of_model("rope.freq_base_swa", 10_000.0 if name == "gemma3_text" else theta)
    return {"full_attention": full, "sliding_attention": {"rope_theta": float(near)}}


def _check_factors(factors: RopeFactors, rotary_dim: int, scaling: str) -> None:
    counts = [len(divisors) for divisors in factors if divisors]
    if counts != [rotary_dim // 2] * (1 if factors.every else 2) or scaling not in ("none", "longrope"):
        raise ModelError(
            "the GGUF file's rotary factors do not fit its heads",
            got=f"{', '.join(map(str, counts))} factors, {rotary_dim} dimensions that turn, scaling {scaling}",
            fix="use the Hugging Face directory",
        )


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

    def require(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """The values of keys of the model, by other names. Raises `ModelError` if one is missing."""
        missing = [name for name in map(self._name, keys.values()) if name not in self._pairs]
        if missing:
            raise ModelError(
                "the GGUF file lacks metadata", got=f"no {', '.join(missing)}", fix="convert the model again"
            )
        return {name: self.of_model(key, None) for name, key in keys.items()}

    def unread(self) -> dict[str, Any]:
        """The values of the model that nothing has read, by keys without the name of its architecture."""
        start, unread = self._name(""), self._pairs.keys() - self._read
        return {key.removeprefix(start): self._pairs[key] for key in sorted(unread) if key.startswith(start)}

    def _name(self, key: str) -> str:
        return f"{self._pairs['general.architecture']}.{key}"
