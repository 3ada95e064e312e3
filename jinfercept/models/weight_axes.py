"""What the weights of all families are, by name: the axes of each, and over which of them its product sums."""

from collections.abc import Mapping

from jinfercept.models.config import ModelConfig

_WEIGHTS = {
    "embedding": "vocab embed",
    "per_layer_embedding": "vocab per_layers",
    "per_layer_projection": "embed -> per_layers",
    "per_layer_projection_norm": "per_layer",
    "attn_norm": "embed",
    "q": "embed -> query_heads head_dim",
    "k": "embed -> kv_heads head_dim",
    "v": "embed -> kv_heads head_dim",
    "qkv": "embed -> kv_heads query_key_value head_dim",
    "q_bias": "query_heads head_dim",
    "k_bias": "kv_heads head_dim",
    "v_bias": "kv_heads head_dim",
    "qkv_bias": "kv_heads query_key_value head_dim",
    "q_norm": "head_dim",
    "k_norm": "head_dim",
    "q_row_norm": "query_heads head_dim",
    "k_row_norm": "kv_heads head_dim",
    "sinks": "query_heads",
    "o": "heads head_dim -> embed",
    "o_bias": "embed",
    "attn_post_norm": "embed",
    "ffn_norm": "embed",
    "gate": "embed -> ffn",
    "up": "embed -> ffn",
    "gate_up": "side embed ffn",
    "gate_bias": "ffn",
    "up_bias": "ffn",
    "gate_up_bias": "side ffn",
    "down": "ffn -> embed",
    "down_bias": "embed",
    "ffn_post_norm": "embed",
    "router": "embed -> choices",
    "router_bias": "choices",
    "router_correction": "choices",
    "experts_gate_up": "experts expert_embed side expert_ffn",
    "experts_up": "experts expert_embed expert_ffn",
    "experts_down": "experts expert_ffn expert_embed",
    "latent_in": "embed -> expert_embed",
    "latent_out": "expert_embed -> embed",
    "experts_gate_up_bias": "experts side expert_ffn",
    "experts_down_bias": "experts embed",
    "shared_gate": "embed -> shared_ffn",
    "shared_up": "embed -> shared_ffn",
    "shared_down": "shared_ffn -> embed",
    "shared_factor": "embed -> one",
    "router_norm": "embed",
    "router_scale": "choices",
    "dense_post_norm": "embed",
    "experts_norm": "embed",
    "experts_post_norm": "embed",
    "per_layer_gate": "embed -> per_layer",
    "per_layer_up": "per_layer -> embed",
    "per_layer_norm": "embed",
    "layer_scale": "one",
    "delta_qkvz": "embed -> key_heads channels_gates",
    "delta_ba": "embed -> key_heads betas_steps",
    "delta_taps": "taps -> key_heads channels",
    "delta_decay": "key_heads value_group",
    "delta_step_bias": "key_heads value_group",
    "delta_norm": "value_dim",
    "delta_o": "key_heads values -> embed",
    "mamba_in": "embed -> key_heads mamba_inputs",
    "mamba_taps_bias": "key_heads channels",
    "mamba_skip": "key_heads value_group",
    "mamba_norm": "key_heads values",
    "draft_embedding_norm": "embed",
    "draft_hidden_norm": "embed",
    "draft_fc": "side embed -> stream",
    "draft_norm": "embed",
    "pre_projection": "side target -> embed",
    "post_projection": "embed -> target",
    "centroids": "embed -> clusters",
    "token_order": "clusters cluster_tokens",
    "norm": "embed",
    "norm_bias": "embed",
    "unembed": "vocab embed",
    "unembed_bias": "vocab",
}
"""The axes before an arrow are those over which a product sums. Recurrent layers of Mamba-2 have `delta_taps`, `delta_decay`,
`delta_step_bias` and `delta_o`, too."""
WHOLE_NUMBERS = ("token_order",)
"""Weights that are stored as whole numbers."""
IN_FLOAT32 = ("router_correction", *WHOLE_NUMBERS)
"""Weights that 16 bits are too few for: what they are added to decides by small differences, or they are numbers of tokens."""
WEIGHT_AXES: Mapping[str, tuple[str, ...]] = {
    name: tuple(axes.replace("->", "").split()) for name, axes in _WEIGHTS.items()
}
NUM_INPUTS = {name: len(axes.split("->")[0].split()) if "->" in axes else 0 for name, axes in _WEIGHTS.items()}
"""How many axes there are before the arrow; 0 of norms, biases, tables and stacks."""


def weight_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The shape of a weight of this name in a model."""
    sizes = _sizes(config)
    return tuple(sizes[axis] for axis in WEIGHT_AXES[name])


def _sizes(config: ModelConfig) -> dict[str, int]:
    query_heads = config.num_heads * (2 if config.attention_gate else 1)  # every head's gates behind its queries
    sizes = {
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "stream": config.hidden_size,
        "heads": config.num_heads,
        "query_heads": query_heads,
        "kv_heads": config.num_kv_heads,
        "query_key_value": query_heads // config.num_kv_heads + 2,
        "head_dim": config.head_dim,
        "ffn": config.ffn_size,
        "side": 2,
        "one": 1,
        "per_layer": config.per_layer_size,
        "per_layers": config.num_layers * config.per_layer_size,
    }
    if (experts := config.experts) is not None:
        sizes |= {
            "choices": experts.num_experts,
            "experts": experts.num_experts * experts.parts,
            "expert_embed": experts.latent_size or config.hidden_size,
            "expert_ffn": experts.ffn_size // experts.parts,
            "shared_ffn": experts.shared_ffn_size,
        }
    if (assistant := config.assistant) is not None:
        sizes |= {"target": assistant.target_size, "clusters": assistant.num_clusters}
        sizes["cluster_tokens"] = config.vocab_size // max(1, assistant.num_clusters)
    if (delta := config.delta_net) is not None:
        values = delta.group * delta.value_dim
        sizes |= {
            "key_heads": delta.num_key_heads,
            "channels": delta.channels,
            "channels_gates": delta.channels + values,
            "betas_steps": 2 * delta.group,
            "mamba_inputs": delta.channels + values + delta.group,
            "taps": delta.num_taps,
            "value_group": delta.group,
            "value_dim": delta.value_dim,
            "values": values,
        }
    return sizes
