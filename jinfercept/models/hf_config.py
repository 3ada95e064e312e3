"""Reads a `ModelConfig` from a Hugging Face `config.json`.

Values that are not there are those of transformers, which also says which layers have a window or are recurrent. A config that
this package would run wrongly (another architecture, another activation, a key that is not understood and could change the
numbers) is refused here, before any weight is read.
"""

import logging
import re
from collections.abc import Mapping, Set
from copy import deepcopy
from dataclasses import replace
from typing import Any

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import (
    ARCHITECTURES,
    ASSISTANT_KEYS,
    PLAIN_KIND,
    AssistantConfig,
    DeltaNetConfig,
    ExpertsConfig,
    Family,
    LayerKind,
    ModelConfig,
    RopeConfig,
    check_num_layers,
)
from jinfercept.models.hf_keys import (
    check_keys,
    check_numbers,
    flag,
    refuse_unless,
    require,
    text_config,
)
from jinfercept.models.hf_rope import check_rope_objects, ropes_from_hf
from jinfercept.pallas.layouts.rows import Activation

_DELTA_KEYS = {
    "qwen3_next": (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        "linear_conv_kernel_dim",
    ),
    "nemotron_h": ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel"),
}
"""By family, the names of the fields of `DeltaNetConfig`."""
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps")
_SIZES += ("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "rotary_dim", "layer_norm_epsilon")
_SIZES += ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok")
_SIZES += ("n_routed_experts", "n_shared_experts", "moe_shared_expert_intermediate_size")
_SIZES += ("full_attention_interval", "no_rope_layer_interval", "decoder_sparse_step", *sum(_DELTA_KEYS.values(), ()))
_OR_0 = ("moe_latent_size", "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "n_inner")
_OR_0 += ("hidden_size_per_layer_input", "num_kv_shared_layers", "global_head_dim")
_OR_0 += ("num_global_key_value_heads", "top_k_experts", "vocab_size_per_layer_input")
_OR_0 += ("sliding_window_pattern", "_sliding_window_pattern", "first_k_dense_replace", "num_nextn_predict_layers")
"""Sizes for which 0 stands for none."""
_SAME = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_SAME |= {"max_position_embeddings": "n_positions", "num_local_experts": "num_experts"}
_SAME |= {"sliding_window": "sliding_window_size"}
_BIASES = ("attention_bias", "mlp_bias")
_BESIDE = frozenset(
    ("attention_bias", "head_dim", "hidden_act", "layer_types", "sliding_window", "sliding_window_size")
)
_BESIDE |= {
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
"""Keys that any class may lack: older forms of others, and those that a class ignores if it does not have them."""
_OF_LLAMA = frozenset(("mlp_bias", "use_sliding_window", "max_window_layers"))
"""Those of Llama's relatives."""
_UNREAD = re.compile("drop|initializer|^use_cache$|^time_step_limit$")
"""Keys that change nothing here, and whose values transformers would check."""
_EXPERT_KEYS = frozenset(("num_experts", "num_local_experts", "router_jitter_noise", "router_aux_loss_coef"))
_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_CAUSAL: dict[str, tuple[object, ...]] = {"use_bidirectional_attention": (None, False)}
_ACTIVATIONS: dict[str, Mapping[str, tuple[object, ...]]] = {
    "gemma": {"hidden_act": (*_TANH, "gelu"), "hidden_activation": (*_TANH, None), **_CAUSAL},
    "gemma2": {"hidden_activation": _TANH, **_CAUSAL},
    "gemma3_text": {"hidden_activation": _TANH, **_CAUSAL},
    "gemma4_text": {
        "hidden_activation": _TANH,
        "use_bidirectional_attention": (None, "vision"),
        "attention_bias": (False,),
    },
    "nemotron_h": {
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), (False,)),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), (1,)),
        "use_conv_bias": (True,),
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
    },
    "gptj": {"activation_function": _TANH},
}
"""Keys of activations, and of what is served in one way only, and what they may be; of architectures that differ from Llama."""
_PARTS = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
"""Nemotron-H's types of layers, and their letters in `hybrid_override_pattern`."""
_WINDOWED_BY_LAYER = ("qwen2", "qwen3", "smollm3", "gpt_oss", "olmo3", "gemma2", "gemma3_text", "gemma4_text")
"""Architectures of whose layers some have windows, if a size is stated."""
_GRANITE_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_BY_FAMILY: dict[Family, Activation] = {"gemma": "gelu_new", "gemma4": "gelu_new", "nemotron_h": "relu2"}
"""Activations of feed-forward networks that are not SiLU."""


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
    understood = _check_sizes(config, name)
    try:
        stated = {key: value for key, value in config.items() if key in understood and not _UNREAD.search(key)}
        filled = _filled(stated, name)
        refuse_unless(filled, **_ACTIVATIONS.get(name, {"hidden_act": ("silu", "swish")}))
        eos = _ids(config.get("eos_token_id")) + _ids((generation or {}).get("eos_token_id"))
        fields = _gptj_fields(filled) if architecture.family == "gptj" else fields_of(filled, name)
        return ModelConfig(family=architecture.family, eos_token_ids=tuple(dict.fromkeys(eos)), **fields)
    except (TypeError, ArithmeticError, LookupError) as error:
        raise ModelError(
            "config.json has values of other types than it should",
            got=str(error)[:200],
            fix="correct the file or download it again",
        ) from error


