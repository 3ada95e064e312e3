"""A feed-forward network of experts: a router chooses a few for each token, and their weighted outputs are added.

No token is dropped, and a row's result does not depend on the others of its step. Pairs of a token and an expert are sorted by
expert. A CPU multiplies blocks of rows of one expert, one block after the other, and reads the experts in use only; elsewhere a
grouped product (`jax.lax.ragged_dot`) takes all. Devices have different experts, or different parts of them (`ExpertsConfig`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jinfercept.layouts.rows import gated
from jinfercept.models.config import ExpertsConfig
from jinfercept.models.parallel import AXIS, num_devices

MOST_BLOCK_ROWS = 64
"""Rows of one expert that a CPU multiplies at a time, at most: larger products do not run faster."""


class Choices(NamedTuple):
    """The experts of every token, the best first, and the factors of their outputs."""

    experts: Int[Array, "T C"]
    factors: Float32[Array, "T C"]


class _Pairs(NamedTuple):
    """Pairs of a token and one of this device's experts, sorted by expert; those of other devices' experts are the last.

    Attributes:
        order: numbers of the pairs, `token * choices + choice`.
        sizes: pairs of each expert.
    """

    order: Int[Array, "N"]
    sizes: Int[Array, "X"]


def choose(logits: Float32[Array, "T X"], config: ExpertsConfig) -> Choices:
    """The experts with the highest probabilities, which are the factors."""
    probabilities, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.per_token)
    if config.normalised:
        probabilities = probabilities / jnp.sum(probabilities, axis=-1, keepdims=True)
    return Choices(experts, probabilities)


def combined(
    x: Float[Array, "T E"],
    choices: Choices,
    gate_up: Float[Array, "X E 2 F"],
    down: Float[Array, "X F E"],
    config: ExpertsConfig,
) -> Float[Array, "T E"]:
    """The sum of the outputs of every token's experts, times their factors; of this device's experts or parts of experts."""
    experts = choices.experts[..., None] * config.parts + jnp.arange(config.parts, dtype=jnp.int32)[None, None]
    experts, num_experts = experts.reshape(len(x), -1), len(down)
    if num_devices() > 1:
        experts = experts - jax.lax.axis_index(AXIS) * num_experts
    is_here = (experts >= 0) & (experts < num_experts)
    flat = jnp.where(is_here, experts, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    pairs = _Pairs(order, jnp.bincount(flat, length=num_experts))
    rows = x[order // experts.shape[1]]
    mean_rows = max(1, choices.experts.size // config.num_experts)
    blocks = partial(_by_blocks, min(MOST_BLOCK_ROWS, 1 << (mean_rows - 1).bit_length()))
    y = jax.lax.platform_dependent(rows, pairs, gate_up, down, cpu=blocks, default=_grouped)
    by_choice = y[jnp.argsort(order)].reshape(*experts.shape, -1).astype(jnp.float32)
    factors = jnp.repeat(choices.factors, config.parts, axis=1)
    wide = jnp.where(is_here[..., None], by_choice * factors[..., None], 0.0)  # elsewhere rows may be anything
    return jnp.sum(wide, axis=1).astype(x.dtype)


def _grouped(
    rows: Float[Array, "N E"], pairs: _Pairs, gate_up: Float[Array, "X E 2 F"], down: Float[Array, "X F E"]
) -> Float[Array, "N E"]:
    """The experts' outputs by grouped products."""
    product = partial(jax.lax.ragged_dot, group_sizes=pairs.sizes, precision=_precision(rows))
    return product(_gated(product(rows, _joined(gate_up))), down)


def _by_blocks(
    block_rows: int,
    rows: Float[Array, "N E"],
    pairs: _Pairs,
    gate_up: Float[Array, "X E 2 F"],
    down: Float[Array, "X F E"],
) -> Float[Array, "N E"]:
    """The experts' outputs block by block.

    A block of an expert's last rows reaches into the next expert's, and those are written again by the blocks after it.
    """
    ends = jnp.cumsum(pairs.sizes)
    num_blocks = -(-pairs.sizes // block_rows)
    last_blocks = jnp.cumsum(num_blocks)
    padded, weights = jnp.pad(rows, ((0, block_rows), (0, 0))), (_joined(gate_up), down)

    def multiply(block: Int[Array, ""], y: Float[Array, "M E"]) -> Float[Array, "M E"]:
        expert = jnp.searchsorted(last_blocks, block, side="right")
        place = block - last_blocks[expert] + num_blocks[expert]
        start = ends[expert] - pairs.sizes[expert] + place * block_rows
        part = jax.lax.dynamic_slice_in_dim(padded, start, block_rows)
        product = partial(jnp.dot, precision=_precision(rows))
        first, second = (jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False) for weight in weights)
        return jax.lax.dynamic_update_slice_in_dim(y, product(_gated(product(part, first)), second), start, axis=0)

    return jax.lax.fori_loop(0, last_blocks[-1], multiply, jnp.zeros_like(padded))[: len(rows)]


def _joined(gate_up: Float[Array, "X E 2 F"]) -> Float[Array, "X E F2"]:
    return gate_up.reshape(*gate_up.shape[:2], -1)


def _gated(rows: Float[Array, "N F2"]) -> Float[Array, "N F"]:
    """Gated rows, of those that have the gates in their first half."""
    gate, up = jnp.split(rows, 2, axis=1)
    return gated(gate, up, "silu")


def _precision(rows: Float[Array, "N E"]) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
