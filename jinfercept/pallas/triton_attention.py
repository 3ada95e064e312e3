"""Paged attention for NVIDIA GPUs from Ampere on, in Pallas' Triton backend: two kernels, and a small third one that joins.

The whole pool is an operand without blocks, and pages are found by the numbers in the tables: the cost does not depend on
the pool's size. Sums are in float32. 16-bit numbers are multiplied by tensor cores, float32 as float32, never as TF32.

* Decode rows have one query each. Their contexts are cut into pieces (`work_schedule.split_contexts`), so that few long rows
  fill the chip as well as many short ones; a piece leaves its maximum, its sum and its weighted values, and `_join_kernel`
  makes one result of a row's pieces (flash-decoding).
* Chunks are cut into tiles of queries of one row, and every tile reads its row's context up to its last query.

In both, the query heads of one KV head are the rows of one matrix product, padded to a power of two. One program serves one
KV head of one piece or tile; the programs of all KV heads run side by side, since their numbers lie side by side in a page.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.pallas.layout import Batch, KVPages
from jinfercept.pallas.tiles import Tile, Tiles, choose_tiles, power_of_two
from jinfercept.pallas.triton_softmax import LOWEST, attend_tile, empty_carry, load_rows, store_rows
from jinfercept.pallas.work_schedule import WorkSchedule, split_contexts, tile_chunks

AMPERE = 80  # its compute capability
DTYPES = ("bfloat16", "float16", "float32")
LARGEST_HEAD_DIM = 256
JOINED_UNITS = 16  # pieces of a row that are joined in one turn
EVERYWHERE = pl.BlockSpec(memory_space=pl.ANY)


def paged_attention_triton(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, *, tiles: Tiles | None = None, interpret: bool = False
) -> Float[Array, "T H D"]:
    """Causal attention of every query token over its row's pages, scaled by 1/√D; padding tokens give zeros.

    Same arguments and result as `paged_attention_reference`; the result has the type of `q`.

    Args:
        q, pages, batch: see there; q and pages have the same type. Its `work` is made here if it is empty.
        tiles: for tuning; the default is `choose_tiles` for the device that the code is lowered for.
        interpret: run without a GPU, slowly.

    Raises:
        ValueError: the type or the head dim has no kernel.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[3]
    if not is_supported(q.dtype, pages.dtype, head_dim):
        got = f"queries in {q.dtype} and pages in {pages.dtype} with head dim {head_dim}"
        fix = f"one of {', '.join(DTYPES)} for both and a head dim from 16 to {LARGEST_HEAD_DIM}, or the reference"
        raise ValueError(f"the Triton kernels have no such attention; got {got}; fix: use {fix}")
    heads = Heads(num_heads, num_kv_heads, head_dim, q.dtype.itemsize)
    if tiles is None:
        tiles = choose_tiles(head_dim, heads.group, heads.itemsize, AMPERE if interpret else compute_capability())
    chunks, splits = batch.work or schedule_work(batch, heads, tiles)
    out = jnp.zeros_like(q)
    out = _attend_chunks(q, pages, batch, chunks, out, tiles.chunk, interpret)
    return attend_decode_rows(q, pages, batch, splits, out, tiles.decode, interpret)