def with_draft_layer(model: ModelConfig, config: Mapping[str, Any]) -> ModelConfig:
    """The config of a model with the layer that drafts. Raises `ModelError` for one that is not as Qwen3-Next has it."""
    model, stated = model.with_draft_layer(), text_config(config)
    refuse_unless(stated, mtp_num_hidden_layers=(1, None), mtp_use_dedicated_embeddings=(False, None))
    return model


def _check_sizes(config: Mapping[str, Any], name: str) -> Set[str]:
    """The keys that are understood. Raises `ModelError` for others that could change the output, and unless the sizes are
    right, and those there that tell a model from others of its architecture."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # a second to import

    own, architecture = CONFIG_MAPPING[name], ARCHITECTURES[name]
    understood = own().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    understood |= {"architectures", "model_type", "quantization_config", *own.attribute_map, *architecture.keys}
    understood |= _ACTIVATIONS.get(name, {}).keys()
    understood |= set[str]() if name == "gptj" else _BESIDE
    understood |= _OF_LLAMA if architecture.family == "llama" else set[str]()
    understood |= _EXPERT_KEYS if architecture.has_experts else set[str]()
    check_keys(config, understood, where="config.json")
    for key, other in (*_SAME.items(), *own.attribute_map.items()):
        if None not in (config.get(key), config.get(other)) and config[key] != config[other]:
            got = f"{key} {config[key]} and {other} {config[other]}"
            raise ModelError("config.json says a size twice, in two ways", got=got[:200], fix="correct the file")
    if name == "nemotron_h":  # whose list of layers counts
        config = {"num_hidden_layers": 1, **config}
    sizes = ["hidden_size", "num_hidden_layers", *(["num_attention_heads"] if name != "gemma3_text" else [])]
    sizes = [key if key in config else own.attribute_map.get(key, key) for key in sizes]
    require(config, sizes, where="config.json")
    stated = [key for key in (*_SIZES, *_OR_0) if key in understood and config.get(key) is not None]
    check_numbers(config, [key for key in stated if config[key] or key in _SIZES])
    check_num_layers(config[sizes[1]])
    return understood


def _filled(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with what transformers puts in place of keys that are not there."""
    from transformers import CONFIG_MAPPING  # a second to import

    check_rope_objects(config)
    config = {key: value for key, value in config.items() if value is not None or not key.endswith("_pattern")}
    config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # its own may be beyond the vocabulary
    log = logging.getLogger("transformers")  # whose warnings are of what is checked here
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        full = {**config, **CONFIG_MAPPING[name].from_dict(deepcopy(config)).to_dict()}
        own = CONFIG_MAPPING[name]().to_dict()
        return {key: value for key, value in full.items() if key in own or key not in _BIASES}
    except Exception as error:  # of transformers' validation
        raise ModelError("transformers refuses config.json", got=str(error)[:300], fix="correct the file") from error
    finally:
        log.setLevel(level)


