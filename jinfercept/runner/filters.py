"""The filters `min_p`, `top_k` and `top_p` as one lower bound on a row's logits, so that equal logits stay together.

The k-th largest logit of a row, and the logit at which the largest probabilities reach a sum, are found without sorting the
row: from its few hundred largest logits where they are enough and cheap to have, or by bisection over the bits of the float.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jinfercept.runner.logits_processors import SampleRows

NUM_BEST = 512
"""Largest logits of a row that `_by_best` sorts."""


def is_filtered(rows: SampleRows) -> Bool[Array, "R"]:
    """Whether a row has one of the three filters."""
    return (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)


def bounds(scaled: Float[Array, "R V"], rows: SampleRows) -> Float[Array, "R"]:
    """The smallest logit that a row keeps.

    First `min_p` of the largest probability, then the `top_k` largest of the rest, then the fewest of these whose share of
    their common probability reaches `top_p`. Logits that equal the last one kept are kept too.

    Args:
        scaled: logits divided by the temperature.
        rows: the filters.
    """
    return jax.lax.platform_dependent(scaled, rows, cpu=_by_best, default=_by_bisection)


def _by_best(scaled: Float[Array, "R V"], rows: SampleRows) -> Float[Array, "R"]:
    """From a row's `NUM_BEST` largest logits, or by bisection where they do not suffice."""
    pairs = jax.lax.top_k(scaled, min(NUM_BEST, scaled.shape[-1]))
    best, _ = jax.lax.optimization_barrier(pairs)  # or XLA sees that the indices are not used, and sorts everything
    last = jnp.clip(rows.top_k, 1, best.shape[-1]) - 1
    kth = jnp.take_along_axis(best, last[:, None], axis=1)[:, 0]
    floor = jnp.maximum(_min_p(best[:, 0], rows), jnp.where(rows.top_k > 0, kth, -jnp.inf))
    goal = rows.top_p * jnp.sum(_weights(scaled, best[:, 0], floor), axis=-1)
    sums = jnp.cumsum(_weights(best, best[:, 0], floor), axis=-1)
    reached = jnp.argmax(sums >= goal[:, None], axis=-1)
    enough = jnp.where(rows.top_p < 1, sums[:, -1] >= goal, True) & (rows.top_k <= best.shape[-1])
    at = jnp.take_along_axis(best, reached[:, None], axis=1)[:, 0]
    found = jnp.maximum(floor, jnp.where(rows.top_p < 1, at, -jnp.inf))
    otherwise = partial(_by_bisection, scaled, rows)
    return jax.lax.cond(jnp.all(enough), lambda: found, lambda: jnp.where(enough, found, otherwise()))


def _by_bisection(scaled: Float[Array, "R V"], rows: SampleRows) -> Float[Array, "R"]:
    keys, top = _keys(scaled), jnp.max(scaled, axis=-1)
    wanted = jnp.clip(rows.top_k, 1, scaled.shape[-1])
    kth = _largest(lambda key: jnp.sum(keys >= key[:, None], axis=-1) >= wanted, len(scaled))
    floor = jnp.maximum(_min_p(top, rows), jnp.where(rows.top_k > 0, kth, -jnp.inf))
    weights = _weights(scaled, top, floor)
    goal = rows.top_p * jnp.sum(weights, axis=-1)
    reached = _largest(lambda key: jnp.sum(jnp.where(keys >= key[:, None], weights, 0.0), axis=-1) >= goal, len(scaled))
    return jnp.maximum(floor, jnp.where(rows.top_p < 1, reached, -jnp.inf))


def _min_p(top: Float[Array, "R"], rows: SampleRows) -> Float[Array, "R"]:
    return top + jnp.log(rows.min_p)


def _weights(scaled: Float[Array, "R n"], top: Float[Array, "R"], floor: Float[Array, "R"]) -> Float[Array, "R n"]:
    """Probabilities, up to a factor of the row."""
    return jnp.where(scaled >= floor[:, None], jnp.exp(scaled - top[:, None]), 0.0)


def _keys(values: Float[Array, "R V"]) -> UInt32[Array, "R V"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[UInt32[Array, "R"]], Bool[Array, "R"]], num_rows: int) -> Float[Array, "R"]:
    """The largest float for whose key `holds` is true, by row; it is true for all smaller ones."""

    def bit(index: Int[Array, ""], key: UInt32[Array, "R"]) -> UInt32[Array, "R"]:
        larger = key | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(holds(larger), larger, key)

    key = jax.lax.fori_loop(0, 32, bit, jnp.zeros(num_rows, jnp.uint32))
    bits = jnp.where(key >> 31, key & jnp.uint32(0x7FFFFFFF), ~key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
