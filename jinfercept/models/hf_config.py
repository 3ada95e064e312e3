"""Reads a `ModelConfig` from a Hugging Face `config.json`.

Values that are not there are those of transformers 5. A config that this package would run wrongly (another architecture,
another activation, a key that is not understood and could change the numbers) is refused here, before any weight is read.
"""

import math
from collections.abc import Mapping
from typing import Any

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import ARCHITECTURES, Family, ModelConfig, RopeConfig
from jinfercept.models.hf_keys import check_keys, require
from jinfercept.models.hf_rope import rope_from_hf

_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPTJForCausalLM": "gptj",
}
_OTHER_CLASSES = {
    "LLaMAForCausalLM": "llama",  # the first conversions of Llama
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    "GPTJModel": "gptj",
}
_LLAMA_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
_GPTJ_KEYS = ("vocab_size", "n_embd", "n_layer", "n_head", "rotary_dim", "layer_norm_epsilon", "n_positions")
_GPTJ_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_COMMON_KEYS = frozenset(("architectures", "model_type", "vocab_size", "tie_word_embeddings", "quantization_config"))
_UNDERSTOOD: dict[Family, frozenset[str]] = {
    "llama": _COMMON_KEYS
    | {*_LLAMA_KEYS, "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "mlp_bias"}
    | {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    | {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"},
    "gptj": _COMMON_KEYS | {*_GPTJ_KEYS, *_GPTJ_ALIASES, "n_inner", "activation_function"},
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "gptj": {"layer_norm_epsilon": 1e-5, "rotary_dim": 64, "n_positions": 2048},
}
"""Values of transformers for keys that are not there."""


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a model from a parsed `config.json`, and further end-of-sequence tokens from `generation_config.json`.

    Raises:
        ModelError: the architecture or the rope scaling is unknown, keys are missing, or something is set that
            would change the result and is not implemented.
    """
    if not isinstance(config, Mapping) or not isinstance(generation, Mapping | None):
        raise ModelError(
            "config.json and generation_config.json are JSON objects",
            got=shown(config if generation is None or isinstance(generation, Mapping) else generation),
            fix="download them again",
        )
    name = _architecture(config)
    architecture = ARCHITECTURES[name]
    check_keys(config, _UNDERSTOOD[architecture.family], where="config.json")
    config = _DEFAULTS[name] | dict(config)
    try:
        eos = _ids(config.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id"))
        fields = _gptj_fields(config) if architecture.family == "gptj" else _llama_fields(config, name)
        return ModelConfig(family=architecture.family, eos_token_ids=tuple(dict.fromkeys(eos)), **fields)
    except (TypeError, ArithmeticError) as error:
        raise ModelError(
            "config.json has values of other types than it should",
            got=str(error)[:200],
            fix="correct the file or download it again",
        ) from error


def _architecture(config: Mapping[str, Any]) -> str:
    """The name of the architecture: `model_type`, with which the class in `architectures` has to agree. Raises `ModelError`."""
    names, kind = config.get("architectures"), config.get("model_type")
    stated = {}
    if isinstance(names, list) and names:
        stated[f"architectures {names[0]}"] = (_CLASSES | _OTHER_CLASSES).get(str(names[0]))
    if kind:
        stated[f"model_type {kind}"] = str(kind).lower()
    agreed = set(stated.values())
    if len(agreed) != 1 or not agreed & ARCHITECTURES.keys():
        raise ModelError(
            "the model's architecture is not supported",
            got=(" and ".join(stated) or "neither architectures nor model_type")[:200],
            fix=f"use one of {', '.join(_CLASSES)}",
        )
    return str(agreed.pop())


def _llama_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    architecture = ARCHITECTURES[name]
    require(config, _LLAMA_KEYS, where="config.json")
    _check_numbers(config, _LLAMA_KEYS, ("num_key_value_heads", "head_dim", "sliding_window"))
    _refuse_unless(config, hidden_act=("silu", "swish"))
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = rope_from_hf(config, head_dim, config["max_position_embeddings"])
    attention_bias = _flag(config, "attention_bias") and name in (
        "llama",
        "qwen3",
    )  # the others' classes do not read it
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "ffn_size": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope": rope.config,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_position": min(rope.max_position, _window(config, name) or rope.max_position),
        "activation": "silu",
        "qkv_bias": architecture.qkv_bias or attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": _flag(config, "mlp_bias") and name == "llama",
        "qk_norm": architecture.qk_norm,
    }


def _window(config: Mapping[str, Any], name: str) -> int | None:
    """Tokens that a query of a windowed layer attends to, itself included; None without a window."""
    kinds, size = config.get("layer_types"), config.get("sliding_window") or None
    windowed = ARCHITECTURES[name].always_windowed or _flag(config, "use_sliding_window", default=name == "llama")
    if kinds is not None:
        served = ("full_attention", "sliding_attention") if windowed and size else ("full_attention",)
        count = config["num_hidden_layers"]
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in served for kind in kinds):
            raise ModelError(
                f"layer_types of config.json has {' or '.join(served)} for each of {count} layers",
                got=shown(kinds),
                fix="use another model, or set sliding_window and use_sliding_window",
            )
    return size if windowed else None


def _gptj_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    for alias, key in _GPTJ_ALIASES.items():
        if alias in config and config.get(key, config[alias]) != config[alias]:
            got = f"{alias} {config[alias]} and {key} {config[key]}"
            raise ModelError("config.json says a size twice, in two ways", got=got[:200], fix="correct the file")
    config = {key: config[alias] for alias, key in _GPTJ_ALIASES.items() if alias in config} | dict(config)
    require(config, _GPTJ_KEYS, where="config.json")
    _check_numbers(config, _GPTJ_KEYS, ("n_inner",))
    _refuse_unless(config, activation_function=("gelu_new", "gelu_fast", "gelu_pytorch_tanh"))
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["n_embd"],
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "head_dim": config["n_embd"] // config["n_head"],
        "ffn_size": config.get("n_inner") or 4 * config["n_embd"],
        "norm_eps": config["layer_norm_epsilon"],
        "rope": RopeConfig(theta=10_000.0, rotary_dim=config["rotary_dim"], interleaved=True),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_position": config["n_positions"],
        "activation": "gelu_new",
    }


def _check_numbers(config: Mapping[str, Any], keys: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Raise `ModelError` unless sizes and epsilons are above 0 and sizes are whole; optional ones may be null or 0."""
    for key in (*keys, *(key for key in optional if config.get(key))):
        value, kinds = config[key], (int, float) if key.endswith(("eps", "epsilon")) else (int,)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            kind = "number" if float in kinds else "whole number"
            raise ModelError(
                f"{key} of config.json is a {kind} above 0",
                got=shown(value),
                fix="correct the file or download it again",
            )


def _flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """A key that is true or false. Raises `ModelError` for another value."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} of config.json is true or false", got=shown(value), fix="correct the file")
    return value


def _refuse_unless(config: Mapping[str, Any], **implemented: tuple[str, ...]) -> None:
    for key, values in implemented.items():
        if config.get(key, values[0]) not in values:
            raise ModelError(
                f"{key} of config.json is not supported",
                got=shown(config[key]),
                fix=f"use a model with {values[0]}",
            )


def _ids(eos: int | list[int] | None) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
