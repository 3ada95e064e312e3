"""Attention whose bits do not depend on the batch: `whole_attention` of up to 64 queries of one row over its whole context.

XLA's products on a CPU sum in an order of their own where a factor has few rows. Where it has `FEWEST_ROWS` or more they sum in
one order: a chain of fused additions in blocks of 512 terms, from the first on. The sums of softmax are in one order over
multiples of `KEYS`. Hidden keys have the weight 0 and change no sum. So a query has the same bits in a tile, in a whole forward
pass, and whatever stands beside it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.lax import dynamic_slice_in_dim as window
from jax.lax import dynamic_update_slice_in_dim as put_window
from jaxtyping import Array, Bool, Float, Int

from jinfercept.pallas.layouts.pages import SCRATCH_PAGE, Batch, HeadRows, KVPages, Scalar
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring

FEWEST_ROWS = 64
"""Rows and columns of a product from which on the bits of a row do not depend on how many there are."""
FEWEST_NUMBERS = 4096
"""Numbers of an array from which on sums over its columns are in one order."""
KEYS = 256
"""Contexts are filled up to a multiple of so many keys."""


def ordered_attention(q: HeadRows, pages: KVPages, batch: Batch, scoring: Scoring = PLAIN) -> HeadRows:
    """As `paged_attention_reference`, for pages that are not quantised."""
    num_tokens, page_size = len(q), pages.shape[1]
    longest = batch.page_tables.shape[1] * page_size
    sizes = [KEYS]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    queries = jnp.pad(q, ((0, FEWEST_ROWS), (0, 0), (0, 0)))
    positions = jnp.pad(batch.positions, (0, FEWEST_ROWS))
    missing = -(-sizes[-1] // page_size) - batch.page_tables.shape[1]
    tables = jnp.pad(batch.page_tables, ((0, 0), (0, missing)), constant_values=SCRATCH_PAGE)
    num_used = batch.query_starts[-1]

    def attend(
        num_keys: int, tile: Float[Array, "Q H D"], position: Int[Array, "Q"], table: Int[Array, "P"]
    ) -> Float[Array, "Q H D"]:
        context = pages[table[: -(-num_keys // page_size)]].reshape(-1, *pages.shape[2:])[:num_keys]
        places = jnp.arange(num_keys)
        written = (places <= jnp.max(position))[:, None, None, None]  # unwritten slots may hold anything
        context = jnp.where(written, context, 0).astype(q.dtype)
        return whole_attention(tile, context[:, 0], context[:, 1], visible(position, places, scoring), scoring)

    branches = [partial(attend, size) for size in sizes]

    def tile(carry: tuple[Scalar, Float[Array, "..."]]) -> tuple[Scalar, Float[Array, "..."]]:
        start, out = carry
        row = jnp.sum(batch.query_starts <= start) - 1
        end = jnp.minimum(start + FEWEST_ROWS, batch.query_starts[row + 1])
        is_own = start + jnp.arange(FEWEST_ROWS) < end
        position = jnp.where(is_own, window(positions, start, FEWEST_ROWS), 0)
        branch = jnp.searchsorted(jnp.array(sizes), jnp.max(position) + 1)
        attended = jax.lax.switch(branch, branches, window(queries, start, FEWEST_ROWS), position, tables[row])
        return end, put_window(out, attended, start, axis=0)  # later tiles overwrite what is not the row's

    _, out = jax.lax.while_loop(
        lambda carry: carry[0] < num_used, tile, (jnp.zeros_like(num_used), jnp.zeros_like(queries))
    )
    return jnp.where((jnp.arange(num_tokens) < num_used)[:, None, None], out[:num_tokens], 0)


def fewest_rows(hidden_size: int) -> int:
    """Rows of a step, and of its logits, from which on the bits of a row do not depend on how many there are."""
    rows = FEWEST_ROWS
    while rows * hidden_size < FEWEST_NUMBERS:
        rows *= 2
    return rows


def visible(positions: Int[Array, "T"], places: Int[Array, "S"], scoring: Scoring) -> Bool[Array, "T S"]:
    """Whether the query at a position sees the key at a place."""
    sees = places[None] <= positions[:, None]
    return sees if scoring.window is None else sees & (places[None] > positions[:, None] - scoring.window)


def whole_attention(
    q: HeadRows,
    keys: Float[Array, "S K D"],
    values: Float[Array, "S K D"],
    sees: Bool[Array, "T S"],
    scoring: Scoring = PLAIN,
) -> HeadRows:
    """Attention as models are written for training: all scores, their softmax, the mean of values. Sinks raise `ValueError`."""
    num_tokens, num_heads, head_dim = q.shape
    if scoring.sinks is not None:
        raise ValueError("attention with batch_invariant has no sinks")
    grouped = q.reshape(num_tokens, keys.shape[1], num_heads // keys.shape[1], head_dim)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, keys, precision="highest") * head_dim**-0.5
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    weights = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), axis=-1)
    values = jnp.pad(values, ((0, 0), (0, 0), (0, max(0, FEWEST_ROWS - head_dim))))
    return jnp.einsum("kgts,skd->tkgd", weights, values, precision="highest")[..., :head_dim].reshape(q.shape)
