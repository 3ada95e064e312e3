"""Draws the next tokens from logits, on the device. A row's draw depends on its own key and position, never on the batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jinfercept.runner.filters import bounds, is_filtered
from jinfercept.runner.logits_processors import SampleRows
from jinfercept.runner.packing_samples import Kind
from jinfercept.runner.top_k import BLOCK, top_k
from jinfercept.sched.plan import NOT_FINITE, NOTHING_ALLOWED

COLDEST = 1e-5
"""Lower temperatures that are not 0 count as this one: logits divided by it stay finite."""


def sample(
    logits: Float[Array, "R V"], rows: SampleRows, kind: Kind
) -> tuple[Int[Array, "R"], Float[Array, "R"] | None]:
    """One token per row: the largest logit's where the temperature is 0, else a draw from `softmax(logits / temperature)` among
    the tokens that `filters.bounds` keeps. `NOT_FINITE` or `NOTHING_ALLOWED` where the largest is no number.

    Drawing is Gumbel-max with the row's key and `fold_in(key, position)`, so that a request's tokens are the same whatever runs
    beside it and however often it is interrupted.

    Args:
        logits: as the model has them, or as `shape_logits` makes them where a row of the step needs it.
        rows: of a step whose `draw_kind` is this kind or a simpler one.
        kind: what is computed. A row has the same token in every kind that has what it needs.

    Returns:
        The tokens; and where the kind is "filtered" the smallest scaled logit that each row
        keeps, minus infinity if it keeps all.
    """
    if kind == "greedy":
        return _token(logits), None

    def noise(high: Int[Array, ""], low: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, "V"]:
        key = jax.random.wrap_key_data(jnp.stack([high, low]).astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[-1:], jnp.float32)

    warm = rows.temperature > 0
    scaled = _scaled(logits, rows)
    masked_logits, bound = scaled, None
    if kind == "filtered":
        bound = jnp.where(is_filtered(rows), bounds(scaled, rows), -jnp.inf)
        masked_logits = jnp.where(scaled < bound[:, None], -jnp.inf, scaled)  # a NaN stays
    random = jax.vmap(noise)(rows.key_high, rows.key_low, rows.position)
    return _token(jnp.where(warm[:, None], masked_logits + random, logits)), bound


def processed(
    logits: Float[Array, "R V"], bound: Float[Array, "R"], tokens: Int[Array, "R"], rows: SampleRows
) -> tuple[Float[Array, "R"], UInt32[Array, "R words"]]:
    """The distributions that the tokens were drawn from: the log probability of each token in its own, and the tokens that have
    a probability above 0, as bits (`mask_words`). Where the temperature is 0 the token itself has the probability 1.

    Args:
        logits, rows: as `sample` had them.
        bound: of the draw: the smallest scaled logit that a row keeps.
    """
    warm = rows.temperature > 0
    scaled = _scaled(logits, rows)
    masked_logits = jnp.where(scaled < bound[:, None], -jnp.inf, scaled)
    chosen = jnp.take_along_axis(masked_logits, tokens[:, None], axis=1)[:, 0]
    logprob = jnp.where(warm, chosen - jax.nn.logsumexp(masked_logits, axis=-1), 0.0)
    columns = jnp.arange(logits.shape[-1], dtype=tokens.dtype)
    mask = jnp.where(warm[:, None], masked_logits > -jnp.inf, columns[None] == tokens[:, None])
    bits = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 32))).reshape(len(mask), -1, 32).astype(jnp.uint32)
    return logprob, jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32)[None, None], axis=-1, dtype=jnp.uint32)


def _scaled(logits: Float[Array, "R V"], rows: SampleRows) -> Float[Array, "R V"]:
    """Logits divided by the temperature; those of greedy rows as they are."""
    return logits / jnp.where(rows.temperature > 0, jnp.maximum(rows.temperature, COLDEST), 1.0)[:, None]


def logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, "R"], num_best: int
) -> tuple[Float[Array, "R"], Int[Array, "R"], Float[Array, "R best"], Int[Array, "R best"]]:
    """Log probabilities of the tokens, their ranks (1: none is likelier), and the `num_best` largest with their tokens.

    Log probabilities are NaN in a row with a logit that is NaN or plus infinity.
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    total = jnp.where(total == jnp.inf, jnp.nan, total)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = jnp.sum(logits >= chosen, axis=-1)
    best, ids = top_k(logits, min(num_best, logits.shape[-1]))
    return chosen[:, 0] - total, rank, best - total[:, None], ids


def _token(values: Float[Array, "R V"]) -> Int[Array, "R"]:
    """The column of each row's largest value, the first of equals; a number below 0 where the largest value is not finite."""
    columns, largest = jax.lax.platform_dependent(values, cpu=_largest_of_blocks, default=_largest)
    problem = jnp.where(largest == -jnp.inf, NOTHING_ALLOWED, NOT_FINITE)
    return jnp.where(jnp.isfinite(largest), columns, problem).astype(jnp.int32)


def _largest(values: Float[Array, "R V"]) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """The column of each row's largest value, and the value; NaN is the largest. The reduction of `argmax`, which has both."""

    def larger(a, b):
        (x, i), (y, j) = a, b
        first = (x > y) | (x != x)
        return jnp.where(first, x, y), jnp.where(first | ((x == y) & (i < j)), i, j)

    columns = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    start = jnp.array(-jnp.inf, values.dtype), jnp.array(0, jnp.int32)
    largest, column = jax.lax.reduce((values, columns), start, larger, (1,))
    return column, largest


def _largest_of_blocks(values: Float[Array, "R V"]) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """As `_largest`, which XLA does not vectorise on a CPU: the first block with the largest maximum, then the place in it."""
    values = jax.lax.optimization_barrier(values)  # computed once
    num_rows, num_columns = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -num_columns % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(num_rows, -1, BLOCK)
    maxima = jnp.max(blocks, axis=-1)
    block = _first_largest(maxima)
    place = _first_largest(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0])
    return block * BLOCK + place, jnp.max(maxima, axis=-1)


def _first_largest(values: Float[Array, "R V"]) -> Int[Array, "R"]:
    columns = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    is_largest = values == jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, columns, values.shape[-1] - 1), axis=-1)
