"""Paged attention for NVIDIA GPUs from Ampere on, in Pallas' Triton backend: two kernels.

The whole pool is an operand without blocks, and pages are found by the numbers in the tables, so the cost does not depend on
the pool's size. Sums are in float32. 16-bit numbers are multiplied by tensor cores, float32 as float32, never as TF32.

* Decode rows have one query each. Their contexts are cut into pieces (`work_schedule.split_contexts`, `triton_decode.py`), so
  that few long rows fill the chip as well as many short ones.
* Chunks are cut into tiles of queries of one row. Every tile reads its row's context up to its last query.

In both, the query heads of one KV head are the rows of one matrix product, padded to a power of two. One program serves one KV
head of one piece or tile.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages, Scalar
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.tiles import (
    AMPERE,
    DTYPES,
    LARGEST_HEAD_DIM,
    Heads,
    Tile,
    Tiles,
    compute_capability,
    is_supported,
    tiles_for,
)
from jinfercept.pallas.triton_decode import attend_decode_rows
from jinfercept.pallas.triton_softmax import (
    EVERYWHERE,
    LOG2_E,
    RowPages,
    as_operand,
    attend_tile,
    empty_carry,
    load_rows,
    pieces_of,
    store_rows,
    with_ints,
)
from jinfercept.pallas.work_schedule import Work


def paged_attention_triton(
    q: HeadRows,
    pages: KVPages,
    batch: Batch,
    *,
    scoring: Scoring = PLAIN,
    decode_only: bool = False,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> HeadRows:
    """Causal attention of every query token over its row's pages, scaled by 1/√D; padding tokens give zeros.

    Same arguments and result as `paged_attention_reference`. The result has the type of `q`, as have pages that are not
    quantised. The batch has its `work`. Raises `ValueError` if the type or the head dim has no kernel.

    Args:
        decode_only: the batch has no chunks, so their kernel is left out.
        tiles: for tuning; None: `choose_tiles` for the device that code is lowered for.
        interpret: run without a GPU, slowly.
    """
    heads = Heads.of(q, pages)
    if not is_supported(q.dtype, pages.dtype, heads.head_dim):
        got = f"queries in {q.dtype} and pages in {pages.dtype} with head dim {heads.head_dim}"
        fix = f"one of {', '.join(DTYPES)} for both or for queries on quantised pages, and a head dim from 16 to "
        fix += f"{LARGEST_HEAD_DIM}, or the reference"
        raise ValueError(f"the Triton kernels have no such attention; got {got}; fix: use {fix}")
    tiles = tiles or tiles_for(heads, AMPERE if interpret else compute_capability())
    out = None if decode_only else _attend_chunks(q, pages, batch.work, scoring, tiles.chunk, interpret)
    return attend_decode_rows(q, pages, batch.work, out, tiles, interpret, scoring)


def _attend_chunks(q: HeadRows, pages: KVPages, work: Work, scoring: Scoring, tile: Tile, interpret: bool) -> HeadRows:
    schedule = work.chunks
    assert schedule is not None
    operands, specs = with_ints(
        (q, as_operand(pages)), work.query_starts, work.context_lens, work.page_tables, *schedule[:3]
    )
    if scoring.sinks is not None:
        operands, specs = [*operands, scoring.sinks], [*specs, EVERYWHERE]
    kernel = partial(
        _chunk_kernel,
        tile=tile,
        pages_per_row=work.page_tables.shape[1],
        pages_shape=pages.shape,
        scoring=scoring._replace(sinks=None),
    )
    return pl.pallas_call(
        kernel,
        # KV heads first: their programs run side by side, since their numbers lie side by side in a page
        grid=(pages.shape[3], schedule.unit_rows.shape[0]),
        in_specs=specs,
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="paged_chunk_attention",
    )(*operands)


def _chunk_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N, B, 2, K, W]
    query_starts_ref,  # [S + 1]
    context_lens_ref,  # [S]
    tables_ref,  # [S · P]
    row_units_ref,  # [S + 1]
    unit_rows_ref,  # [W]
    unit_starts_ref,  # [W]
    *refs,  # sinks [H], if there are any; the results [T, H, D]
    tile: Tile,
    pages_per_row: int,
    pages_shape: tuple[int, ...],
    scoring: Scoring,
):
    kv_head, program = pl.program_id(0), pl.program_id(1)
    group, head_dim, columns = q_ref.shape[1] // pages_shape[3], q_ref.shape[2], pieces_of(pages_ref.dtype)
    tile_queries, (*sinks_ref, out_ref) = tile.rows // group, refs

    @pl.when(program < row_units_ref[row_units_ref.shape[0] - 1])
    def _():
        row = unit_rows_ref[program]
        first = query_starts_ref[row] + unit_starts_ref[program]
        end = jnp.minimum(first + tile_queries, query_starts_ref[row + 1])
        offset = context_lens_ref[row] - query_starts_ref[row + 1]  # from a token's number to its position
        place = jnp.arange(tile.rows)
        token, head = first + place // group, kv_head * group + place % group  # [rows], [rows]
        real = (token < end) & (place < tile_queries * group)

        queries = load_rows(q_ref, (token, head), head_dim, real, columns)  # [rows, D] by piece
        carry = empty_carry(tile.rows, head_dim, columns)
        for ref in sinks_ref:
            sinks = plgpu.load(ref.at[head], mask=real, other=0.0).astype(jnp.float32)
            carry = (sinks * LOG2_E, jnp.ones(tile.rows), carry[2])
        context = RowPages(pages_ref, pages_shape, tables_ref, row * pages_per_row, kv_head)
        limit, since = end + offset, 0
        if scoring.window is not None:
            since = jnp.maximum(first + offset + 1 - scoring.window, 0)
        attend = partial(attend_tile, queries, context, tile.tokens, head_dim=head_dim, limit=limit, scoring=scoring)
        for begin, stop, masked in _turns(first + offset + 1 - since, limit - since, tile.tokens, scoring.window):

            def turn(number, carry, masked=masked):
                return attend(since + number * tile.tokens, token + offset if masked else None, carry)

            carry = jax.lax.fori_loop(begin, stop, turn, carry)
        _, total, weighted = carry
        weighted = tuple(values / total[:, None] for values in weighted)
        store_rows(out_ref, (token, head), head_dim, real, weighted, columns)


def _turns(first: Scalar, last: Scalar, tokens: int, window: int | None) -> Iterator[tuple[Scalar | int, Scalar, bool]]:
    """Ranges of a tile's turns over its context: first turn, end, and whether some query does not see all of their tokens."""
    # `first` and `last` are the tokens up to the first and up to the last query, from where the first query's window begins
    begin = 0
    if window is not None:  # the last query's begins later
        begin = pl.cdiv(jnp.maximum(last - window, 0), tokens)
        yield 0, begin, True
    seen_by_all = first // tokens
    if window is not None:
        seen_by_all = jnp.maximum(seen_by_all, begin)
    yield begin, seen_by_all, False
    yield seen_by_all, pl.cdiv(last, tokens), True
