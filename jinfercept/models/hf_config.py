"""Reads a `ModelConfig` from a Hugging Face `config.json`.

Values that are not there are those of transformers 5. A config that this package would run wrongly (another architecture,
another activation, a key that is not understood and could change the numbers) is refused here, before any weight is read.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import (
    ARCHITECTURES,
    PLAIN_KIND,
    ExpertsConfig,
    Family,
    LayerKind,
    ModelConfig,
    RopeConfig,
)
from jinfercept.models.hf_keys import check_keys, require
from jinfercept.models.hf_rope import Rope, rope_from_hf

_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "GPTJForCausalLM": "gptj",
}
_OTHER_CLASSES = {
    "LLaMAForCausalLM": "llama",  # the first conversions of Llama
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    "Olmo2Model": "olmo2",
    "Phi3Model": "phi3",
    "GraniteModel": "granite",
    "SmolLM3Model": "smollm3",
    "GemmaModel": "gemma",
    "Gemma2Model": "gemma2",
    "Gemma3TextModel": "gemma3_text",
    "MixtralModel": "mixtral",
    "Qwen3MoeModel": "qwen3_moe",
    "GptOssModel": "gpt_oss",
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
_LAYER_KEYS = (
    _COMMON_KEYS
    | {*_LLAMA_KEYS, "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "sliding_window", "layer_types"}
    | {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
)
_UNDERSTOOD: dict[Family, frozenset[str]] = {
    "llama": _LAYER_KEYS | {"mlp_bias", "use_sliding_window", "max_window_layers"},
    "gemma": _LAYER_KEYS
    | {"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"}
    | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
    "gptj": _COMMON_KEYS | {*_GPTJ_KEYS, *_GPTJ_ALIASES, "n_inner", "activation_function"},
}
_GEMMA = {"rms_norm_eps": 1e-6, "head_dim": 256, "tie_word_embeddings": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "granite": {
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "smollm3": {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "gemma": {**_GEMMA, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    "gemma2": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "mixtral": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "sliding_window": 4096}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "gptj": {"layer_norm_epsilon": 1e-5, "rotary_dim": 64, "n_positions": 2048},
}
"""Values of transformers for keys that are not there."""
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


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
    name = architecture_name(config)
    architecture = ARCHITECTURES[name]
    check_keys(config, _UNDERSTOOD[architecture.family] | architecture.keys, where="config.json")
    config = _DEFAULTS[name] | dict(config)
    if name == "gpt_oss" and not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_parameters"] = _GPT_OSS_ROPE
    try:
        eos = _ids(config.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id"))
        match architecture.family:
            case "llama":
                fields = _llama_fields(config, name)
            case "gemma":
                fields = _gemma_fields(config, name)
            case "gptj":
                fields = _gptj_fields(config)
        return ModelConfig(family=architecture.family, eos_token_ids=tuple(dict.fromkeys(eos)), **fields)
    except (TypeError, ArithmeticError) as error:
        raise ModelError(
            "config.json has values of other types than it should",
            got=str(error)[:200],
            fix="correct the file or download it again",
        ) from error


def architecture_name(config: Mapping[str, Any]) -> str:
    """A name in `ARCHITECTURES`: `model_type`, with which the class in `architectures` has to agree. Raises `ModelError`."""
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
    _check_numbers(config, _LLAMA_KEYS, ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers"))
    _refuse_unless(config, hidden_act=("silu", "swish"))
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = rope_from_hf(config, head_dim, config["max_position_embeddings"], name)
    attention_bias, mlp_bias = (
        _flag(config, key) and key in architecture.biases for key in ("attention_bias", "mlp_bias")
    )
    fields = {
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
        "max_position": rope.max_position,
        "activation": "silu",
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "kinds": _kinds(_windows(config, name), _are_dense(config, name)),
        "experts": _experts(config, name) if "num_experts" in architecture.keys else None,
    }
    own = {"granite": _granite_fields, "smollm3": _smollm3_fields}.get(name)
    return {**fields, **architecture.parts, **({} if own is None else own(config, rope.config))}


def _granite_fields(config: Mapping[str, Any], rope: RopeConfig) -> dict[str, Any]:
    _check_factors(config, ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"))
    return {
        "rope": rope.scoring(config["attention_multiplier"]),
        "embedding_multiplier": config["embedding_multiplier"],
        "residual_multiplier": config["residual_multiplier"],
        "logits_divisor": config["logits_scaling"],
    }


def _smollm3_fields(config: Mapping[str, Any], rope: RopeConfig) -> dict[str, Any]:
    """Some layers turn nothing; these are the windowed ones, if any are."""
    count, interval, turns = config["num_hidden_layers"], config["no_rope_layer_interval"], config.get("no_rope_layers")
    if turns is None:
        _check_numbers(config, ("no_rope_layer_interval",), ())
        turns = [int((index + 1) % interval != 0) for index in range(count)]
    if not isinstance(turns, list) or len(turns) < count or any(turn not in (0, 1) for turn in turns):
        raise ModelError(
            f"no_rope_layers of config.json has 1 or 0 for each of {count} layers",
            got=shown(turns),
            fix="correct the file",
        )
    windows = _windows(config, "smollm3")
    if config.get("layer_types") is None:
        windows = [None if turn else window for window, turn in zip(windows, turns, strict=False)]
    still = replace(rope, scaling="proportional", turning_pairs=0, attention_factor=1.0)
    return {
        "kinds": tuple(LayerKind(window, None if turn else still) for window, turn in zip(windows, turns, strict=False))
    }


def _gemma_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    require(config, _LLAMA_KEYS, where="config.json")
    optional = (
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    )
    _check_numbers(config, _LLAMA_KEYS, optional)
    usual = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
    if name == "gemma":
        _refuse_unless(config, hidden_act=(*usual, "gelu"), hidden_activation=(*usual, None))
    else:
        _refuse_unless(config, hidden_activation=usual)
    head_dim, bias = config["head_dim"], _flag(config, "attention_bias")
    own = _gemma_ropes(config, head_dim) if name == "gemma3_text" else None
    rope = rope_from_hf(config, head_dim, config["max_position_embeddings"], name) if own is None else own[0]
    windowed = LayerKind(config.get("sliding_window") or None, None if own is None else own[1].config)
    scalar = config.get("query_pre_attn_scalar")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": head_dim,
        "ffn_size": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope": rope.config,
        "tie_embeddings": config["tie_word_embeddings"],
        "max_position": rope.max_position,
        "activation": "gelu_new",
        "qkv_bias": bias,
        "o_bias": bias,
        "kinds": tuple(windowed if is_windowed else PLAIN_KIND for is_windowed in _gemma_pattern(config, name)),
        "query_scale": None if scalar is None or name == "gemma" else scalar**-0.5,
        "soft_cap": config.get("attn_logit_softcapping") if name == "gemma2" else None,
        "logit_cap": None if name == "gemma" else config.get("final_logit_softcapping"),
        **ARCHITECTURES[name].parts,
    }


def _gemma_pattern(config: Mapping[str, Any], name: str) -> list[bool]:
    """By layer, whether it is windowed; () if none is."""
    if name == "gemma":
        return []
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        every = config.get("_sliding_window_pattern") or config.get("sliding_window_pattern") or 6
        every = every if name == "gemma3_text" else 2
        return [bool((index + 1) % every) for index in range(count)]
    _check_kinds(kinds, ("full_attention", "sliding_attention"), count)
    return [kind == "sliding_attention" for kind in kinds]


def _gemma_ropes(config: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    """The rotations of Gemma 3's full layers and of its windowed ones, which transformers 4 wrote beside each other."""
    stated = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta", 1_000_000.0), "rope_parameters": stated.get("full_attention")}
    if config.get("rope_scaling"):
        full["rope_scaling"] = config["rope_scaling"]
    near = {
        "rope_theta": config.get("rope_local_base_freq", 10_000.0),
        "rope_parameters": stated.get("sliding_attention"),
    }
    longest = config["max_position_embeddings"]
    ropes = [rope_from_hf(stated, head_dim, longest, "gemma3_text") for stated in (full, near)]
    return ropes[0], ropes[1]


