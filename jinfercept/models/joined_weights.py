"""Weights that multiply the same rows, joined into one array, so that a layer has one product instead of two or three.

They are joined when they are loaded: checkpoints, converted models and weights given in memory have them apart. So have models
on a CPU without kernels (`model.joins`). Experts have gates and ups in one stack, but on TPUs (`model.parts_experts`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Shaped

from jinfercept.models.blocks import separate_heads
from jinfercept.models.mesh import ModelMesh, mesh_of
from jinfercept.models.model import EXPERT_SIDES, joins, parts_experts
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.quantized import QuantizedTensor, is_quantized
from jinfercept.models.sharding import partition_spec
from jinfercept.pallas.layouts.packed_weights import ExpertSides

# The query heads of a KV head, its key and its value lie side by side, a gate beside its up: so devices can cut the
# axis of the KV heads, and the last axis.
JOINED = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")}
"""Names of joined weights of attention, and those of their parts."""
SIDES = {"gate_up": ("gate", "up"), "gate_up_bias": ("gate_bias", "up_bias")}
"""Names of joined weights of a gated feed-forward network, and those of their parts."""


def serve(params: Params) -> Params:
    """Join weights, or take them apart, as a model on JAX's default backend computes with them."""
    return params._replace(layers=tuple(map(serve_layer, params.layers)))


def serve_layer(layer: Weights) -> Weights:
    """Join one layer's weights, or take them apart, as a model on JAX's default backend computes with them."""
    return join_layer(layer) if joins() and joinable(layer) else separate_layer(layer)


def joinable(layer: Weights) -> bool:
    """Whether a layer's weights can be joined: those of one product are arrays, or quantised alike."""

    def alike(*names: str) -> bool:
        weights = [layer[name] for name in names if name in layer]
        return len({weight.packing if is_quantized(weight) else None for weight in weights}) < 2

    return alike(*JOINED["qkv"]) and alike("gate", "up")


def separate(params: Params) -> Params:
    """Take apart the weights that are joined."""
    return params._replace(layers=tuple(map(separate_layer, params.layers)))


def join_layer(layer: Weights) -> Weights:
    """Join one layer's weights, on the device where they are. The first call compiles, later ones of the same shapes do not.

    q `[..., H, D]`, k and v `[..., K, D]` become qkv `[..., K, H / K + 2, D]`; gate and up `[E, F]` become gate_up `[2, E, F]`.
    Where experts have sides apart, their stack becomes `ExpertSides`.
    """
    if is_joined(layer) or (
        not {JOINED["qkv"][0], SIDES["gate_up"][0]} & layer.keys() and not _parts_experts_of(layer)
    ):
        return layer
    if isinstance(leaf := jax.tree.leaves(layer)[0], Tracer):
        return _join(layer)
    mesh = mesh_of(leaf)
    if mesh.size > 1:
        return _joining(mesh)(layer)
    return _join_layer(jax.device_put(layer, mesh.devices[0]))  # committed or not, there is one executable


def _join(layer: Weights) -> Weights:
    joined = dict(layer)
    for name, parts in JOINED.items():
        if layer.keys() >= set(parts):  # some layers have no values, or read another's keys
            joined[name] = _join_heads(*(joined.pop(part) for part in parts))
    for name, (gate, up) in SIDES.items():
        if gate in layer:
            sides = joined.pop(gate), joined.pop(up)
            joined[name] = jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=0), *sides)
    if _parts_experts_of(layer):
        joined[EXPERT_SIDES] = ExpertSides.of(joined[EXPERT_SIDES])
    return joined


def _parts_experts_of(layer: Weights) -> bool:
    return parts_experts() and not isinstance(layer.get(EXPERT_SIDES), QuantizedTensor | ExpertSides | None)


_join_layer = jax.jit(_join)


@cache
def _joining(mesh: ModelMesh) -> Callable[[Weights], Weights]:
    def join(layer: Weights) -> Weights:
        apart, joined = (
            {name: partition_spec(name, weight) for name, weight in weights.items()}
            for weights in (layer, jax.eval_shape(_join, layer))
        )
        return mesh.on_parts(_join, (apart,), joined)(layer)

    return jax.jit(join)


def is_joined(layer: Weights) -> bool:
    """Whether a layer's weights are joined."""
    return "qkv" in layer or "gate_up" in layer or isinstance(layer.get(EXPERT_SIDES), ExpertSides)


def separate_layer(layer: Weights) -> Weights:
    """The inverse of `join_layer`."""
    return _separate_layer(layer) if is_joined(layer) else layer


@jax.jit
def _separate_layer(layer: Weights) -> Weights:
    separate = dict(layer)
    for name, parts in JOINED.items():
        if name in layer:
            separate |= zip(parts, _separate_heads(separate.pop(name)), strict=True)
    for name, parts in SIDES.items():
        if name in layer:
            both = separate.pop(name)
            separate |= zip(parts, both.split() if isinstance(both, QuantizedTensor) else both, strict=True)
    if isinstance(sides := layer.get(EXPERT_SIDES), ExpertSides):
        separate[EXPERT_SIDES] = sides.joined()
    return separate


def _join_heads(q: Any, k: Any, v: Any) -> Any:
    if isinstance(q, QuantizedTensor):
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        return q.with_columns(_heads_joined, k, v, outputs=(num_heads // num_kv_heads + 2, *q.outputs))
    return _heads_joined(q, k, v)


def _separate_heads(qkv: Any) -> tuple[Any, Any, Any]:
    if not isinstance(qkv, QuantizedTensor):
        return separate_heads(qkv)
    q, k, v = (
        qkv.with_columns(lambda columns, part=part: separate_heads(columns)[part], outputs=qkv.outputs[1:])
        for part in range(3)
    )
    return q, k, v


def _heads_joined(
    q: Shaped[Array, "*rows H D"], k: Shaped[Array, "*rows K D"], v: Shaped[Array, "*rows K D"]
) -> Shaped[Array, "*rows K G2 D"]:
    *rows, num_kv_heads, head_dim = k.shape
    return jnp.concatenate([q.reshape(*rows, num_kv_heads, -1, head_dim), k[..., None, :], v[..., None, :]], axis=-2)
