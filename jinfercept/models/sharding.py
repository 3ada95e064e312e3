"""How weights are cut among devices: which of their axes the axis of the mesh cuts.

Queries, keys and values are cut by head, the feed-forward by its inner axis or by expert, embedding and head by vocabulary. A
layer adds partial sums twice (a parallel block once), and the squares of a norm over all heads; nothing else is exchanged. What
does not divide evenly is made to: KV heads are repeated until every device has as many, experts are cut into parts
(`serving_config`), and the vocabulary is padded with zeros.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import starmap
from math import gcd, lcm
from operator import mod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Shaped

from jinfercept.errors import ConfigError
from jinfercept.models.config import ExpertsConfig, ModelConfig
from jinfercept.models.parallel import AXIS
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.quantized import QuantizedTensor
from jinfercept.models.weight_axes import WEIGHT_AXES
from jinfercept.pallas.layouts.packed_weights import ExpertSides

_CUT = ("vocab", "heads", "query_heads", "kv_heads", "key_heads", "ffn", "shared_ffn", "experts")
MESH_AXES: Mapping[str, str] = dict.fromkeys(_CUT, AXIS)
"""The mesh axis that cuts an axis of the weights; no other axis is cut."""


def partition_spec(name: str, weight: Any = None) -> PartitionSpec:
    """How a weight of this name is cut. Give the weight if it may be a `QuantizedTensor`, whose arrays are all cut alike, by
    outputs or by inputs, or those of experts by expert, or `ExpertSides`, which are cut by expert."""
    if isinstance(weight, QuantizedTensor):
        axis, stacked = cut_axis(name), weight.values.ndim - 3
        if axis is None:
            return PartitionSpec()
        if axis < stacked:
            return PartitionSpec(AXIS)
        num_inputs = 1 + len(weight.inputs)
        by_output = axis == 0 if weight.outputs_first else axis - stacked >= num_inputs
        return PartitionSpec(*(None,) * stacked, *((AXIS,) if by_output else (None, AXIS)))
    axes = mesh_axes(name)
    if AXIS not in axes:
        return PartitionSpec()
    return PartitionSpec(axes[0]) if isinstance(weight, ExpertSides) else PartitionSpec(*axes)


def mesh_axes(name: str) -> list[str | None]:
    """The axis of the mesh that cuts each axis of a weight; None: it is not cut."""
    return [MESH_AXES.get(axis) for axis in WEIGHT_AXES.get(name, ())]


def partition_specs(params: Params) -> Params:
    """How the weights of a family are cut, by their names."""

    def block(weights: Weights) -> Weights:
        return {name: partition_spec(name, weight) for name, weight in weights.items()}

    return Params(block(params.embed), tuple(map(block, params.layers)), block(params.head))


def cut_axis(name: str) -> int | None:
    """The axis of a weight that is cut; None if every device has all of it."""
    axes = mesh_axes(name)
    return axes.index(AXIS) if AXIS in axes else None


def serving_config(config: ModelConfig, num_devices: int) -> ModelConfig:
    """Repeat KV heads, and cut experts into parts, so that the devices have as many each. Raises `ConfigError` if the model
    cannot be cut into so many parts."""
    for part, size, divisor in (
        ("query heads", config.num_heads, num_devices),
        *(("feed-forward columns", *columns) for columns in _columns(config, num_devices)),
        *(("key heads of recurrent layers", *heads) for heads in _key_heads(config, num_devices)),
    ):
        if size % divisor:
            raise ConfigError(
                f"the {part} do not divide evenly among the devices",
                got=f"{size} and tensor_parallel_size={num_devices}",
                fix=f"tensor_parallel_size of {_divisors(config)}",
            )
    for num_kv_heads in _kv_heads(config, num_devices):
        if config.num_heads % num_kv_heads:
            raise ConfigError(
                "query heads do not divide evenly among repeated KV heads",
                got=f"{config.num_heads} and {num_kv_heads} for tensor_parallel_size={num_devices}",
                fix=f"tensor_parallel_size of {_divisors(config)}",
            )
    kinds = tuple(
        kind._replace(num_kv_heads=kind.num_kv_heads and lcm(kind.num_kv_heads, num_devices)) for kind in config.kinds
    )
    if (experts := config.experts) is not None:
        experts = replace(experts, parts=_expert_parts(experts, num_devices))
    return replace(config, num_kv_heads=lcm(config.num_kv_heads, num_devices), kinds=kinds, experts=experts)


def _kv_heads(config: ModelConfig, num_devices: int) -> list[int]:
    heads = {config.num_kv_heads, *(kind.num_kv_heads for kind in config.kinds if kind.num_kv_heads)}
    return [lcm(number, num_devices) for number in heads]


def _columns(config: ModelConfig, num_devices: int) -> list[tuple[int, int]]:
    """Columns of the feed-forward network and of an expert, and the numbers of parts into which they are cut."""
    columns = list[tuple[int, int]]()
    if config.experts is not None:
        columns.append((config.experts.ffn_size, _expert_parts(config.experts, num_devices)))
        columns.append((config.experts.shared_ffn_size, num_devices))
    if config.experts is None or any(kind.is_dense for kind in config.kinds):
        columns.append((config.ffn_size, num_devices))
    return columns


def _key_heads(config: ModelConfig, num_devices: int) -> list[tuple[int, int]]:
    return [] if config.delta_net is None else [(config.delta_net.num_key_heads, num_devices)]


def _expert_parts(experts: ExpertsConfig, num_devices: int) -> int:
    return num_devices // gcd(experts.num_experts, num_devices)  # the least that gives all devices as many


def padded_vocabulary(vocab_size: int, num_devices: int) -> int:
    """Rows of the embedding, padded so that all devices have as many."""
    return -(-vocab_size // num_devices) * num_devices


def fit[X: (Shaped[np.ndarray, "..."], jax.Array)](name: str, weight: X, shape: tuple[int, ...]) -> X:
    """Bring a checkpoint's unjoined weight into the shape that devices cut: KV heads repeated, experts in parts, the vocabulary
    padded with zeros."""
    arrays: Any = np if isinstance(weight, np.ndarray) else jnp
    if name.startswith("experts_") and weight.shape != shape:
        num_parts = shape[0] // len(weight)
        parts = [arrays.stack(expert_parts(name, expert, num_parts)) for expert in weight]
        return arrays.concatenate(parts)
    for axis, (axis_name, size, target) in enumerate(zip(WEIGHT_AXES.get(name, ()), weight.shape, shape, strict=False)):
        if axis_name == "kv_heads" and size != target:
            weight = arrays.repeat(weight, target // size, axis=axis)
        elif axis_name == "vocab" and size != target:
            weight = arrays.pad(weight, [(0, target - size), *((0, 0),) * (weight.ndim - 1)])
    return weight


def expert_parts[X: (Shaped[np.ndarray, "..."], jax.Array)](name: str, weight: X, count: int) -> list[X]:
    """The parts of one expert's weight, of which a bias of outputs is in the first alone."""
    arrays: Any = np if isinstance(weight, np.ndarray) else jnp
    axes = WEIGHT_AXES[name][1:]
    if "expert_ffn" not in axes:
        return [weight, *(arrays.zeros_like(weight),) * (count - 1)]
    return arrays.split(weight, count, axis=axes.index("expert_ffn"))


def _divisors(config: ModelConfig) -> str:
    counts = range(1, config.num_heads + 1)
    fitting = [
        n
        for n in counts
        if not any(config.num_heads % heads for heads in _kv_heads(config, n))
        and not any(starmap(mod, (*_columns(config, n), *_key_heads(config, n))))
    ]
    return ", ".join(map(str, fitting))
