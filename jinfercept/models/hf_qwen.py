"""Reads what Qwen3-Next has of its own from a parsed `config.json`, by the rules of transformers 5."""

from collections.abc import Mapping
from typing import Any

from jinfercept.errors import ModelError, shown
from jinfercept.models.config import DeltaNetConfig, ExpertsConfig, LayerKind, check_num_layers
from jinfercept.models.hf_keys import LLAMA_KEYS, check_layer_types, check_numbers, flag, refuse_unless, require
from jinfercept.models.hf_rope import rope_from_hf

_DELTA_KEYS = {
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "num_taps",
}
_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok")
QWEN3_NEXT_KEYS = frozenset(
    (*_DELTA_KEYS, *_SIZES, "full_attention_interval", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
) | {"router_aux_loss_coef"}
"""Keys of `config.json` that are read besides those of all layers."""


def qwen3_next_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    require(config, LLAMA_KEYS, where="config.json")
    check_numbers(config, (*LLAMA_KEYS, *_DELTA_KEYS, *_SIZES), ("num_key_value_heads", "head_dim"))
    check_num_layers(config["num_hidden_layers"])
    refuse_unless(config, hidden_act=("silu", "swish"))
    rope, bias = (
        rope_from_hf(config, config["head_dim"], config["max_position_embeddings"], name),
        flag(config, "attention_bias"),
    )
    kinds = zip(_are_recurrent(config), are_dense(config), strict=True)
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "ffn_size": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope": rope.config,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_position": rope.max_position,
        "activation": "silu",
        "qkv_bias": bias,
        "o_bias": bias,
        "kinds": tuple(LayerKind(is_dense=dense, is_recurrent=recurrent) for recurrent, dense in kinds),
        "experts": ExpertsConfig(
            config["num_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            normalised=flag(config, "norm_topk_prob", default=True),
            shared_ffn_size=config["shared_expert_intermediate_size"],
        ),
        "delta_net": DeltaNetConfig(**{ours: config[theirs] for theirs, ours in _DELTA_KEYS.items()}),
        "qk_norm": True,
        "attention_gate": True,
    }


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
