"""Reads a `ModelConfig` from a Hugging Face `config.json`.

A config that this package would run wrongly (another architecture, an unknown rope scaling, biases it has no place for)
is refused here, before any weight is read.
"""

import math
from collections.abc import Mapping
from typing import Any

from jinfercept.errors import ModelError
from jinfercept.models.config import ARCHITECTURES, Architecture, ModelConfig, RopeConfig

_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPTJForCausalLM": "gptj",
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

_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a model from a parsed `config.json`, and further end-of-sequence tokens from `generation_config.json`.

    Raises:
        ModelError: the architecture or the rope scaling is unknown, keys are missing, or something is set that
            would change the result and is not implemented.
    """
    if not isinstance(config, Mapping) or not isinstance(generation, Mapping | None):
        raise ModelError(
            "config.json and generation_config.json are JSON objects",
            got=repr(config if generation is None or isinstance(generation, Mapping) else generation)[:80],
            fix="download them again",
        )
    names = config.get("architectures")
    name = str(names[0] if isinstance(names, list) and names else config.get("model_type"))
    architecture = ARCHITECTURES.get(_CLASSES.get(name, name))
    if architecture is None:
        raise ModelError("the model's architecture is not supported", got=name, fix=f"use one of {', '.join(_CLASSES)}")
    try:
        eos = _ids(config.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id"))
        fields = _gptj_fields(config) if architecture.family == "gptj" else _llama_fields(config, architecture)
        return ModelConfig(family=architecture.family, eos_token_ids=tuple(dict.fromkeys(eos)), **fields)
    except (TypeError, ArithmeticError) as error:
        raise ModelError(
            "config.json has values of other types than it should",
            got=str(error)[:200],
            fix="correct the file or download it again",
        ) from error


def _llama_fields(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    _require(config, _LLAMA_KEYS, where="config.json")
    _check_numbers(config, _LLAMA_KEYS, ("num_key_value_heads", "head_dim", "sliding_window"))
    _refuse_unless(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    max_position = config["max_position_embeddings"]
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "ffn_size": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope": _llama_rope(config, head_dim, max_position),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_position": min(max_position, _window(config, architecture) or max_position),
        "activation": "silu",
        "qkv_bias": architecture.qkv_bias,
        "qk_norm": architecture.qk_norm,
    }


def _window(config: Mapping[str, Any], architecture: Architecture) -> int | None:
    """Tokens that a query of a windowed layer attends to, itself included; None without a window."""
    windowed = config.get("use_sliding_window", architecture.always_windowed)
    return config.get("sliding_window") if windowed else None


def _gptj_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, _GPTJ_KEYS, where="config.json")
    _check_numbers(config, _GPTJ_KEYS, ("n_inner",))
    _refuse_unless(config, activation_function="gelu_new")
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


def _llama_rope(config: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    """The rope of a Llama: transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`."""
    stated = (config.get(key) for key in ("rope_parameters", "rope_scaling"))
    rope = next((value for value in stated if value is not None and value != {}), {})
    if not isinstance(rope, Mapping):
        raise ModelError("rope_parameters of config.json are an object", got=repr(rope)[:80], fix="correct the file")
    _check_rope(rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(
            "Llama with partial rotary embedding is not supported", got=dict(rope), fix="use another model"
        )
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", max_position
    )
    match kind:
        case "default":
            return RopeConfig(theta, head_dim)
        case "linear":
            _require(rope, ("factor",), where="rope_parameters")
            return RopeConfig(theta, head_dim, scaling="linear", factor=rope["factor"])
        case "llama3":
            _require(rope, ("factor", "low_freq_factor", "high_freq_factor"), where="rope_parameters")
            return RopeConfig(
                theta,
                head_dim,
                scaling="llama3",
                factor=rope["factor"],
                original_max_position=original,
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
            )
        case "yarn":
            _require(rope, ("factor",), where="rope_parameters")
            return RopeConfig(
                theta,
                head_dim,
                scaling="yarn",
                factor=rope["factor"],
                original_max_position=original,
                beta_fast=rope.get("beta_fast") or 32.0,
                beta_slow=rope.get("beta_slow") or 1.0,
                truncate=rope.get("truncate", True) is not False,
                attention_factor=_yarn_attention_factor(rope),
            )
        case _:
            raise ModelError("the rope scaling is not supported", got=kind, fix="use default, linear, llama3 or yarn")


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    """YaRN (arXiv 2309.00071), section 3.4: 0.1 ln s + 1, unless the config says otherwise."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)


def _require(config: Mapping[str, Any], keys: tuple[str, ...], *, where: str) -> None:
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ModelError(
            f"{where} lacks keys", got=f"no {', '.join(missing)}", fix="complete the file or use another model"
        )


def _check_numbers(config: Mapping[str, Any], keys: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Raise `ModelError` unless sizes and epsilons are above 0 and sizes are whole; optional ones may be null or 0."""
    for key in (*keys, *(key for key in optional if config.get(key))):
        value, kinds = config[key], (int, float) if key.endswith(("eps", "epsilon")) else (int,)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            kind = "number" if float in kinds else "whole number"
            raise ModelError(
                f"{key} of config.json is a {kind} above 0",
                got=repr(value)[:80],
                fix="correct the file or download it again",
            )


def _check_rope(rope: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a value that should be a number above 0 and is not."""
    for key in _ROPE_NUMBERS:
        value = rope.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value <= 0):
            raise ModelError(
                f"{key} of rope_parameters is a number above 0", got=repr(value)[:80], fix="correct config.json"
            )


def _refuse_unless(config: Mapping[str, Any], **implemented: object) -> None:
    for key, value in implemented.items():
        if config.get(key, value) != value:
            raise ModelError(
                f"{key} of config.json is not supported", got=config[key], fix=f"use a model with {key} = {value}"
            )


def _ids(eos: int | list[int] | None) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
