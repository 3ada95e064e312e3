"""Paged attention for CPUs, in plain XLA: online softmax over tiles of pages, with sums in float32.

The executable depends on static shapes only. The work depends on the batch, through the trip counts of three loops: over tiles
of decode rows, over tiles of one chunk's query tokens, and, inside both, over tiles of pages up to the longest context that the
tile sees. A tile is a rectangle: a decode tile has one query per row, a chunk's has one row.

A tile of pages is gathered as it lies, all heads of a token in one row, and each KV head does its own two products on a slice
of it. A chunk multiplies in the type of its queries (in bfloat16 twice as fast as in float32), a decode row in float32:
products of so few rows gain nothing, and lose time in bfloat16.
"""

import jax
import jax.numpy as jnp
from jax.lax import dynamic_slice_in_dim as window
from jax.lax import dynamic_update_slice_in_dim as put_window
from jaxtyping import Array, Float, Int

from jinfercept.cpu_kernels import native
from jinfercept.pallas.layouts.kv_rows import is_quantised, split_pages, widened
from jinfercept.pallas.layouts.pages import OUT_OF_RANGE, SCRATCH_PAGE, Batch, HeadRows, KVPages
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring

DECODE_ROWS = 8  # decode rows in a tile
CHUNK_QUERIES = 128  # query tokens of one row in a tile
CONTEXT = 128  # context tokens in a tile
NOTHING = -1  # the position of a query that sees no context
HIDDEN, LOWEST = -2e30, -1e30  # a masked score lies so far under any maximum that its weight is exactly 0


def paged_attention_cpu(q: HeadRows, pages: KVPages, batch: Batch, scoring: Scoring = PLAIN) -> HeadRows:
    """As `paged_attention_reference`. Sums are in float32; the result has the type of `q`."""
    if native.usable():
        return _with_kernel(q, pages, batch, scoring)
    return _tiled(q, pages, batch, scoring)


def _with_kernel(q: HeadRows, pages: KVPages, batch: Batch, scoring: Scoring) -> HeadRows:
    from jinfercept.cpu_kernels import chunks, decode

    if not decode.supports(q, pages):
        return _tiled(q, pages, batch, scoring)
    num_used = batch.query_starts[-1]
    if len(q) <= DECODE_ROWS:  # then also the tokens of chunks
        return decode.decode_attention(q, pages, batch, num_used, scoring)
    decoded = decode.decode_attention(q, pages, batch, batch.num_decode, scoring)
    if chunks.supports(q, pages):
        return chunks.chunk_attention(q, pages, batch, decoded, scoring)
    return jax.lax.cond(
        batch.num_decode < num_used,
        lambda decoded: _tiled(q, pages, batch, scoring, decoded),
        lambda decoded: decoded,
        decoded,
    )


