"""Reads a `ModelConfig` from a Hugging Face `config.json`.

Values that are not there are those of transformers 5. A config that this package would run wrongly (another architecture,
another activation, a key that is not understood and could change the numbers) is refused here, before any weight is read.
"""

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
from jinfercept.models.hf_gemma import gemma_fields
from jinfercept.models.hf_keys import (
    LLAMA_KEYS,
    check_factors,
    check_keys,
    check_layer_types,
    check_numbers,
    check_sizes,
    flag,
    layer_fields,
    refuse_unless,
    require,
    text_config,
)
from jinfercept.models.hf_qwen import QWEN3_NEXT_KEYS, QWEN_HYBRIDS, are_dense, qwen3_next_fields
from jinfercept.models.hf_rope import Rope, rope_from_hf, ropes_by_layer_type

_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "GptOssForCausalLM": "gpt_oss",
    "GPTJForCausalLM": "gptj",
}
_OTHER_CLASSES = {
    "LLaMAForCausalLM": "llama",  # the first conversions of Llama
    **{
        name.replace("ForCausalLM", "TextModel" if kind.endswith("_text") else "Model"): kind
        for name, kind in _CLASSES.items()
    },
}
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
    | {*LLAMA_KEYS, "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "sliding_window", "layer_types"}
    | {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
)
_UNDERSTOOD: dict[Family, frozenset[str]] = {
    "llama": _LAYER_KEYS | {"mlp_bias", "use_sliding_window", "max_window_layers"},
    "gemma": _LAYER_KEYS
    | {"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"}
    | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
    "qwen3_next": _LAYER_KEYS | QWEN3_NEXT_KEYS,
    "gptj": _COMMON_KEYS | {*_GPTJ_KEYS, *_GPTJ_ALIASES, "n_inner", "activation_function"},
}
_CHOOSE_WINDOWS = ("qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Architectures that have windows if `use_sliding_window` says so."""
_WINDOWED_EVERY = {"gpt_oss": 2, "olmo3": 4}
"""Architectures that have windows whatever the config says: by default in all layers but each of that number."""
_GRANITE_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_MINISTRAL_3_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
_MINISTRAL_3_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_GEMMA = {"rms_norm_eps": 1e-6, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA_2 = {**_GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_QWEN_2 = {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
    | {"rope_parameters": _MINISTRAL_3_ROPE},
    "qwen2": _QWEN_2,
    "qwen3": {**_QWEN_2, "head_dim": 128},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "granite": {"rms_norm_eps": 1e-6, **dict.fromkeys(_GRANITE_FACTORS, 1.0)},
    "smollm3": {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "gemma": {**_GEMMA, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    "gemma2": {**_GEMMA_2, "max_position_embeddings": 8192}
    | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {**_GEMMA_2, "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072},
    "mixtral": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "sliding_window": 4096}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    **QWEN_HYBRIDS,
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
    config = text_config(config)
    name = architecture_name(config)
    architecture = ARCHITECTURES[name]
    check_keys(config, _UNDERSTOOD[architecture.family] | architecture.keys, where="config.json")
    config = _DEFAULTS[name] | {
        key: value for key, value in config.items() if (key, value) != ("rope_parameters", None)
    }
    if name == "gpt_oss" and config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config["rope_parameters"] = _GPT_OSS_ROPE
    try:
        eos = _ids(config.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id"))
        match architecture.family:
            case "llama":
                fields = _llama_fields(config, name)
            case "gemma":
                fields = gemma_fields(config, name)
            case "qwen3_next":
                fields = qwen3_next_fields(config, name)
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
    config = text_config(config)
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
    check_sizes(config, (), ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers"))
    refuse_unless(config, hidden_act=("silu", "swish"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope, near = _ropes(config, head_dim, name)
    attention_bias, mlp_bias = (
        flag(config, key) and key in architecture.biases for key in ("attention_bias", "mlp_bias")
    )
    dense = are_dense(config) if name == "qwen3_moe" else (False,) * config["num_hidden_layers"]
    fields = {
        **layer_fields(config, rope, head_dim, bias=attention_bias),
        "activation": "silu",
        "mlp_bias": mlp_bias,
        "kinds": _kinds(_windows(config, name), dense, near),
        "experts": _experts(config, name) if "num_experts" in architecture.keys else None,
    }
    own = {"granite": _granite_fields, "smollm3": _smollm3_fields}.get(name)
    return {**fields, **architecture.parts, **({} if own is None else own(config, rope.config))}


def _ropes(config: Mapping[str, Any], head_dim: int, name: str) -> tuple[Rope, RopeConfig | None]:
    """The rotation, and that of windowed layers if it is another one."""
    if name != "olmo3":
        return rope_from_hf(config, head_dim, config["max_position_embeddings"], name), None
    theta = 500_000.0  # of windowed layers too, whatever `rope_theta` says: transformers takes it for the others alone
    full, near = ropes_by_layer_type(config, head_dim, (config.get("rope_theta", theta), theta), name)
    return full, None if near.config == full.config else near.config


def _granite_fields(config: Mapping[str, Any], rope: RopeConfig) -> dict[str, Any]:
    check_factors(config, _GRANITE_FACTORS)
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
        check_numbers(config, ("no_rope_layer_interval",), ())
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


def _kinds(
    windows: tuple[int | None, ...], are_dense: tuple[bool, ...], near: RopeConfig | None
) -> tuple[LayerKind, ...]:
    """The layers' kinds; () if all are plain. Layers with a window turn by `near`."""
    kinds = tuple(
        LayerKind(window, None if window is None else near, is_dense)
        for window, is_dense in zip(windows, are_dense, strict=True)
    )
    return kinds if set(kinds) != {PLAIN_KIND} else ()


def _experts(config: Mapping[str, Any], name: str) -> ExpertsConfig:
    """The experts of the layers that have some. Raises `ModelError` for sizes that do not agree."""
    counts = [config[key] for key in ("num_local_experts", "num_experts") if config.get(key) is not None]
    if len(set(map(shown, counts))) > 1:
        raise ModelError("config.json says a size twice, in two ways", got=shown(counts), fix="correct the file")
    count = counts[0] if counts else {"mixtral": 8}.get(name, 128)
    per_token = config["num_experts_per_tok"]
    if name == "qwen3_moe":
        normalised = flag(config, "norm_topk_prob")
        return ExpertsConfig(count, per_token, config["moe_intermediate_size"], normalised=normalised)
    experts = ExpertsConfig(count, per_token, config["intermediate_size"], normalised=True)
    if name == "mixtral":
        return experts
    check_factors(config, ("swiglu_limit", "swiglu_alpha"))
    return replace(experts, swiglu=(config["swiglu_limit"], config["swiglu_alpha"]), biased=True)


def _windows(config: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    """By layer the tokens that a query sees, itself included; None: all before it."""
    kinds, size = config.get("layer_types"), config.get("sliding_window") or None
    count, chosen = config["num_hidden_layers"], name in _CHOOSE_WINDOWS and flag(config, "use_sliding_window")
    always = ARCHITECTURES[name].always_windowed or (chosen and name == "qwen3_moe")  # in all layers
    windowed = always or chosen or name in _WINDOWED_EVERY
    if kinds is None and (every := _WINDOWED_EVERY.get(name)):
        kinds = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(count)]
    if kinds is None:
        first = 0 if always else config.get("max_window_layers", 0)
        return tuple(size if windowed and index >= first else None for index in range(count))
    served = ("full_attention", "sliding_attention") if windowed and size else ("full_attention",)
    check_layer_types(kinds, served, count)
    return tuple(size if windowed and (always or kind == "sliding_attention") else None for kind in kinds)


def _gptj_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    for alias, key in _GPTJ_ALIASES.items():
        if alias in config and config.get(key, config[alias]) != config[alias]:
            got = f"{alias} {config[alias]} and {key} {config[key]}"
            raise ModelError("config.json says a size twice, in two ways", got=got[:200], fix="correct the file")
    config = {key: config[alias] for alias, key in _GPTJ_ALIASES.items() if alias in config} | dict(config)
    require(config, _GPTJ_KEYS, where="config.json")
    check_numbers(config, _GPTJ_KEYS, ("n_inner",))
    refuse_unless(config, activation_function=("gelu_new", "gelu_fast", "gelu_pytorch_tanh"))
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


def _ids(eos: int | list[int] | None) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