class Heads(NamedTuple):
    """A model's numbers of heads, and the bytes of a number in its pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads


def schedule_work(batch: Batch, heads: Heads, tiles: Tiles | None = None) -> tuple[WorkSchedule, WorkSchedule]:
    """The work schedules of the chunks and of the decode rows, the same for all layers of a step."""
    if tiles is None:
        tiles = choose_tiles(heads.head_dim, heads.group, heads.itemsize, compute_capability())
    chunks = tile_chunks(batch, batch.tokens.shape[0], tiles.chunk.rows // heads.group)
    spare_units = -(-tiles.programs // heads.num_kv_heads)
    return chunks, split_contexts(batch, spare_units, tiles.decode.tokens, tiles.least_split)


def is_supported(q: DTypeLike, pages: DTypeLike, head_dim: int) -> bool:
    """Whether the kernels can be compiled for queries and pages of these types."""
    dtype = jnp.dtype(q)
    return dtype == jnp.dtype(pages) and dtype.name in DTYPES and 16 <= head_dim <= LARGEST_HEAD_DIM


def compute_capability() -> int:
    """Of the GPU that the code is lowered for: 80 for A100, 90 for H100.

    Raises:
        ValueError: there is none.
    """
    return plgpu.get_gpu_info().compute_capability


def _attend_chunks(
    q: Float[Array, "T H D"],
    pages: KVPages,
    batch: Batch,
    work: WorkSchedule,
    out: Float[Array, "T H D"],
    tile: Tile,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """`out` with the results of all chunks put in, in place."""
    operands = (q, pages, batch.page_tables, batch.query_starts, batch.context_lens, *work, out)
    return pl.pallas_call(
        partial(_chunk_kernel, tile=tile),
        grid=(pages.shape[3], work.unit_rows.shape[0]),
        in_specs=[EVERYWHERE] * len(operands),
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="paged_chunk_attention",
    )(*operands)


def _chunk_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N, B, 2, K, D]
    tables_ref,  # [S, P]
    query_starts_ref,  # [S + 1]
    context_lens_ref,  # [S]
    row_units_ref,  # [S + 1]
    unit_rows_ref,  # [W]
    unit_tokens_ref,  # [1]
    _,  # the result's memory
    out_ref,  # [T, H, D]
    *,
    tile: Tile,
):
    """One tile of queries of one row, for one KV head."""
    kv_head, unit = pl.program_id(0), pl.program_id(1)
    group, head_dim = q_ref.shape[1] // pages_ref.shape[3], q_ref.shape[2]
    tile_queries = tile.rows // group

    @pl.when(unit < row_units_ref[row_units_ref.shape[0] - 1])
    def _():
        row = unit_rows_ref[unit]
        first = query_starts_ref[row] + (unit - row_units_ref[row]) * tile_queries
        end = jnp.minimum(first + tile_queries, query_starts_ref[row + 1])
        offset = context_lens_ref[row] - query_starts_ref[row + 1]  # from a token's number to its position
        place = jnp.arange(tile.rows)
        token, head = first + place // group, kv_head * group + place % group  # [rows], [rows]
        mine = (token < end) & (place < tile_queries * group)

        queries = load_rows(q_ref, (token, head), head_dim, mine)  # [rows, D]
        carry = empty_carry(tile.rows, head_dim)
        attend = partial(attend_tile, queries, pages_ref, tables_ref, row, kv_head, tile.tokens, limit=end + offset)
        num_seen_by_all = (first + offset + 1) // tile.tokens
        carry = jax.lax.fori_loop(
            0, num_seen_by_all, lambda turn, carry: attend(turn * tile.tokens, None, carry), carry
        )
        num_turns = pl.cdiv(end + offset, tile.tokens)
        carry = jax.lax.fori_loop(
            num_seen_by_all, num_turns, lambda turn, carry: attend(turn * tile.tokens, token + offset, carry), carry
        )
        _, total, weighted = carry
        store_rows(out_ref, (token, head), head_dim, mine, weighted / total[:, None])


def attend_decode_rows(
    q: Float[Array, "T H D"],
    pages: KVPages,
    batch: Batch,
    work: WorkSchedule,
    out: Float[Array, "T H D"],
    tile: Tile,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """`out` with the results of all decode rows put in, in place."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_units = work.row_units.shape[0] - 1, work.unit_rows.shape[0]
    operands = (q, pages, batch.page_tables, batch.context_lens, *work)
    per_unit = jax.ShapeDtypeStruct((num_units, num_heads), jnp.float32)
    pieces = pl.pallas_call(
        partial(_decode_kernel, tile=tile),
        grid=(pages.shape[3], num_units),
        in_specs=[EVERYWHERE] * len(operands),
        out_specs=[EVERYWHERE] * 3,
        out_shape=[per_unit, per_unit, jax.ShapeDtypeStruct((num_units, num_heads, head_dim), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="paged_decode_attention",
    )(*operands)

    operands = (*pieces, work.row_units, batch.num_decode[None], out)
    return pl.pallas_call(
        _join_kernel,
        grid=(num_heads, min(num_rows, num_tokens)),
        in_specs=[EVERYWHERE] * len(operands),
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_decode_join",
    )(*operands)


def _decode_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N, B, 2, K, D]
    tables_ref,  # [S, P]
    context_lens_ref,  # [S]
    row_units_ref,  # [S + 1]
    unit_rows_ref,  # [W]
    unit_tokens_ref,  # [1]
    top_ref,  # [W, H]
    total_ref,  # [W, H]
    weighted_ref,  # [W, H, D]
    *,
    tile: Tile,
):
    """One piece of one row's context, for one KV head."""
    kv_head, unit = pl.program_id(0), pl.program_id(1)
    group, head_dim = q_ref.shape[1] // pages_ref.shape[3], q_ref.shape[2]

    @pl.when(unit < row_units_ref[row_units_ref.shape[0] - 1])
    def _():
        row = unit_rows_ref[unit]
        start = (unit - row_units_ref[row]) * unit_tokens_ref[0]
        end = jnp.minimum(start + unit_tokens_ref[0], context_lens_ref[row])
        place = jnp.arange(tile.rows)
        head, mine = kv_head * group + place, place < group

        queries = load_rows(q_ref, (row, head), head_dim, mine)  # [rows, D]; a decode row's token has the row's number
        visible = jnp.full(tile.rows, end - 1)
        attend = partial(attend_tile, queries, pages_ref, tables_ref, row, kv_head, tile.tokens, limit=end)
        num_turns = pl.cdiv(end - start, tile.tokens)
        top, total, weighted = jax.lax.fori_loop(
            0,
            num_turns,
            lambda turn, carry: attend(start + turn * tile.tokens, visible, carry),
            empty_carry(tile.rows, head_dim),
        )
        plgpu.store(top_ref.at[unit, head], top, mask=mine)
        plgpu.store(total_ref.at[unit, head], total, mask=mine)
        store_rows(weighted_ref, (unit, head), head_dim, mine, weighted)


