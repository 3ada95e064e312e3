"""A low-rank adapter (LoRA, arXiv 2106.09685) of a model's projections: its weights, the model with it, and its files."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors.numpy import load_file, save_file

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
    """What is added to a weight of every layer: `a @ b`, times the adapter's scale.

    Attributes:
        a: `[L, inputs, r]`.
        b: `[L, r, outputs]`, zeros at first.
    """

    a: Float[Array, "L inputs r"]
    b: Float[Array, "L r outputs"]


type Adapter = dict[str, LowRank]
"""By weight."""


def first_adapter(config: ModelConfig, rank: int, seed: int) -> Adapter:
    """An adapter that changes nothing yet."""
    keys = iter(jax.random.split(jax.random.key(seed), len(_SHAPES)))

    def low_rank(inputs: int, outputs: int) -> LowRank:
        bound = inputs**-0.5
        a = jax.random.uniform(next(keys), (config.num_layers, inputs, rank), jnp.float32, -bound, bound)
        return LowRank(a, jnp.zeros((config.num_layers, rank, outputs)))

    return {name: low_rank(*widths) for name, widths in _widths(config).items()}


def adapted(params: Params, adapter: Adapter, scale: float) -> Params:
    """The weights with an adapter merged into them; they are apart, see `joined_weights.separate`."""

    def merged(index: int, weights: dict[str, Any]) -> dict[str, Any]:
        added = {
            name: weights[name] + scale * (part.a[index] @ part.b[index]).reshape(weights[name].shape)
            for name, part in adapter.items()
        }
        return weights | added

    return params._replace(layers=tuple(merged(index, layer) for index, layer in enumerate(params.layers)))


def save(directory: Path, adapter: Adapter, scale: float, base: str) -> None:
    """Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`, in float16."""
    directory.mkdir(parents=True, exist_ok=True)
    rank = adapter["q"].a.shape[-1]
    tensors = {}
    for name, part in adapter.items():
        for index in range(len(part.a)):
            prefix = f"base_model.model.model.layers.{index}.{_SHAPES[name][0]}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(np.asarray(part.a[index], np.float16).T)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(np.asarray(part.b[index], np.float16).T)
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


def read(directory: Path) -> tuple[Adapter, float]:
    """An adapter that `save` wrote, and its scale."""
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "adapter_model.safetensors")

    def stacked(module: str, side: str) -> Array:
        prefix, count = "base_model.model.model.layers", len(tensors) // (2 * len(_SHAPES))
        parts = [tensors[f"{prefix}.{index}.{module}.lora_{side}.weight"].T for index in range(count)]
        return jnp.asarray(np.stack(parts), jnp.float32)

    adapter = {name: LowRank(stacked(module, "A"), stacked(module, "B")) for name, (module, _) in _SHAPES.items()}
    return adapter, config["lora_alpha"] / config["r"]


def _widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every weight."""
    e, f, d = config.hidden_size, config.ffn_size, config.head_dim
    heads, kv_heads = config.num_heads * d, config.num_kv_heads * d
    return {
        "q": (e, heads),
        "k": (e, kv_heads),
        "v": (e, kv_heads),
        "o": (heads, e),
        "gate": (e, f),
        "up": (e, f),
        "down": (f, e),
    }
