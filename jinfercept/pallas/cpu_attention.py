"""Paged attention for CPUs, in plain XLA: online softmax over tiles of pages, in float32 whatever the pages hold.

The executable depends on static shapes only; the work depends on the batch, through the trip counts of three loops:
over tiles of decode rows, over tiles of one chunk's query tokens, and, inside both, over tiles of pages up to the
longest context that the tile sees. A tile is a rectangle: a decode tile has one query per row, a chunk's has one row.

A tile of pages is gathered as it lies, all heads of a token in one row, and each KV head does its own two products on a
slice of it; `benchmarks/kv_layout.py` compares that with other orders and formulations.
"""

import jax
import jax.numpy as jnp
from jax.lax import dynamic_slice_in_dim as window
from jax.lax import dynamic_update_slice_in_dim as put_window
from jaxtyping import Array, Float, Int

from jinfercept.pallas.layout import SCRATCH_PAGE, Batch, KVPages

DECODE_ROWS = 8  # decode rows in a tile
CHUNK_QUERIES = 64  # query tokens of one row in a tile
DECODE_CONTEXT = 64  # context tokens in a decode tile; a chunk's tile has twice as many
NOTHING = -1  # the position of a query that sees nothing
HIDDEN, LOWEST = -2e30, -1e30  # a masked score lies so far under any maximum that its weight is exactly 0


def paged_attention_cpu(q: Float[Array, "T H D"], pages: KVPages, batch: Batch) -> Float[Array, "T H D"]:
    """Causal attention of every query token over its row's pages, scaled by 1/√D; padding tokens give zeros.

    Same arguments and result as `paged_attention_reference`. Sums are in float32; the result has the type of `q`.
    """
    num_tokens, _, head_dim = q.shape
    num_rows, pages_per_row = batch.page_tables.shape
    tile_rows, tile_q = min(DECODE_ROWS, num_tokens, num_rows), min(CHUNK_QUERIES, num_tokens)
    decode_pages = max(1, DECODE_CONTEXT // pages.shape[1])
    chunk_pages = 2 * decode_pages

    # Padded so that no window is ever clamped: a tile may begin at the last token, the last row or the last page.
    beyond = max(tile_rows, tile_q)
    queries = jnp.pad(q.astype(jnp.float32) * head_dim**-0.5, ((0, beyond), (0, 0), (0, 0)))
    positions = jnp.pad(batch.positions, (0, beyond))
    tables = jnp.pad(
        batch.page_tables, ((0, tile_rows), (0, -pages_per_row % chunk_pages)), constant_values=SCRATCH_PAGE
    )
    num_used = batch.query_starts[-1]

    # A tile writes zeros for the tokens behind its end: they belong to later tiles, which overwrite them, or to nobody.
    def decode_tile(carry):
        start, out = carry
        is_decode = start + jnp.arange(tile_rows) < batch.num_decode
        position = jnp.where(is_decode, window(positions, start, tile_rows), NOTHING)
        table = jnp.where(is_decode[:, None], window(tables, start, tile_rows), SCRATCH_PAGE)
        tile = _attend(window(queries, start, tile_rows)[:, None], position[:, None], table, pages, decode_pages)
        return start + tile_rows, put_window(out, tile[:, 0], start, axis=0)

    def chunk_tile(carry):
        start, out = carry
        row = jnp.sum(batch.query_starts <= start) - 1
        end = jnp.minimum(start + tile_q, batch.query_starts[row + 1])
        is_mine = start + jnp.arange(tile_q) < end
        position = jnp.where(is_mine, window(positions, start, tile_q), NOTHING)
        tile = _attend(window(queries, start, tile_q)[None], position[None], window(tables, row, 1), pages, chunk_pages)
        return end, put_window(out, tile[0], start, axis=0)

    out = jnp.zeros_like(queries)
    _, out = jax.lax.while_loop(lambda carry: carry[0] < batch.num_decode, decode_tile, (jnp.int32(0), out))
    _, out = jax.lax.while_loop(lambda carry: carry[0] < num_used, chunk_tile, (batch.num_decode, out))
    return out[:num_tokens].astype(q.dtype)


def _attend(
    queries: Float[Array, "R Q H D"],
    positions: Int[Array, "R Q"],
    tables: Int[Array, "R P"],
    pages: KVPages,
    tile_pages: int,
) -> Float[Array, "R Q H D"]:
    """One tile of scaled queries over its rows' pages, `tile_pages` at a time; P is a multiple of that.

    Query `[r, q]` sees positions up to `positions[r, q]`; one that sees nothing gives zeros.
    """
    rows, num_q, num_heads, head_dim = queries.shape
    num_pages, page_size, _, num_kv_heads, _ = pages.shape
    tile_tokens, group = tile_pages * page_size, num_heads // num_kv_heads
    token_rows = pages.reshape(num_pages, page_size, 2 * num_kv_heads * head_dim)
    grouped = queries.reshape(rows, num_q, num_kv_heads, group, head_dim)
    longest = jnp.max(positions, axis=1) + 1  # [R]

    def page_tile(index, carry):
        top, total, weighted = carry  # [K, R, Q, G], [K, R, Q, G], [K, R, Q, G, D]
        table = window(tables, index * tile_pages, tile_pages, axis=1)
        context = token_rows[table].reshape(rows, tile_tokens, -1).astype(jnp.float32)  # [R, t, 2·K·D]
        place = index * tile_tokens + jnp.arange(tile_tokens)
        written = place < longest[:, None]
        context = jnp.where(written[..., None], context, 0.0)  # unwritten slots may hold anything
        heads = jnp.split(context, 2 * num_kv_heads, axis=-1)  # K keys, then K values, each [R, t, D]
        keys, values = heads[:num_kv_heads], heads[num_kv_heads:]

        scores = jnp.stack([jnp.einsum("rqgd,rtd->rqgt", grouped[:, :, k], key) for k, key in enumerate(keys)])
        scores = jnp.where((place <= positions[..., None])[:, :, None], scores, HIDDEN)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        added = jnp.stack([jnp.einsum("rqgt,rtd->rqgd", weights[k], value) for k, value in enumerate(values)])
        return new_top, total * fade + weights.sum(axis=-1), weighted * fade[..., None] + added

    shape = (num_kv_heads, rows, num_q, group)
    nothing_yet = (jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    num_tiles = (jnp.max(longest) + tile_tokens - 1) // tile_tokens
    _, total, weighted = jax.lax.fori_loop(0, num_tiles, page_tile, nothing_yet)
    mean = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
    return mean.transpose(1, 2, 0, 3, 4).reshape(queries.shape)
