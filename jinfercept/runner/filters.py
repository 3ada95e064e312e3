"""The filters `min_p`, `top_k` and `top_p` as one lower bound on a row's logits, so that equal logits stay together.

The k-th largest logit of a row, and the logit at which the largest probabilities reach a sum, are found without sorting the
row: from its few hundred largest logits where they are enough and cheap to have (on a CPU), or by a search over the bits of the
float. On a GPU a pass over the logits settles four bits, in 16 passes without a loop: compiled for an H100, 64 rows of 128k
logits take 79 kernels, which read the logits or as large an array 34 times and write one 9 times. A bisection, one bit a pass,
takes 64 passes in two loops. Digits of two bits take 113 kernels and 32 passes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jinfercept.models.parallel import num_devices
from jinfercept.runner.logits_processors import SampleRows

NUM_BEST = 512
"""Largest logits of a row that `_by_best` sorts."""
BITS = 4
"""Of the 32 bits of a bound, as many are settled by one pass over the logits on a GPU, which has 15 sums per row."""
SMALLEST_KEY = np.uint32(0x007FFFFF)
"""Of minus infinity, see `_keys`; smaller ones belong to no number."""


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
    return jax.lax.platform_dependent(scaled, rows, cpu=_by_best, default=partial(_by_digits, bits=BITS, unroll=True))


def _by_best(scaled: Float[Array, "R V"], rows: SampleRows) -> Float[Array, "R"]:
    """Bounds from a row's `NUM_BEST` largest logits, or by bisection where they do not suffice."""
    pairs = jax.lax.top_k(scaled, min(NUM_BEST, scaled.shape[-1]))
    extra = (rows.top_k,) if num_devices() > 1 else ()  # XLA's partitioner fails at a barrier of these pairs alone
    best, *_ = jax.lax.optimization_barrier((*pairs, *extra))  # or XLA sees that indices are unused, and sorts all
    last = jnp.clip(rows.top_k, 1, best.shape[-1]) - 1
    kth = jnp.take_along_axis(best, last[:, None], axis=1)[:, 0]
    floor = jnp.maximum(_min_p(best[:, 0], rows), jnp.where(rows.top_k > 0, kth, -jnp.inf))
    goal = rows.top_p * jnp.sum(_weights(scaled, best[:, 0], floor), axis=-1)
    sums = jnp.cumsum(_weights(best, best[:, 0], floor), axis=-1)
    reached = jnp.argmax(sums >= goal[:, None], axis=-1)
    enough = jnp.where(rows.top_p < 1, sums[:, -1] >= goal, True) & (rows.top_k <= best.shape[-1])
    at = jnp.take_along_axis(best, reached[:, None], axis=1)[:, 0]
    bound = jnp.maximum(floor, jnp.where(rows.top_p < 1, at, -jnp.inf))
    otherwise = partial(_by_digits, scaled, rows, bits=1, unroll=False)
    return jax.lax.cond(jnp.all(enough), lambda: bound, lambda: jnp.where(enough, bound, otherwise()))


@partial(jax.jit, static_argnames=("bits", "unroll"))  # traced once: all executables that draw have it
def _by_digits(scaled: Float[Array, "R V"], rows: SampleRows, bits: int, *, unroll: bool) -> Float[Array, "R"]:
    """Bounds by sums over all logits: each pass over them settles so many bits of a bound. See `_largest`."""
    keys, top = _keys(scaled), jnp.max(scaled, axis=-1)
    top_k = jnp.clip(rows.top_k, 1, scaled.shape[-1]).astype(jnp.float32)
    least = jnp.full(len(scaled), -jnp.inf)
    kth = _largest(keys, lambda keys: jnp.ones_like(keys, jnp.float32), top_k, least, bits, unroll=unroll)
    floor = jnp.maximum(_min_p(top, rows), jnp.where(rows.top_k > 0, kth, -jnp.inf))
    weights = _weights(scaled, top, floor)
    goal = rows.top_p * jnp.sum(weights, axis=-1)

    def weigh(keys: UInt32[Array, "R V"]) -> Float[Array, "R V"]:
        return jnp.exp(_floats(keys) - top[:, None]) if unroll else weights  # on a GPU it costs less than to read them

    reached = _largest(keys, weigh, goal, floor, bits, unroll=unroll)
    return jnp.where(rows.top_p < 1, reached, floor)


def _min_p(top: Float[Array, "R"], rows: SampleRows) -> Float[Array, "R"]:
    return top + jnp.log(rows.min_p)


def _weights(scaled: Float[Array, "R n"], top: Float[Array, "R"], floor: Float[Array, "R"]) -> Float[Array, "R n"]:
    """Probabilities, up to a factor of the row."""
    return jnp.where(scaled >= floor[:, None], jnp.exp(scaled - top[:, None]), 0.0)


def _keys(values: Float[Array, "*axes"]) -> UInt32[Array, "*axes"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _floats(keys: UInt32[Array, "*R n"]) -> Float[Array, "*R n"]:
    """The floats of keys; minus infinity for keys that are smaller than its own."""
    keys = jnp.maximum(keys, SMALLEST_KEY)
    return jax.lax.bitcast_convert_type(jnp.where(keys >> 31, keys & jnp.uint32(0x7FFFFFFF), ~keys), jnp.float32)


def _largest(
    keys: UInt32[Array, "R V"],
    weigh: Callable[[UInt32[Array, "R V"]], Float[Array, "R V"]],
    goal: Float[Array, "R"],
    least: Float[Array, "R"],
    bits: int,
    *,
    unroll: bool,
) -> Float[Array, "R"]:
    """The largest float, by row, with a sum of weights of at least `goal` from it upwards; `least` if it is larger.

    Args:
        keys: of the row's logits.
        weigh: the weights by keys.
        goal: the sum to reach.
        least: the smallest float in question.
        bits: settled by one pass over the keys, which has a sum for every digit but 0.
        unroll: leaves no loop in the program, for whose end a GPU's host would wait.
    """
    start = _keys(least)

    def settle(index: Int[Array, ""] | int, key: UInt32[Array, "R"]) -> UInt32[Array, "R"]:
        shift, own_keys = jnp.asarray(32 - bits * (index + 1), jnp.uint32), keys
        if (
            unroll
        ):  # or XLA keeps what two passes have in common, as large as the keys, and compiles each pass by itself
            own_keys, key, shift = jax.lax.optimization_barrier((keys, key, shift))
        pivots = [jnp.maximum(key | jnp.uint32(digit) << shift, start) for digit in range(1, 1 << bits)]
        reached = [(total >= goal).astype(jnp.uint32) for total in _sums(own_keys, weigh(own_keys), pivots)]
        return key | sum(reached[1:], reached[0]) << shift

    key = jnp.zeros(len(keys), jnp.uint32)
    if unroll:
        for index in range(32 // bits):
            key = settle(index, key)
    else:
        key = jax.lax.fori_loop(0, 32 // bits, settle, key)
    return _floats(jnp.maximum(key, start))


def _sums(
    keys: UInt32[Array, "R V"], weights: Float[Array, "R V"], pivots: Sequence[UInt32[Array, "R"]]
) -> Sequence[Float[Array, "R"]]:
    """For each pivot, the sum of the weights whose keys are not smaller: all in one pass over the keys."""
    terms = [jnp.where(keys >= pivot[:, None], weights, 0.0) for pivot in pivots]
    zeros = [jnp.float32(0)] * len(terms)
    return jax.lax.reduce(terms, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,))