def _check_kinds(kinds: Any, served: tuple[str, ...], count: int) -> None:
    """Raise `ModelError` unless `layer_types` has a kind that is served for every layer."""
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in served for kind in kinds):
        raise ModelError(
            f"layer_types of config.json has {' or '.join(served)} for each of {count} layers",
            got=shown(kinds),
            fix="use another model, or set sliding_window and use_sliding_window",
        )


def _kinds(windows: tuple[int | None, ...], are_dense: tuple[bool, ...]) -> tuple[LayerKind, ...]:
    """The layers' kinds; () if all are plain."""
    kinds = tuple(LayerKind(window, None, is_dense) for window, is_dense in zip(windows, are_dense, strict=True))
    return kinds if set(kinds) != {PLAIN_KIND} else ()


def _are_dense(config: Mapping[str, Any], name: str) -> tuple[bool, ...]:
    """By layer, whether it has no experts though the model has."""
    count = config["num_hidden_layers"]
    if name != "qwen3_moe":
        return (False,) * count
    without, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(without, list) or not isinstance(step, int) or step < 1:
        raise ModelError(
            "mlp_only_layers and decoder_sparse_step of config.json are numbers of layers and a whole number above 0",
            got=f"{shown(without)} and {shown(step)}",
            fix="correct the file",
        )
    return tuple(index in without or (index + 1) % step > 0 for index in range(count))


