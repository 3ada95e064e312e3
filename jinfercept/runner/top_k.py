"""The largest numbers of rows and their columns, as `lax.top_k` has them; on a GPU without sorting the rows."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 64
"""Columns whose maximum stands for them: a row of 128k columns has 2,004 maxima, and 20 blocks have 1,280 columns."""


def top_k(values: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """The `k` largest of each row and their columns, the largest first, of equals the lowest column first."""
    return jax.lax.platform_dependent(values, cpu=partial(_top_k, k=k), default=partial(top_k_of_blocks, k=k))


def top_k_of_blocks(values: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Top-k of the `k` blocks with the largest maxima, of equals the lowest first: `k` numbers come before those of any other.

    XLA sorts the whole row for `lax.top_k` of more than 16, and its kernel for fewer does not promise an order of equals.
    """
    num_rows, num_columns = values.shape
    if num_columns <= k * BLOCK:
        return _top_k(values, k)
    num_blocks = -(-num_columns // BLOCK)
    padded = jnp.pad(values, ((0, 0), (0, num_blocks * BLOCK - num_columns)), constant_values=-jnp.inf)
    blocks = padded.reshape(num_rows, num_blocks, BLOCK)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # columns ascend, so that equals keep their order
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(num_rows, k * BLOCK)
    best, places = jax.lax.top_k(candidates, k)
    return best, jnp.take_along_axis(chosen, places // BLOCK, axis=1) * BLOCK + places % BLOCK


def _top_k(values: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    best, columns = jax.lax.top_k(values, k)
    return best, columns
