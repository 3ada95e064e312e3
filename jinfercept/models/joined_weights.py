"""Weights that multiply the same rows, joined into one array, so that a layer has one product instead of two or three.

Checkpoints, converted models and weights given in memory have them apart: `q`, `k`, `v`, and `gate`, `up`. They are joined when
they are loaded. The query heads of a KV head, its key and its value lie side by side, and a gate beside its up: the axis of the
KV heads and the last axis can be cut among devices.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from jinfercept.models.blocks import separate_heads
from jinfercept.models.config import ModelConfig
from jinfercept.models.model import abstract_params
from jinfercept.models.protocol import Params, Weights

JOINED = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")}
"""Names of joined weights of attention, and those of their parts."""


def abstract_separate_params(config: ModelConfig, dtype: DTypeLike) -> Params:
    """The shapes and dtypes of the weights as checkpoints have them; `abstract_params` has them as models compute with them."""
    joined = abstract_params(config, dtype)
    return joined._replace(layers=(jax.eval_shape(separate_layer, joined.layers[0]),) * config.num_layers)


def join(params: Params) -> Params:
    """The weights as a model computes with them, of those that are apart."""
    return params._replace(layers=tuple(map(join_layer, params.layers)))


def separate(params: Params) -> Params:
    """The weights apart, of those that are joined."""
    return params._replace(layers=tuple(map(separate_layer, params.layers)))


def join_layer(layer: Weights) -> Weights:
    """One layer's weights, joined, on the device where they are. The first call compiles, later ones of the same shapes do not.

    Args:
        layer: q `[..., H, D]`, k and v `[..., K, D]` become qkv `[..., K, H / K + 2, D]`; gate and up `[E, F]` become
            gate_up `[2, E, F]`; the others stay,
            and weights that are joined already.
    """
    home = next(iter(jax.tree.leaves(layer)[0].devices()))
    return _join_layer(jax.device_put(layer, home))  # committed or not, there is one executable


@jax.jit
def _join_layer(layer: Weights) -> Weights:
    joined = dict(layer)
    for name, parts in JOINED.items():
        if parts[0] in layer:
            joined[name] = _join_heads(*(joined.pop(part) for part in parts))
    if "gate" in layer:
        joined["gate_up"] = jnp.stack([joined.pop("gate"), joined.pop("up")], axis=0)
    return joined


@jax.jit
def separate_layer(layer: Weights) -> Weights:
    """The inverse of `join_layer`."""
    separate = dict(layer)
    for name, parts in JOINED.items():
        if name in layer:
            separate |= zip(parts, separate_heads(separate.pop(name)), strict=True)
    if "gate_up" in layer:
        both = separate.pop("gate_up")
        separate |= {"gate": both[0], "up": both[1]}
    return separate


def _join_heads(
    q: Shaped[Array, "*rows H D"], k: Shaped[Array, "*rows K D"], v: Shaped[Array, "*rows K D"]
) -> Shaped[Array, "*rows K G2 D"]:
    *rows, num_kv_heads, head_dim = k.shape
    return jnp.concatenate([q.reshape(*rows, num_kv_heads, -1, head_dim), k[..., None, :], v[..., None, :]], axis=-2)
