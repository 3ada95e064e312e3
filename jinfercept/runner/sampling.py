"""Draws the next tokens from logits, on the device. A row's draw depends on its own seed and position, never on the batch."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jinfercept.runner.filters import bounds, is_filtered
from jinfercept.runner.logits_processors import SampleRows
from jinfercept.runner.packing_samples import Kind
from jinfercept.runner.top_k import BLOCK, top_k

COLDEST = 1e-5
"""Lower temperatures that are not 0 count as this one: logits divided by it stay finite."""


def sample(logits: Float[Array, "R V"], rows: SampleRows, kind: Kind) -> Int[Array, "R"]:
    """One token per row: the largest logit's where the temperature is 0, else a draw from `softmax(logits / temperature)` among
    the tokens that `filters.bounds` keeps.

    Drawing is Gumbel-max with the key `fold_in(key(seed), position)`, so that a request's tokens are the same whatever runs
    beside it and however often it is interrupted.

    Args:
        logits: as the model has them, or as `shape_logits` makes them where a row of the step needs it.
        rows: of a step whose `draw_kind` is this kind or a simpler one.
        kind: what is computed. A row has the same token in every kind that has what it needs.
    """
    if kind == "greedy":
        return _largest(logits)

    def noise(seed: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, "V"]:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    warm = rows.temperature > 0
    scaled = logits / jnp.where(warm, jnp.maximum(rows.temperature, COLDEST), 1.0)[:, None]
    left = scaled
    if kind == "filtered":
        bound = jnp.where(is_filtered(rows), bounds(scaled, rows), -jnp.inf)
        left = jnp.where(scaled >= bound[:, None], scaled, -jnp.inf)
    return _largest(jnp.where(warm[:, None], left + jax.vmap(noise)(rows.seed, rows.position), logits))


def logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, "R"], num_best: int
) -> tuple[Float[Array, "R"], Int[Array, "R"], Float[Array, "R best"], Int[Array, "R best"]]:
    """Log probabilities of the tokens, their ranks (1: none is likelier), and the `num_best` largest with their tokens."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = jnp.sum(logits >= chosen, axis=-1)
    best, ids = top_k(logits, min(num_best, logits.shape[-1]))
    return chosen[:, 0] - total, rank, best - total[:, None], ids


def _largest(values: Float[Array, "R V"]) -> Int[Array, "R"]:
    """The column of each row's largest value, the first of equals."""
    return jax.lax.platform_dependent(values, cpu=_largest_of_blocks, default=partial(jnp.argmax, axis=-1)).astype(
        jnp.int32
    )


def _largest_of_blocks(values: Float[Array, "R V"]) -> Int[Array, "R"]:
    """As `argmax`, which XLA does not vectorise on a CPU: the first block with the largest maximum, then the place in it."""
    values = jax.lax.optimization_barrier(values)  # computed once
    num_rows, num_columns = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -num_columns % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(num_rows, -1, BLOCK)
    block = _first_largest(jnp.max(blocks, axis=-1))
    place = _first_largest(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0])
    return jnp.minimum(block * BLOCK + place, num_columns - 1)  # a row without numbers has no largest


def _first_largest(values: Float[Array, "R V"]) -> Int[Array, "R"]:
    columns = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    is_largest = values == jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, columns, values.shape[-1] - 1), axis=-1)
