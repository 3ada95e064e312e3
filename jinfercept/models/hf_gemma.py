"""Reads what Gemma 1, 2 and 3 have of their own from a parsed `config.json`, by the rules of transformers 5."""

from collections.abc import Mapping
from typing import Any

from jinfercept.models.config import ARCHITECTURES, PLAIN_KIND, LayerKind
from jinfercept.models.hf_keys import check_layer_types, check_sizes, flag, layer_fields, refuse_unless
from jinfercept.models.hf_rope import rope_from_hf, ropes_by_layer_type


def gemma_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    patterns = ("sliding_window_pattern", "_sliding_window_pattern")
    check_sizes(config, (), ("num_key_value_heads", "head_dim", "sliding_window", *patterns))
    usual = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
    if name == "gemma":
        refuse_unless(config, hidden_act=(*usual, "gelu"), hidden_activation=(*usual, None))
    else:
        refuse_unless(config, hidden_activation=usual)
    head_dim = config["head_dim"]
    own = None
    if name == "gemma3_text":  # transformers 4 wrote the thetas of full and of windowed layers beside each other
        thetas = config.get("rope_theta", 1_000_000.0), config.get("rope_local_base_freq", 10_000.0)
        own = ropes_by_layer_type(config, head_dim, thetas, name)
    rope = rope_from_hf(config, head_dim, config["max_position_embeddings"], name) if own is None else own[0]
    windowed = LayerKind(config.get("sliding_window") or None, None if own is None else own[1].config)
    scalar = config.get("query_pre_attn_scalar")
    return {
        **layer_fields(config, rope, head_dim, bias=flag(config, "attention_bias")),
        "activation": "gelu_new",
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
        every = config.get("sliding_window_pattern") or 6 if name == "gemma3_text" else 2
        return [bool((index + 1) % every) for index in range(count)]
    check_layer_types(kinds, ("full_attention", "sliding_attention"), count)
    return [kind == "sliding_attention" for kind in kinds]