def _experts(config: Mapping[str, Any], name: str) -> ExpertsConfig:
    """The experts of the layers that have some. Raises `ModelError` for sizes that do not agree."""
    counts = [config[key] for key in ("num_local_experts", "num_experts") if config.get(key) is not None]
    if len(set(map(shown, counts))) > 1:
        raise ModelError("config.json says a size twice, in two ways", got=shown(counts), fix="correct the file")
    count = counts[0] if counts else {"mixtral": 8}.get(name, 128)
    per_token = config["num_experts_per_tok"]
    if name == "qwen3_moe":
        normalised = _flag(config, "norm_topk_prob")
        return ExpertsConfig(count, per_token, config["moe_intermediate_size"], normalised=normalised)
    experts = ExpertsConfig(count, per_token, config["intermediate_size"], normalised=True)
    if name == "mixtral":
        return experts
    _check_factors(config, ("swiglu_limit", "swiglu_alpha"))
    return replace(experts, swiglu=(config["swiglu_limit"], config["swiglu_alpha"]), biased=True)


def _windows(config: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    """By layer the tokens that a query sees, itself included; None: all before it."""
    kinds, size = config.get("layer_types"), config.get("sliding_window") or None
    count, always = config["num_hidden_layers"], ARCHITECTURES[name].always_windowed
    windowed = always or _flag(config, "use_sliding_window", default=name in ("llama", "gpt_oss"))
    if name == "gpt_oss" and kinds is None:
        kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    if kinds is None:
        first = 0 if always or name in ("llama", "qwen3_moe") else config.get("max_window_layers", 0)
        return tuple(size if windowed and index >= first else None for index in range(count))
    served = ("full_attention", "sliding_attention") if windowed and size else ("full_attention",)
    _check_kinds(kinds, served, count)
    return tuple(size if windowed and (always or kind == "sliding_attention") else None for kind in kinds)


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


def _check_factors(config: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise `ModelError` unless these are numbers above 0."""
    for key in keys:
        value = config[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelError(f"{key} of config.json is a number above 0", got=shown(value), fix="correct the file")


def _flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """A key that is true or false. Raises `ModelError` for another value."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} of config.json is true or false", got=shown(value), fix="correct the file")
    return value


def _refuse_unless(config: Mapping[str, Any], **implemented: tuple[str | None, ...]) -> None:
    for key, values in implemented.items():
        if config.get(key, values[0]) not in values:
            raise ModelError(
                f"{key} of config.json is not supported",
                got=shown(config[key]),
                fix=f"use a model with {values[0]}",
            )


def _ids(eos: int | list[int] | None) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