def _tiled(
    q: HeadRows,
    pages: KVPages,
    batch: Batch,
    scoring: Scoring = PLAIN,
    decoded: HeadRows | None = None,
) -> HeadRows:
    num_tokens = len(q)
    num_rows, pages_per_row = batch.page_tables.shape
    tile_rows = min(DECODE_ROWS, num_tokens, num_rows)
    tile_queries, tile_pages = min(CHUNK_QUERIES, num_tokens), max(1, CONTEXT // pages.shape[1])

    # Padded so that no window is ever clamped: a tile may begin at the last token, the last row or the last page.
    beyond = max(tile_rows, tile_queries)
    queries = jnp.pad(q, ((0, beyond), (0, 0), (0, 0)))
    positions = jnp.pad(batch.positions, (0, beyond))
    tables = jnp.pad(
        batch.page_tables,
        ((0, tile_rows), (0, -pages_per_row % tile_pages)),
        constant_values=SCRATCH_PAGE,
    )
    num_used = batch.query_starts[-1]

    # A tile writes zeros for the tokens beyond its end: later tiles overwrite them, or they are padding.
    def decode_tile(carry):
        start, out = carry
        is_decode = start + jnp.arange(tile_rows) < batch.num_decode
        position = jnp.where(is_decode, window(positions, start, tile_rows), NOTHING)
        table = jnp.where(is_decode[:, None], window(tables, start, tile_rows), SCRATCH_PAGE)
        rows = window(queries, start, tile_rows)[:, None].astype(jnp.float32)
        tile = _attend(rows, position[:, None], table, pages, tile_pages, scoring)
        return start + tile_rows, put_window(out, tile[:, 0].astype(q.dtype), start, axis=0)

    def chunk_tile(carry):
        start, out = carry
        row = jnp.sum(batch.query_starts <= start) - 1
        end = jnp.minimum(start + tile_queries, batch.query_starts[row + 1])
        is_mine = start + jnp.arange(tile_queries) < end
        position = jnp.where(is_mine, window(positions, start, tile_queries), NOTHING)
        chunk = window(queries, start, tile_queries)[None]
        tile = _attend(chunk, position[None], window(tables, row, 1), pages, tile_pages, scoring)
        return end, put_window(out, tile[0], start, axis=0)

    if decoded is None:
        out = jnp.zeros_like(queries)
        _, out = jax.lax.while_loop(lambda carry: carry[0] < batch.num_decode, decode_tile, (jnp.int32(0), out))
    else:
        out = jnp.pad(decoded, ((0, beyond), (0, 0), (0, 0)))
    _, out = jax.lax.while_loop(lambda carry: carry[0] < num_used, chunk_tile, (batch.num_decode, out))
    return out[:num_tokens]


def _attend(
    queries: Float[Array, "R Q H D"],
    positions: Int[Array, "R Q"],
    tables: Int[Array, "R P"],
    pages: KVPages,
    tile_pages: int,
    scoring: Scoring,
) -> Float[Array, "R Q H D"]:
    """One tile of queries over its rows' pages; P is a multiple of `tile_pages`. Products are in the type of the queries.

    Query `[r, q]` sees positions up to `positions[r, q]`; one that sees nothing gives zeros.
    """
    rows, num_q, num_heads, head_dim = queries.shape
    num_pages, page_size, _, num_kv_heads, _ = pages.shape
    group = num_heads // num_kv_heads
    blocks = pages.reshape(num_pages, -1) if is_quantised(pages.dtype) else pages.reshape(num_pages, page_size, -1)
    if scoring.window is not None:
        positions, tables = _from_window(positions, tables, scoring.window, page_size)
    grouped = queries.reshape(rows, num_q, num_kv_heads, group, head_dim)
    longest, tile_tokens = jnp.max(positions, axis=1) + 1, tile_pages * page_size  # [R]

    def page_tile(index, carry):
        top, total, weighted = carry  # [K, R, Q, G], [K, R, Q, G], [K, R, Q, G, D]
        first_page = index * tile_pages
        table = window(tables, first_page, tile_pages, axis=1)
        place = first_page * page_size + jnp.arange(tile_tokens)
        written = (place[None] < longest[:, None])[..., None]  # unwritten slots may hold anything
        if is_quantised(pages.dtype):
            numbers, scales = split_pages(blocks[table].reshape(rows, tile_pages, *pages.shape[1:]))
            numbers = numbers.reshape(rows, tile_tokens, 2 * num_kv_heads, head_dim)
            scales = jnp.where(written, scales.reshape(rows, tile_tokens, -1), 0)
            heads = [
                (widened(numbers[:, :, head], queries.dtype), scales[:, :, head]) for head in range(2 * num_kv_heads)
            ]
        else:
            context = blocks[table].reshape(rows, tile_tokens, -1)  # [R, t, 2·K·D]
            context = jnp.where(written, context, 0).astype(queries.dtype)
            heads = [(head, None) for head in jnp.split(context, 2 * num_kv_heads, axis=-1)]
        # K keys, then K values: each [R, t, D] and, if quantised, [R, t]
        keys, values = heads[:num_kv_heads], heads[num_kv_heads:]

        scores = jnp.stack(
            [_scaled(_product("rqgd,rtd->rqgt", grouped[:, :, k], key), scale) for k, (key, scale) in enumerate(keys)]
        )
        scores = scores * head_dim**-0.5
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
        visible = place[None, None] <= positions[..., None]
        if scoring.window is not None:
            visible &= place[None, None] > positions[..., None] - scoring.window
        scores = jnp.where(visible[:, :, None], scores, HIDDEN)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        narrow = [_scaled(weights[k], scale).astype(queries.dtype) for k, (_, scale) in enumerate(values)]
        added = jnp.stack([_product("rqgt,rtd->rqgd", narrow[k], value) for k, (value, _) in enumerate(values)])
        return new_top, total * fade + weights.sum(axis=-1), weighted * fade[..., None] + added

    shape = (num_kv_heads, rows, num_q, group)
    carry = (jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    if scoring.sinks is not None:
        sinks = scoring.sinks.astype(jnp.float32).reshape(num_kv_heads, 1, 1, group)
        carry = (jnp.broadcast_to(sinks, shape), jnp.ones(shape), carry[2])
    num_tiles = (jnp.max(longest) + tile_tokens - 1) // tile_tokens
    _, total, weighted = jax.lax.fori_loop(0, num_tiles, page_tile, carry)
    mean = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
    return mean.transpose(1, 2, 0, 3, 4).reshape(queries.shape).astype(queries.dtype)


def _from_window(
    positions: Int[Array, "R Q"], tables: Int[Array, "R P"], size: int, page_size: int
) -> tuple[Int[Array, "R Q"], Int[Array, "R P"]]:
    sees = positions != NOTHING
    # counted from the first page on that a query of the tile sees
    earliest = jnp.min(jnp.where(sees, positions, OUT_OF_RANGE))
    first = jnp.maximum(0, earliest - size + 1) // page_size
    return jnp.where(sees, positions - first * page_size, NOTHING), jnp.roll(tables, -first, axis=1)


def _scaled(x: Float[Array, "R Q G t"], scale: Float[Array, "R t"] | None) -> Float[Array, "R Q G t"]:
    return x if scale is None else x * scale[:, None, None]  # the rows' numbers themselves stay exact


def _product(spec: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
