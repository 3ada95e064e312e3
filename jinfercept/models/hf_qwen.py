"""Reads what Qwen3-Next and Qwen3.5 have of their own from a parsed `config.json`, by the rules of transformers 5."""

from collections.abc import Mapping
from typing import Any

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import ARCHITECTURES, DeltaNetConfig, ExpertsConfig, LayerKind
from jinfercept.models.hf_keys import check_layer_types, check_numbers, check_sizes, flag, layer_fields, refuse_unless
from jinfercept.models.hf_rope import rope_from_hf

_DELTA_KEYS = {
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "num_taps",
}
_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok")
_DRAFTS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of further tokens, which transformers leaves out
QWEN3_NEXT_KEYS = frozenset((*_DELTA_KEYS, "full_attention_interval", "attn_output_gate", "mamba_ssm_dtype", *_DRAFTS))
"""Keys of `config.json` that are read besides those of all layers, or that change nothing: states are float32."""
_HYBRID = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MOE = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
QWEN_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_HYBRID, **_MOE, "num_experts": 512, "num_experts_per_tok": 10},
    "qwen3_5_text": {**_HYBRID, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {**_HYBRID, **_MOE, "num_experts": 256, "num_experts_per_tok": 8},
}
"""Values of transformers for keys that are not there."""


def qwen3_next_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    has_experts = "num_experts" in ARCHITECTURES[name].keys
    if name == "qwen3_5_moe_text":  # all layers have experts
        config = {**config, "intermediate_size": config["moe_intermediate_size"]}
    check_sizes(config, (*_DELTA_KEYS, *(_SIZES if has_experts else ())), ("num_key_value_heads", "head_dim"))
    if not flag(config, "attn_output_gate", default=True):
        raise ModelError("attention of this family has gates", got="attn_output_gate false", fix="use another model")
    refuse_unless(config, hidden_act=("silu", "swish"))
    rope = rope_from_hf(config, config["head_dim"], config["max_position_embeddings"], name)
    kinds = zip(_are_recurrent(config), are_dense(config), strict=True)
    return {
        **layer_fields(config, rope, config["head_dim"], bias=flag(config, "attention_bias")),
        "activation": "silu",
        "kinds": tuple(LayerKind(is_dense=dense, is_recurrent=recurrent) for recurrent, dense in kinds),
        "experts": _experts(config, name) if has_experts else None,
        "delta_net": DeltaNetConfig(**{ours: config[theirs] for theirs, ours in _DELTA_KEYS.items()}),
        "qk_norm": True,
        "attention_gate": True,
    }


def _experts(config: Mapping[str, Any], name: str) -> ExpertsConfig:
    return ExpertsConfig(
        config["num_experts"],
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        normalised=name != "qwen3_next" or flag(config, "norm_topk_prob", default=True),
        shared_ffn_size=config["shared_expert_intermediate_size"],
    )


def are_dense(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """By layer, whether it has no experts though the model has."""
    without, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(without, list) or not isinstance(step, int) or step < 1:
        raise ModelError(
            "mlp_only_layers and decoder_sparse_step of config.json are numbers of layers and a whole number above 0",
            got=f"{shown(without)} and {shown(step)}",
            fix="correct the file",
        )
    return tuple(index in without or (index + 1) % step > 0 for index in range(config["num_hidden_layers"]))


def _are_recurrent(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """By layer, whether it is recurrent. Raises `ModelError` if none has attention, or none is."""
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        check_numbers(config, ("full_attention_interval",), ())
        types = [
            "linear_attention" if (index + 1) % config["full_attention_interval"] else "full_attention"
            for index in range(count)
        ]
    check_layer_types(types, ("full_attention", "linear_attention"), count)
    if len(set(types)) < 2:
        raise ModelError(
            "a model of this family has layers with attention and recurrent ones",
            got=shown(types),
            fix="use another model",
        )
    return tuple(kind == "linear_attention" for kind in types)
