"""A low-rank adapter (LoRA, arXiv 2106.09685) of a model's projections: its weights, the model with it, and its files."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors.numpy import save_file

from jinfercept.models.config import ModelConfig
from jinfercept.models.protocol import Params

_SHAPES = {
    "q": ("self_attn.q_proj", 1),
    "k": ("self_attn.k_proj", 1),
    "v": ("self_attn.v_proj", 1),
    "o": ("self_attn.o_proj", 2),
    "gate": ("mlp.gate_proj", 1),
    "up": ("mlp.up_proj", 1),
    "down": ("mlp.down_proj", 1),
}
"""By weight of a Llama's layer its name in checkpoints, and how many of its axes are inputs."""


class LowRank(NamedTuple):
    """What is added to a weight: `a @ b`, times the adapter's scale.

    Attributes:
        a: `[inputs, r]`.
        b: `[r, outputs]`, zeros at first.
    """

    a: Float[Array, "inputs r"]
    b: Float[Array, "r outputs"]


type Adapter = tuple[dict[str, LowRank], ...]
"""By layer and weight."""


def first_adapter(params: Params, rank: int, seed: int) -> Adapter:
    """An adapter that changes nothing yet, of weights that lie apart."""
    keys = iter(jax.random.split(jax.random.key(seed), len(params.layers) * len(_SHAPES)))

    def low_rank(weight: Array, num_inputs: int) -> LowRank:
        inputs = int(np.prod(weight.shape[:num_inputs]))
        bound = inputs**-0.5
        a = jax.random.uniform(next(keys), (inputs, rank), jnp.float32, -bound, bound)
        return LowRank(a, jnp.zeros((rank, weight.size // inputs)))

    return tuple(
        {name: low_rank(layer[name], num_inputs) for name, (_, num_inputs) in _SHAPES.items()}
        for layer in params.layers
    )


def adapted(params: Params, adapter: Adapter, scale: float) -> Params:
    """The weights with an adapter merged into them."""

    def layer(weights: dict[str, Any], parts: dict[str, LowRank]) -> dict[str, Any]:
        added = {
            name: weights[name] + scale * (part.a @ part.b).reshape(weights[name].shape) for name, part in parts.items()
        }
        return weights | added

    return params._replace(layers=tuple(map(layer, params.layers, adapter)))


def save(directory: Path, adapter: Adapter, scale: float, base: str) -> None:
    """Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`, in float16."""
    directory.mkdir(parents=True, exist_ok=True)
    rank = adapter[0]["q"].a.shape[1]
    tensors = {}
    for index, layer in enumerate(adapter):
        for name, part in layer.items():
            prefix = f"base_model.model.model.layers.{index}.{_SHAPES[name][0]}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(np.asarray(part.a, np.float16).T)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(np.asarray(part.b, np.float16).T)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.split(".")[1] for name, _ in _SHAPES.values()),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def num_bytes(config: ModelConfig, rank: int) -> int:
    """Bytes of an adapter's weights in float16."""
    e, f, h, k, d = config.hidden_size, config.ffn_size, config.num_heads, config.num_kv_heads, config.head_dim
    widths = 2 * (e + h * d) + 2 * (e + k * d) + 3 * (e + f)
    return 2 * rank * config.num_layers * widths