def _join_kernel(
    top_ref,  # [W, H]
    total_ref,  # [W, H]
    weighted_ref,  # [W, H, D]
    row_units_ref,  # [S + 1]
    num_decode_ref,  # [1]
    _,  # the result's memory
    out_ref,  # [T, H, D]
):
    """All pieces of one row, for one query head."""
    head, row = pl.program_id(0), pl.program_id(1)
    head_dim = weighted_ref.shape[2]

    @pl.when(row < num_decode_ref[0])
    def _():
        first, end = row_units_ref[row], row_units_ref[row + 1]

        def join(turn, carry):
            top, total, weighted = carry  # [], [], [D]
            unit = first + turn * JOINED_UNITS + jnp.arange(JOINED_UNITS)
            mine = unit < end
            tops = plgpu.load(top_ref.at[unit, head], mask=mine, other=LOWEST)
            totals = plgpu.load(total_ref.at[unit, head], mask=mine, other=0.0)
            values = load_rows(weighted_ref, (unit, head), head_dim, mine)  # [units, D]
            new_top = jnp.maximum(top, tops.max())
            scale, fade = jnp.exp2(tops - new_top), jnp.exp2(top - new_top)
            added = jnp.sum(values * scale[:, None], axis=0)
            return new_top, total * fade + jnp.sum(totals * scale), weighted * fade + added

        initial = (jnp.float32(LOWEST), jnp.float32(0.0), jnp.zeros(power_of_two(head_dim)))
        _, total, weighted = jax.lax.fori_loop(0, pl.cdiv(end - first, JOINED_UNITS), join, initial)
        column = jnp.arange(power_of_two(head_dim))
        plgpu.store(out_ref.at[row, head, column], (weighted / total).astype(out_ref.dtype), mask=column < head_dim)