def architecture_name(config: Mapping[str, Any]) -> str:
    """A name in `ARCHITECTURES`: `model_type`, with which the class in `architectures` has to agree. Raises `ModelError`."""
    config = text_config(config)
    names, kind = config.get("architectures"), config.get("model_type")
    stated = {}
    if isinstance(names, list) and names:
        stated[f"architectures {names[0]}"] = _kind_of_class(str(names[0]))
    if kind:
        stated[f"model_type {kind}"] = str(kind).lower()
    agreed = set(stated.values())
    if len(agreed) != 1 or not agreed & ARCHITECTURES.keys():
        raise ModelError(
            "the model's architecture is not supported",
            got=(" and ".join(stated) or "neither architectures nor model_type")[:200],
            fix=f"use one of {', '.join(ARCHITECTURES)}",
        )
    return str(agreed.pop())


def _kind_of_class(name: str) -> str | None:
    """The `model_type` that belongs to a class of transformers: both have the same name, in their own spellings."""
    plain = re.sub("(ForCausalLM|TextModel|Model)$", "", name).replace("_", "").lower()
    return next((kind for kind in ARCHITECTURES if kind.removesuffix("_text").replace("_", "") == plain), None)


def fields_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a `ModelConfig` with layers like Llama's."""
    architecture, num_heads = ARCHITECTURES[name], config["num_attention_heads"]
    windowed = dict[str, int]()
    if architecture.family == "nemotron_h":
        config = _in_blocks(config)
    if architecture.family == "gemma4":
        sizes = _sizes_by_type(config)
        windowed, config = sizes.get("sliding_attention", {}), {**config, **sizes["full_attention"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope, near = ropes_from_hf(config, head_dim, name, windowed.get("head_dim"))
    qkv_bias, mlp_bias = (flag(config, key) for key in _BIASES)
    activation, of_states = _BY_FAMILY.get(architecture.family, "silu"), _DELTA_KEYS.get(architecture.family)
    fields = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "ffn_size": config["moe_intermediate_size" if name == "qwen3_5_moe_text" else "intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope": rope.config,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_position": rope.max_position,
        "activation": activation,
        "qkv_bias": qkv_bias,
        "o_bias": qkv_bias,
        "mlp_bias": mlp_bias,
        "kinds": config.get("kinds") or _kinds(config, name, near),
        "experts": _experts(config, name, activation)
        if architecture.has_experts and config.get("enable_moe_block", True)
        else None,
        "delta_net": DeltaNetConfig(*(config[key] for key in of_states)) if of_states else None,
        **architecture.parts,
    }
    match architecture.family, name:
        case "llama", "granite":
            check_numbers(config, _GRANITE_FACTORS, whole=False)
            fields["rope"] = rope.config.scoring(config["attention_multiplier"])
            fields |= {key: config[key] for key in ("embedding_multiplier", "residual_multiplier")}
            fields["logits_divisor"] = config["logits_scaling"]
        case "llama", "smollm3":
            fields["kinds"] = _with_still_layers(config, fields["kinds"], rope.config)
        case "llama", "glm4_moe":
            refuse_unless(config, n_group=(1,), topk_group=(1,))
            fields["qk_norm"] = flag(config, "use_qk_norm")
        case "gemma", "gemma2" | "gemma3_text":
            scalar = config.get("query_pre_attn_scalar")
            fields["query_scale"] = None if scalar is None else scalar**-0.5
            fields["soft_cap"] = config.get("attn_logit_softcapping") if name == "gemma2" else None
            fields["logit_cap"] = config.get("final_logit_softcapping")
        case "gemma4", _:
            if size := config["hidden_size_per_layer_input"]:
                refuse_unless(config, vocab_size_per_layer_input=(config["vocab_size"],))
            fields["kinds"] = _gemma4_kinds(config, fields["kinds"], windowed)
            fields["logit_cap"], fields["per_layer_size"] = config.get("final_logit_softcapping"), size
            if ASSISTANT_KEYS[0] in config:
                fields["assistant"], fields["logit_cap"] = _assistant(config), None  # its class does not cap
        case "qwen3_next", _:
            refuse_unless(config, attn_output_gate=(True,))
        case "nemotron_h", _:
            fields["rope"] = replace(rope.config, scaling="proportional", turning_pairs=0)
    return fields


def _in_blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nemotron-H's config with Llama's names, and the `kinds` of layers that are Mamba-2 or attention with the feed-forward
    part behind it, if there is one. In the file every part is a layer."""
    types = config["layers_block_type"]
    refuse_unless(config, num_hidden_layers=(len(types),))
    letters = "".join(_PARTS[part] for part in types)
    blocks = re.findall("[M*][-E]?|[-E]", letters)
    attention = next((index for index, block in enumerate(blocks) if "*" in block), 0)
    kinds = tuple(
        LayerKind(
            is_dense="-" in block and "E" in letters,
            is_recurrent="M" in block,
            kv_from=attention if block in ("-", "E") else None,
            has_mixer=block not in ("-", "E"),
            has_ffn=block[-1] in "-E",
        )
        for block in blocks
    )
    return {
        **config,
        "kinds": kinds,
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": config["layer_norm_epsilon"],
        "enable_moe_block": "E" in letters,
    }


def _kinds(config: Mapping[str, Any], name: str, near: RopeConfig | None) -> tuple[LayerKind, ...]:
    """The kind of every layer; () if all are plain. Layers with a window turn by `near`, if that is not None."""
    architecture, size = ARCHITECTURES[name], config.get("sliding_window") or None
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if architecture.family == "qwen3_next":
        served = ["full_attention", "linear_attention"]
    else:
        by_layer = name in _WINDOWED_BY_LAYER and (size is not None or architecture.family == "gemma")
        served = (
            ["full_attention", "sliding_attention"] if architecture.always_windowed or by_layer else ["full_attention"]
        )
    if types is None:
        types = ["full_attention"] * count
    if not isinstance(types, list) or len(types) != count or any(kind not in served for kind in types):
        raise ModelError(
            f"layer_types of the config has {' or '.join(served)} for each of {count} layers",
            got=shown(types),
            fix="use another model, or set sliding_window and use_sliding_window",
        )
    kinds = tuple(
        LayerKind(
            size if architecture.always_windowed or kind == "sliding_attention" else None,
            near if kind == "sliding_attention" else None,
            is_dense,
            kind == "linear_attention",
        )
        for kind, is_dense in zip(types, _are_dense(config), strict=True)
    )
    return kinds if set(kinds) != {PLAIN_KIND} else ()


def _sizes_by_type(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The head dim and the KV heads of Gemma 4's layers of each type, which transformers has by layer."""
    usual = {key: config[key] for key in ("head_dim", "num_key_value_heads")}
    own = {int(index): sizes for index, sizes in config["per_layer_config"].items()}  # written as "05" beside "11"
    by_layer = [usual | own.get(index, {}) for index in range(len(config["layer_types"]))]
    types = [*zip(config["layer_types"], by_layer, strict=True)]
    by_type = dict(types)
    if any(sizes != by_type[of] or sizes.keys() != usual.keys() for of, sizes in types):
        raise ModelError(
            "layers of one type have one head dim and one number of KV heads, and nothing else of their own",
            got=shown(config["per_layer_config"]),
            fix="use another model",
        )
    return by_type


def _gemma4_kinds(
    config: Mapping[str, Any], kinds: tuple[LayerKind, ...], windowed: Mapping[str, int]
) -> tuple[LayerKind, ...]:
    """The kinds with the heads of layers with a window, and with what the last layers take from those before them."""
    types = config["layer_types"]
    wide = 2 * config["intermediate_size"] if flag(config, "use_double_wide_mlp") else None
    is_assistant = ASSISTANT_KEYS[0] in config
    num_own = 0 if is_assistant else len(types) - config["num_kv_shared_layers"]
    sources = dict.fromkeys(types, 0) if is_assistant else {of: index for index, of in enumerate(types[:num_own])}
    if sources.keys() != {*types}:
        got = f"{config['num_kv_shared_layers']} of {len(types)}"
        raise ModelError("num_kv_shared_layers leaves a layer of each type", got=got, fix="use another model")

    def own(index: int, kind: LayerKind) -> LayerKind:
        if kind.window is not None:
            kind = kind._replace(head_dim=windowed["head_dim"], num_kv_heads=windowed["num_key_value_heads"])
        if index >= num_own:
            return kind._replace(kv_from=sources[types[index]], ffn_size=wide)
        return kind._replace(keys_are_values=kind.window is None and flag(config, "attention_k_eq_v"))

    return tuple(own(index, kind) for index, kind in enumerate(kinds or (PLAIN_KIND,) * len(types)))


def _assistant(config: Mapping[str, Any]) -> AssistantConfig:
    """What drafts for a larger Gemma 4. All its layers read that one's keys and values."""
    plain = {"enable_moe_block": (False,), "use_double_wide_mlp": (False,), "hidden_size_per_layer_input": (0,)}
    refuse_unless(config, **plain, num_kv_shared_layers=(config["num_hidden_layers"], 0))
    if not flag(config, "use_ordered_embeddings", default=False):
        return AssistantConfig(config["backbone_hidden_size"])
    clusters = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
    return AssistantConfig(config["backbone_hidden_size"], *clusters)


def _are_dense(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """By layer, whether it has no experts though the model has."""
    if (first := config.get("first_k_dense_replace")) is not None:
        return tuple(index < first for index in range(config["num_hidden_layers"]))
    without, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    return tuple(index in without or (index + 1) % step > 0 for index in range(config["num_hidden_layers"]))


def _with_still_layers(
    config: Mapping[str, Any], kinds: tuple[LayerKind, ...], rope: RopeConfig
) -> tuple[LayerKind, ...]:
    """The kinds of SmolLM3's layers, of which some turn nothing."""
    count, turns = config["num_hidden_layers"], config["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) < count or any(turn not in (0, 1) for turn in turns):
        raise ModelError(
            f"no_rope_layers of config.json has 1 or 0 for each of {count} layers",
            got=shown(turns),
            fix="correct the file",
        )
    still = replace(rope, scaling="proportional", turning_pairs=0, attention_factor=1.0)
    kinds = kinds or (PLAIN_KIND,) * count
    return tuple(kind._replace(rope=None if turn else still) for kind, turn in zip(kinds, turns, strict=False))


def _experts(config: Mapping[str, Any], name: str, activation: Activation) -> ExpertsConfig:
    """The experts of the layers that have some."""
    if name == "gemma4_text":
        require(config, ("num_experts", "top_k_experts", "moe_intermediate_size"), where="config.json")
    ffn_size = config["moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"]
    experts = ExpertsConfig(
        next(
            config[key]
            for key in ("n_routed_experts", "num_local_experts", "num_experts")
            if config.get(key) is not None
        ),
        config["top_k_experts" if name == "gemma4_text" else "num_experts_per_tok"],
        ffn_size,
        normalised=flag(config, "norm_topk_prob", default=True),
        shared_ffn_size=config.get("shared_expert_intermediate_size", 0),
        activation=activation,
    )
    if name in ("glm4_moe", "nemotron_h"):
        check_numbers(config, ("routed_scaling_factor",), whole=False)
        return replace(
            experts,
            shared_ffn_size=config.get("moe_shared_expert_intermediate_size", ffn_size) * config["n_shared_experts"],
            scale=float(config["routed_scaling_factor"]),
            latent_size=config.get("moe_latent_size") or 0,
        )
    if name != "gpt_oss":
        return experts
    check_numbers(config, ("swiglu_limit", "swiglu_alpha"), whole=False)
    return replace(experts, swiglu=(config["swiglu_limit"], config["swiglu_alpha"]), biased=True)


def _gptj_fields(config: Mapping[str, Any]) -> dict[str, Any]:
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
