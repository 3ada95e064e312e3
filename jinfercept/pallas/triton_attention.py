"""Paged attention for NVIDIA GPUs from Ampere on, in Pallas' Triton backend: two kernels, and a small third one that joins.

The whole pool is an operand without blocks, and pages are found by the numbers in the tables: the cost does not depend on
the pool's size. Sums are in float32. 16-bit numbers are multiplied by tensor cores, float32 as float32, never as TF32.

* Decode rows have one query each. Their contexts are cut into pieces (`work_schedule.split_contexts`), so that few long rows
  fill the chip as well as many short ones; a piece leaves its maximum, its sum and its weighted values, and `_join_kernel`
  makes one result of a row's pieces (flash-decoding). It also writes the zeros of the padding tokens.
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
AMPERE_MULTIPROCESSORS = 108
DTYPES = ("bfloat16", "float16", "float32")
LARGEST_HEAD_DIM = 256
JOINED_UNITS = 16  # pieces of a row that are joined in one turn
EVERYWHERE = pl.BlockSpec(memory_space=pl.ANY)


def paged_attention_triton(
    q: Float[Array, "T H D"],
    pages: KVPages,
    batch: Batch,
    *,
    decode_only: bool = False,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Causal attention of every query token over its row's pages, scaled by 1/√D; padding tokens give zeros.

    Same arguments and result as `paged_attention_reference`; the result has the type of `q`.

    Args:
        q, pages, batch: see there; q and pages have the same type. Its `work` is made here if it is empty.
        decode_only: the batch has no chunks: their kernel is left out.
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
        tiles = tiles_for(heads, AMPERE if interpret else compute_capability())
    chunks, splits = batch.work or schedule_work(batch, heads, tiles, decode_only=decode_only)
    out = None
    if not decode_only:
        assert chunks is not None
        out = _attend_chunks(q, pages, batch, chunks, tiles.chunk, interpret)
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


def tiles_for(heads: Heads, capability: int) -> Tiles:
    """The tiles for a model on the GPU that the code is lowered for, of this compute capability."""
    return choose_tiles(heads.head_dim, heads.group, heads.itemsize, capability, num_multiprocessors())


def schedule_work(
    batch: Batch, heads: Heads, tiles: Tiles | None = None, *, decode_only: bool = False
) -> tuple[WorkSchedule | None, WorkSchedule]:
    """The work schedules of the chunks, None without them, and of the decode rows: the same for all layers of a step."""
    if tiles is None:
        tiles = tiles_for(heads, compute_capability())
    splits = split_contexts(batch, heads.num_kv_heads, tiles.programs, tiles.decode.tokens)
    if decode_only:
        return None, splits
    return tile_chunks(batch, batch.tokens.shape[0], tiles.chunk.rows // heads.group), splits


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


def num_multiprocessors() -> int:
    """Of the GPU that the code is lowered for; of an A100 where that is none, in interpret mode."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    cores = getattr(jax.local_devices()[0], "core_count", None) if device is None else device.num_cores
    return cores or AMPERE_MULTIPROCESSORS


def _attend_chunks(
    q: Float[Array, "T H D"],
    pages: KVPages,
    batch: Batch,
    work: WorkSchedule,
    tile: Tile,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """The results of all chunks; all other tokens are left unwritten."""
    operands = (q, pages, batch.query_starts, batch.context_lens, batch.page_tables)
    operands += (work.row_units, work.unit_rows, work.unit_starts)
    return pl.pallas_call(
        partial(_chunk_kernel, tile=tile),
        grid=(pages.shape[3], work.unit_rows.shape[0]),
        in_specs=[EVERYWHERE] * len(operands),
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="paged_chunk_attention",
    )(*operands)


def _chunk_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N, B, 2, K, D]
    query_starts_ref,  # [S + 1]
    context_lens_ref,  # [S]
    tables_ref,  # [S, P]
    row_units_ref,  # [S + 1]
    unit_rows_ref,  # [W]
    unit_starts_ref,  # [W]
    out_ref,  # [T, H, D]
    *,
    tile: Tile,
):
    """One tile of queries of one row, for one KV head."""
    kv_head, program = pl.program_id(0), pl.program_id(1)
    group, head_dim = q_ref.shape[1] // pages_ref.shape[3], q_ref.shape[2]
    tile_queries = tile.rows // group

    @pl.when(program < row_units_ref[row_units_ref.shape[0] - 1])
    def _():
        row = unit_rows_ref[program]
        first = query_starts_ref[row] + unit_starts_ref[program]
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
    chunks: Float[Array, "T H D"] | None,
    tile: Tile,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """The results of all decode rows, zeros for padding tokens, and the results of `chunks`, whose memory is used, between."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_units = work.row_units.shape[0] - 1, work.unit_rows.shape[0]
    operands = (q, pages, batch.context_lens, batch.page_tables, *work[:4])
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

    operands = (*pieces, work.row_units, batch.num_decode[None], batch.query_starts)
    operands += () if chunks is None else (chunks,)
    return pl.pallas_call(
        _join_kernel,
        grid=(num_heads, min(num_rows, num_tokens)),
        in_specs=[EVERYWHERE] * len(operands),
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={} if chunks is None else {len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_decode_join",
    )(*operands)


def _decode_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N, B, 2, K, D]
    context_lens_ref,  # [S]
    tables_ref,  # [S, P]
    row_units_ref,  # [S + 1]
    unit_rows_ref,  # [W]
    unit_starts_ref,  # [W]
    unit_tokens_ref,  # [1]
    top_ref,  # [W, H]
    total_ref,  # [W, H]
    weighted_ref,  # [W, H, D]
    *,
    tile: Tile,
):
    """One piece of one row's context, for one KV head."""
    kv_head, program = pl.program_id(0), pl.program_id(1)
    group, head_dim = q_ref.shape[1] // pages_ref.shape[3], q_ref.shape[2]

    @pl.when(program < row_units_ref[row_units_ref.shape[0] - 1])
    def _():
        row, start = unit_rows_ref[program], unit_starts_ref[program]
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
        unit = row_units_ref[row] + start // unit_tokens_ref[0]
        plgpu.store(top_ref.at[unit, head], top, mask=mine)
        plgpu.store(total_ref.at[unit, head], total, mask=mine)
        store_rows(weighted_ref, (unit, head), head_dim, mine, weighted)


def _join_kernel(
    top_ref,  # [W, H]
    total_ref,  # [W, H]
    weighted_ref,  # [W, H, D]
    row_units_ref,  # [S + 1]
    num_decode_ref,  # [1]
    query_starts_ref,  # [S + 1]
    *results,  # the chunks' [T, H, D], if there are any; the same memory as [T, H, D] with all results
):
    """All pieces of one row, and the zeros of some padding tokens, for one query head."""
    head, row = pl.program_id(0), pl.program_id(1)
    head_dim, out_ref = weighted_ref.shape[2], results[-1]
    column = jnp.arange(power_of_two(head_dim))

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
        plgpu.store(out_ref.at[row, head, column], (weighted / total).astype(out_ref.dtype), mask=column < head_dim)

    num_rows, padding = pl.num_programs(1), query_starts_ref[query_starts_ref.shape[0] - 1] + row
    zeros = jnp.zeros(power_of_two(head_dim), out_ref.dtype)

    def clear(turn, _):
        plgpu.store(out_ref.at[padding + turn * num_rows, head, column], zeros, mask=column < head_dim)

    jax.lax.fori_loop(0, pl.cdiv(out_ref.shape[0] - padding, num_rows), clear, None)
