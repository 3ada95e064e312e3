"""A feed-forward network of experts: a router chooses a few for each token, and their weighted outputs are added.

No token is dropped, and a row's result does not depend on the others of its step. Pairs of a token and an expert are sorted by
expert. Devices have different experts, or different parts of them (`ExpertsConfig`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from jinfercept.cpu_kernels import native
from jinfercept.models.config import ExpertsConfig
from jinfercept.models.parallel import AXIS, num_devices
from jinfercept.models.quantized import QuantizedTensor, is_quantized
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.layouts.packed_weights import ExpertSides, Packed
from jinfercept.pallas.layouts.rows import gated, precision
from jinfercept.pallas.tpu_kernels import tpu_grouped_product

MOST_BLOCK_ROWS = 64
"""Rows of one expert that a CPU multiplies at a time, at most: larger products do not run faster."""


class Choices(NamedTuple):
    """The experts of every token, the best first, and the factors of their outputs."""

    experts: Int[Array, "T C"]
    factors: Float32[Array, "T C"]


class ExpertWeights(NamedTuple):
    """Stacked weights of a device's experts or parts of experts, and biases in models that have some."""

    gate_up: Any  # [X, E, 2, F], or [X, E, F] of experts without gates: an array, quantised, or sides apart
    down: Any  # [X, F, E], as well
    gate_up_bias: Any = None  # [X, 2, F]
    down_bias: Any = None  # [X, E]


class _Pairs(NamedTuple):
    """Pairs of a token and one of this device's experts, sorted by expert; those of other devices' experts are the last."""

    order: Int[Array, "N"]  # numbers of the pairs: token * choices + choice
    experts: Int[Array, "N"]  # beyond the last expert for pairs of other devices
    sizes: Int[Array, "X"]  # pairs of each expert


def choose(
    logits: Float32[Array, "T X"], config: ExpertsConfig, correction: Float32[Array, "X"] | None = None
) -> Choices:
    """The experts with the highest scores, which are the factors. `correction` is added to the scores to choose, not in
    a factor."""
    if correction is None:
        factors, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.per_token)
    else:
        scores = jax.nn.sigmoid(logits)
        _, experts = jax.lax.top_k(scores + correction[None], config.per_token)
        factors = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalised:
        factors = factors / jnp.sum(factors, axis=-1, keepdims=True)
    return Choices(experts, factors if config.scale is None else factors * config.scale)


def combined(
    x: Float[Array, "T E"], choices: Choices, weights: ExpertWeights, config: ExpertsConfig
) -> Float[Array, "T E"]:
    """The sum of the outputs of every token's experts, times their factors, as far as this device has them."""
    experts = choices.experts[..., None] * config.parts + jnp.arange(config.parts, dtype=jnp.int32)[None, None]
    experts, num_experts = experts.reshape(len(x), -1), len(weights.down)
    if num_devices() > 1:
        experts = experts - jax.lax.axis_index(AXIS) * num_experts
    is_here = (experts >= 0) & (experts < num_experts)
    flat = jnp.where(is_here, experts, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    pairs = _Pairs(order, flat[order], jnp.bincount(flat, length=num_experts))
    mean_rows = max(1, choices.experts.size // config.num_experts)
    by_choice = _of_choices(x, pairs, weights, config, mean_rows).reshape(*experts.shape, -1).astype(jnp.float32)
    factors = jnp.repeat(choices.factors, config.parts, axis=1)
    wide = jnp.where(is_here[..., None], by_choice * factors[..., None], 0.0)  # elsewhere rows may be anything
    return jnp.sum(wide, axis=1).astype(x.dtype)


def _of_choices(
    x: Float[Array, "T E"], pairs: _Pairs, weights: ExpertWeights, config: ExpertsConfig, mean_rows: int
) -> Float[Array, "N E"]:
    """The experts' outputs, for the pairs in the order of their numbers; `mean_rows` of each expert."""

    def sorted_rows(x: Float[Array, "T E"], pairs: _Pairs, weights: ExpertWeights) -> Float[Array, "N E"]:
        rows = x[pairs.order // (len(pairs.order) // len(x))]
        return _of_pairs(rows, pairs, weights, config, mean_rows)[jnp.argsort(pairs.order)]

    if not _has_cpu_kernel(x, weights):
        return sorted_rows(x, pairs, weights)
    by_kernel = partial(_by_cpu_kernel, config)
    return jax.lax.platform_dependent(x, pairs, weights, cpu=by_kernel, default=sorted_rows)


def _has_cpu_kernel(x: Float[Array, "T E"], weights: ExpertWeights) -> bool:
    stacks = (weights.gate_up, weights.down)
    if not native.usable() or num_devices() > 1 or not all(isinstance(stack, jax.Array) for stack in stacks):
        return False
    from jinfercept.cpu_kernels.products import supports_grouped

    return all(supports_grouped(_matrices(stack).shape, x.dtype, stack.dtype) for stack in stacks)


def _by_cpu_kernel(
    config: ExpertsConfig, x: Float[Array, "T E"], pairs: _Pairs, weights: ExpertWeights
) -> Float[Array, "N E"]:
    from jinfercept.cpu_kernels.products import grouped_product

    order, places = pairs.order, jnp.arange(len(pairs.order))
    sources = order // (len(order) // len(x))
    # no row is copied: a product reads the rows of tokens, or writes those of choices
    inner = grouped_product(x, _matrices(weights.gate_up), pairs.sizes, sources, places)
    if weights.gate_up_bias is not None:
        inner = inner + _joined(weights.gate_up_bias)[pairs.experts]
    output = grouped_product(_gated(inner, config), weights.down, pairs.sizes, places, order)
    if weights.down_bias is None:
        return output
    return output + weights.down_bias[jnp.zeros_like(pairs.experts).at[order].set(pairs.experts)]


def _of_pairs(
    rows: Float[Array, "N E"], pairs: _Pairs, weights: ExpertWeights, config: ExpertsConfig, mean_rows: int
) -> Float[Array, "N E"]:
    """The experts' outputs, for rows in the order of the pairs; `mean_rows` of each expert."""
    stacks = (weights.gate_up, weights.down)
    # Kernels multiply tiles of an expert's rows: of a CPU (`cpu_kernels/products.py`), of a GPU (`triton_grouped.py`), and
    # jax's on a TPU (`tpu_kernels.py`). A CPU without its own multiplies blocks of rows, one after the other. All read
    # the experts in use only. Elsewhere, and in float32 on a GPU, `jax.lax.ragged_dot` takes all experts; on a GPU, jax
    # 0.11 turns it into products of all rows with all experts. Quantised weights are multiplied by blocks there, too.
    stored = {stack.values.dtype if isinstance(stack, QuantizedTensor) else stack.dtype for stack in stacks}
    if (kernel := gpu_kernels.grouped_product(len(rows), pairs.sizes, rows.dtype, stored)) is not None:
        return _grouped(config, kernel, rows, pairs, weights)
    if not any(map(is_quantized, stacks)):
        shapes = [stack.shape for stack in jax.tree.leaves(jax.tree.map(_matrices, stacks))]
        if (kernel := tpu_grouped_product(pairs.sizes, rows.dtype, shapes)) is not None:
            return _grouped(config, kernel, rows, pairs, weights)
    if isinstance(weights.gate_up, ExpertSides):
        return _grouped(config, None, rows, pairs, weights)
    blocks = partial(_by_blocks, config, min(MOST_BLOCK_ROWS, 1 << (mean_rows - 1).bit_length()))
    if any(map(is_quantized, stacks)):
        return blocks(rows, pairs, weights)
    grouped = partial(_grouped, config, None)
    return jax.lax.platform_dependent(rows, pairs, weights, cpu=blocks, default=grouped)


def _grouped(
    config: ExpertsConfig,
    kernel: Callable[..., Float[Array, "N C"]] | None,
    rows: Float[Array, "N E"],
    pairs: _Pairs,
    weights: ExpertWeights,
) -> Float[Array, "N E"]:
    by_xla: Any = partial(jax.lax.ragged_dot, group_sizes=pairs.sizes, precision=precision(rows.dtype))
    product = kernel or by_xla  # XLA's weights are not quantised
    if isinstance(sides := weights.gate_up, ExpertSides):
        inner = jnp.concatenate([product(rows, sides.gates), product(rows, sides.ups)], axis=1)
    else:
        inner = product(rows, _stacked(sides))
    if weights.gate_up_bias is not None:
        inner = inner + _joined(weights.gate_up_bias)[pairs.experts]
    output = product(_gated(inner, config), _stacked(weights.down))
    return output if weights.down_bias is None else output + weights.down_bias[pairs.experts]


def _stacked(stack: Float[Array, "X ..."] | QuantizedTensor) -> Float[Array, "X A B"] | Packed:
    if isinstance(stack, QuantizedTensor):
        return stack.packed
    return _matrices(stack)


def _matrices(stack: Float[Array, "X ..."]) -> Float[Array, "X A B"]:
    return _joined(stack) if stack.ndim > 3 else stack


def _by_blocks(
    config: ExpertsConfig, block_rows: int, rows: Float[Array, "N E"], pairs: _Pairs, weights: ExpertWeights
) -> Float[Array, "N E"]:
    ends = jnp.cumsum(pairs.sizes)
    num_blocks = -(-pairs.sizes // block_rows)
    last_blocks = jnp.cumsum(num_blocks)
    padded = jnp.pad(rows, ((0, block_rows), (0, 0)))
    gate_up_bias = None if weights.gate_up_bias is None else _joined(weights.gate_up_bias)
    gate_up = weights.gate_up if is_quantized(weights.gate_up) else _matrices(weights.gate_up)
    stacks = ExpertWeights(gate_up, weights.down, gate_up_bias, weights.down_bias)

    def multiply(block: Int[Array, ""], y: Float[Array, "M E"]) -> Float[Array, "M E"]:
        expert = jnp.searchsorted(last_blocks, block, side="right")
        place = block - last_blocks[expert] + num_blocks[expert]
        start = ends[expert] - pairs.sizes[expert] + place * block_rows
        own = ExpertWeights(*(None if stack is None else _at(stack, expert) for stack in stacks))
        part = jax.lax.dynamic_slice_in_dim(padded, start, block_rows)
        inner = _biased_product(part, own.gate_up, own.gate_up_bias)
        output = _biased_product(_gated(inner, config), own.down, own.down_bias)
        # A block of an expert's last rows reaches into the next expert's rows, which the blocks after it write again.
        return jax.lax.dynamic_update_slice_in_dim(y, output, start, axis=0)

    return jax.lax.fori_loop(0, last_blocks[-1], multiply, jnp.zeros_like(padded))[: len(rows)]


def _biased_product(
    rows: Float[Array, "N A"], matrix: Float[Array, "A B"] | QuantizedTensor, bias: Float[Array, "B"] | None
) -> Float[Array, "N B"]:
    if isinstance(matrix, QuantizedTensor):
        y = matrix.product(rows).reshape(len(rows), -1)
    else:
        y = jnp.dot(rows, matrix, precision=precision(rows.dtype))
    return y if bias is None else y + bias[None]


def _at(stack: Shaped[Array, "X ..."] | QuantizedTensor, index: Int[Array, ""]) -> Any:
    if isinstance(stack, QuantizedTensor):
        return stack.at(index)
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _joined(sides: Float[Array, "*axes 2 F"]) -> Float[Array, "*axes F2"]:
    return sides.reshape(*sides.shape[:-2], -1)


def _gated(rows: Float[Array, "N F2"], config: ExpertsConfig) -> Float[Array, "N F"]:
    # gates, where experts have some, are the first half of a row
    sides = jnp.split(rows, 1 if config.activation == "relu2" else 2, axis=1)
    if config.swiglu is None:
        return gated(*sides, activation=config.activation)
    gate, up = sides
    limit, factor = config.swiglu
    gate, up = jnp.minimum(gate.astype(jnp.float32), limit), jnp.clip(up.astype(jnp.float32), -limit, limit)
    return ((up + 1) * gate * jax.nn.sigmoid(factor * gate)).astype(rows.dtype)
