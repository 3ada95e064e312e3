"""Paged attention of chunks for Hopper, in Pallas' Mosaic GPU backend.

One block serves one KV head of one tile of queries, the heads of the group side by side. TMA copies queries and results from
and to their places in the batch. Sums are in float32. The kernel's values are tested in interpret mode, and it compiles for
H100 without spills. Its predecessor, whose tiles XLA gathered, was right and faster than Triton's kernel on an H100 and an H200
(`docs/gpu_kernels.md`).

One warpgroup moves everything by TMA: the queries; the pages, as far ahead as there are buffers; and the results. Two multiply,
each one half of the tile of queries, in turns (FlashAttention-3's schedule): while the tensor cores work on one warpgroup's
products, the other computes its softmax. Weights are wgmma's operand in registers, and their sums stay in one accumulator for
all steps.

JAX's interpreter (0.11.2) knows no such operand, no such accumulator, no asynchronous wgmma and no folded axes.
`tests/support/wgmma_interpreter.py` teaches it all four, so that the code that is interpreted is the code that is compiled.
"""

from functools import partial
from math import e, gcd, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages, as_array
from jinfercept.pallas.tiles import Heads
from jinfercept.pallas.work_schedule import WorkSchedule

HALF = 64  # rows of a warpgroup: of one wgmma
COMPUTING = 2  # warpgroups that multiply; one more fetches
ROWS = COMPUTING * HALF  # (query, head) pairs of a tile, at most
TOKENS = 128  # of context per step: as many as registers hold the scores of
BUFFERED = 256 * 128  # numbers of keys that are being fetched or used; as many of values
LOWEST = -1e30  # of a masked score: its weight is exactly 0
# of a thread; together at most the 3 · 168 that a block of 384 threads starts with
COMPUTE_REGISTERS, FETCH_REGISTERS = 240, 24
SCORES = plgpu.WGMMAAccumulatorRef((HALF, TOKENS), jnp.float32)
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)  # what a warpgroup's registers hold, in rows of whole swizzles
GROUPS = (*range(1, 17), 24, 32, 40, 48, HALF)  # query heads of a KV head: others take more registers or shared memory
LEAST_PAGE = 8  # a page has a multiple of so many tokens: the rows of a swizzled tile


def check(q: HeadRows, pages: KVPages) -> None:
    """Raise `ValueError` if the type, the head dim, the number of query heads or the page size has no kernel."""
    heads, page_size = Heads.of(q, pages), pages.shape[1]
    if not is_supported(q.dtype, pages.dtype, heads, page_size):
        got = f"queries in {q.dtype}, pages of {page_size} tokens in {pages.dtype}, head dim {heads.head_dim}"
        got += f", {heads.group} query heads for each KV head"
        fix = f"{' or '.join(DTYPES)} for both, a head dim of 64 or 128, pages of a multiple of {LEAST_PAGE} tokens"
        fix += " and at most 16 query heads for each KV head, or 24, 32, 40, 48 or 64"
        raise ValueError(f"the Mosaic kernel has no such attention; got {got}; fix: use {fix}, or the kernel triton")


def is_supported(q: DTypeLike, pages: DTypeLike, heads: Heads, page_size: int) -> bool:
    """Whether the kernel can be compiled for queries and pages of these types."""
    dtype = jnp.dtype(q)
    shapes = heads.head_dim in HEAD_DIMS and heads.group in GROUPS and page_size % LEAST_PAGE == 0
    return dtype == jnp.dtype(pages) and dtype.name in DTYPES and shapes


def attend_chunks(q: HeadRows, pages: KVPages, batch: Batch, *, interpret: bool = False) -> HeadRows:
    """The results of all chunks, for arguments that pass `check` and a batch with its `work`. All other tokens are left
    unwritten. `interpret` runs slowly without a GPU, by an interpreter that knows asynchronous wgmma."""
    work = WorkSchedule(*map(as_array, batch.work.chunks))
    return _attend_units(q, pages, batch._replace(work=None, states=None, window=None), work, interpret)


# jitted with the schedule as arrays, so that all layers of an executable share one kernel, which is lowered once
@partial(jax.jit, static_argnames="interpret")
def _attend_units(q: HeadRows, pages: KVPages, batch: Batch, work: WorkSchedule, interpret: bool) -> HeadRows:
    heads = Heads.of(q, pages)
    num_pages, page_size = pages.shape[:2]
    num_units, most = work.unit_rows.shape[0], COMPUTING * warpgroup_queries(heads.group)
    row, skipped = work.unit_rows, work.unit_starts
    first, ends = batch.query_starts[row] + skipped, batch.query_starts[row + 1]
    starts = batch.context_lens[row] - ends + first
    limits = jnp.minimum(starts + most, batch.context_lens[row])
    limits = jnp.where(jnp.arange(num_units) < work.row_units[-1], limits, 0)

    def paged_chunk_attention(*refs):
        chunk_kernel(*refs, heads=heads, page_size=page_size)

    return plgpu.kernel(
        paged_chunk_attention,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[share(heads, page_size, q.dtype)],
        grid=(heads.num_kv_heads, num_units),
        grid_names=("kv_head", "unit"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(q, pages.reshape(num_pages * page_size, -1), batch.page_tables, row, first, ends, starts, limits)


class Shared(NamedTuple):
    """Shared memory of a block; the barriers signal which buffers are filled, and which may be overwritten."""

    staged: Any  # [COMPUTING, queries, G, D], as heads lie in q: the queries, and the results at last
    queries: Any  # [COMPUTING, HALF, D]
    keys: Any  # [stages, TOKENS, D]
    values: Any  # [stages, TOKENS, D]
    queries_there: Any
    results_there: Any
    keys_there: Any
    values_there: Any
    keys_free: Any
    values_free: Any
    turns: Any  # of the warpgroups, to issue products


class Visible(NamedTuple):
    """The last context position that queries see."""

    all_rows: Any  # that all see
    by_row: Any  # [HALF, TOKENS]


class Softmax(NamedTuple):
    """An online softmax after a step; scores count in powers of 2."""

    weights: Any  # [HALF, TOKENS], of the step
    top: Any  # [HALF], the maximum
    total: Any  # [HALF], the sum of all weights


def warpgroup_queries(group: int) -> int:
    """Query tokens of a warpgroup's half of a tile, with all their heads."""
    return HALF // group


def _staged_queries(group: int) -> int:
    """Query tokens whose rows fill a warpgroup, and are a multiple of 8: so often the swizzle repeats."""
    whole = 8 // gcd(8, group)
    return -(-HALF // (group * whole)) * whole


def share(heads: Heads, page_size: int, dtype: DTypeLike) -> Shared:
    """Shapes and barriers of a block's shared memory."""
    head_dim, num_staged = heads.head_dim, _staged_queries(heads.group)
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    transforms = (plgpu.TilingTransform((8, 64)), swizzle)  # pyright: ignore[reportAbstractUsage]
    by_token = (plgpu.TilingTransform((1, 1, 64)), swizzle)  # pyright: ignore[reportAbstractUsage]
    pieces, stages = TOKENS // gcd(page_size, TOKENS), BUFFERED // (TOKENS * head_dim)
    there = plgpu.Barrier(num_arrivals=pieces, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages)
    return Shared(
        staged=plgpu.SMEM((COMPUTING, num_staged, heads.group, head_dim), dtype, transforms=by_token),
        queries=plgpu.SMEM((COMPUTING, HALF, head_dim), dtype, transforms=transforms),
        keys=plgpu.SMEM((stages, TOKENS, head_dim), dtype, transforms=transforms),
        values=plgpu.SMEM((stages, TOKENS, head_dim), dtype, transforms=transforms),
        queries_there=plgpu.Barrier(num_barriers=COMPUTING),
        results_there=plgpu.Barrier(num_barriers=COMPUTING),
        keys_there=there,
        values_there=there,
        keys_free=free,
        values_free=free,
        turns=plgpu.Barrier(num_barriers=COMPUTING),
    )


def chunk_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N · B, 2 · K · D]
    tables_ref,  # [S, P]
    unit_rows_ref,  # [W]
    first_tokens_ref,  # [W]: of a unit's first query
    end_tokens_ref,  # [W]: of its row's last query, plus one
    starts_ref,  # [W]: the position of a unit's first query
    limits_ref,  # [W]: the context tokens that its last query sees; 0 of a unit without work
    out_ref,  # [T, H, D]
    shared: Shared,
    *,
    heads: Heads,
    page_size: int,
):
    """One tile of queries of one row, for one KV head."""
    kv_head, unit, warpgroup = lax.axis_index("kv_head"), lax.axis_index("unit"), lax.axis_index("warpgroup")
    limit = limits_ref[unit]
    steps = lax.div(limit + TOKENS - 1, TOKENS)
    own, of_head = warpgroup_queries(heads.group), pl.ds(kv_head * heads.group, heads.group)

    @pl.when((limit > 0) & (warpgroup == COMPUTING))
    def _():  # first, so that no register keeps through the other branch what this one reads
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        for half in range(COMPUTING):
            source = q_ref.at[pl.ds(first_tokens_ref[unit] + half * own, own), of_head]
            plgpu.copy_gmem_to_smem(source, shared.staged.at[half, pl.ds(0, own)], shared.queries_there.at[half])
        fetch = partial(_fetch, shared, pages_ref, tables_ref, unit_rows_ref[unit], kv_head, steps, heads, page_size)
        lax.fori_loop(0, steps + shared.keys.shape[0], lambda step, _: fetch(step), None)
        for half in range(COMPUTING):
            plgpu.barrier_wait(shared.results_there.at[half])
            token = first_tokens_ref[unit] + half * own
            count = jnp.clip(end_tokens_ref[unit] - token, 0, own)
            # pieces of 1, 2, 4, … tokens, since a chunk may end within a tile
            for size in (
                1 << bit for bit in range(own.bit_length())
            ):  # one copy would write over the next row's results
                done = count & -2 * size
                results, place = (
                    shared.staged.at[half, pl.ds(done, size)],
                    out_ref.at[pl.ds(token + done, size), of_head],
                )
                pl.when(count & size > 0)(partial(plgpu.copy_smem_to_gmem, results, place))
        plgpu.wait_smem_to_gmem(0)

    @pl.when((limit > 0) & (warpgroup < COMPUTING))
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        row = plgpu.broadcasted_iota(jnp.int32, (HALF, TOKENS), 0, layout=plgpu.Layout.WGMMA)
        start = starts_ref[unit] + warpgroup * own
        visible = Visible(start, start + row // heads.group)
        staged = shared.staged.at[warpgroup]
        rows = staged.reshape(staged.shape[0] * heads.group, heads.head_dim).at[pl.ds(0, HALF)]
        plgpu.barrier_wait(shared.queries_there.at[warpgroup])
        # Not in the layout of the results: the compiler would keep the addresses that both have until those are stored.
        shared.queries.at[warpgroup][...] = plgpu.load(rows, layout=plgpu.Layout.WGMMA_UPCAST_4X)
        plgpu.commit_smem()
        attend = partial(_attend, shared, warpgroup, visible, limit, steps, heads.head_dim)
        out = pl.run_scoped(attend, plgpu.WGMMAAccumulatorRef((HALF, heads.head_dim), jnp.float32))
        rows[...] = out.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.results_there.at[warpgroup])


def _attend(shared: Shared, warpgroup, visible: Visible, limit, steps, head_dim: int, weighted):
    soften = partial(_soften, visible, head_dim)
    by_row, dtype = plgpu.Layout.WGMMA.reduce(1), shared.queries.dtype
    top, total = (plgpu.layout_cast(jnp.full(HALF, number), by_row) for number in (LOWEST, 0.0))

    def begin(scores):
        plgpu.barrier_wait(shared.keys_there.at[0])
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(shared.turns.at[0]))
        plgpu.barrier_wait(shared.turns.at[warpgroup])
        _multiply_keys(shared, warpgroup, 0, scores)
        plgpu.barrier_arrive(shared.turns.at[1 - warpgroup])
        return _scores(shared, 0, scores, pending=0)

    def attend(step, before):
        slot, slot_before = _slot(shared, step), _slot(shared, step - 1)

        def multiply(scores):
            # a turn issues two products, a step's scores and the weighted values of the step before; the softmax starts when
            # the first is done
            plgpu.barrier_wait(shared.keys_there.at[slot])
            plgpu.barrier_wait(shared.turns.at[warpgroup])
            _multiply_keys(shared, warpgroup, slot, scores)
            plgpu.wgmma(weighted, before.weights, shared.values.at[slot_before])
            plgpu.barrier_arrive(shared.turns.at[1 - warpgroup])
            return soften(step, _scores(shared, slot, scores, pending=1), before.top, before.total)

        # The next barrier keeps the softmax before the wait for the values. Weights are rounded after it: the registers of
        # wgmma's operand must not be written while it runs.
        softened, fade = lax.optimization_barrier(pl.run_scoped(multiply, SCORES))
        plgpu.barrier_wait(shared.values_there.at[slot])
        sums = plgpu.wgmma_accumulator_load(weighted)
        plgpu.barrier_arrive(shared.values_free.at[slot_before])
        weighted[...] = sums * lax.broadcast_in_dim(fade, sums.shape, [0])
        return softened._replace(weights=softened.weights.astype(dtype))

    softened, _ = soften(0, pl.run_scoped(begin, SCORES), top, total)
    plgpu.barrier_wait(shared.values_there.at[0])
    softened = softened._replace(weights=softened.weights.astype(dtype))
    softened = lax.fori_loop(1, steps, attend, softened)
    slot = _slot(shared, steps - 1)
    written = limit - (steps - 1) * TOKENS
    clears = (warpgroup == 0) & (written < TOKENS)  # whose turn is before the other's
    pl.when(clears)(lambda: _clear(shared.values.at[slot], written))
    plgpu.barrier_wait(shared.turns.at[warpgroup])
    plgpu.wgmma(weighted, softened.weights, shared.values.at[slot])
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(shared.turns.at[1]))
    sums = plgpu.wgmma_accumulator_load(weighted)
    plgpu.barrier_arrive(shared.values_free.at[slot])
    return sums / lax.broadcast_in_dim(softened.total, sums.shape, [0])


def _slot(shared: Shared, step):
    return lax.rem(step, shared.keys.shape[0])


def _multiply_keys(shared: Shared, warpgroup, slot, scores) -> None:
    plgpu.wgmma(scores, shared.queries.at[warpgroup], shared.keys.at[slot].transpose((1, 0)))


def _scores(shared: Shared, slot, scores, *, pending: int):
    finished = plgpu.wgmma_accumulator_load(scores, wait_n=pending)
    plgpu.barrier_arrive(shared.keys_free.at[slot])
    return finished


def _soften(visible: Visible, head_dim: int, step, scores, top, total):
    scale, start = head_dim**-0.5 * log2(e), step * TOKENS

    def masked(scores):
        position = start + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(position <= visible.by_row, scores, LOWEST)

    scores = lax.cond(start + TOKENS - 1 > visible.all_rows, masked, lambda scores: scores, scores)
    new_top = jnp.maximum(top, scores.max(axis=1) * scale)
    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    fade = jnp.exp2(top - new_top)
    return Softmax(weights, new_top, total * fade + weights.sum(axis=1)), fade


def _clear(values, num_written) -> None:
    """Put zeros over the last values, behind the context's end: slots there may hold anything, and 0 · NaN is NaN."""
    place = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    stored = plgpu.load(values, (), layout=plgpu.Layout.WGMMA)
    values[...] = jnp.where(place < num_written, stored, jnp.zeros_like(stored))
    plgpu.commit_smem()


def _fetch(shared: Shared, pages_ref, tables_ref, row, kv_head, steps, heads: Heads, page_size: int, step) -> None:
    """Bring a step's keys and values to their buffers, once those are free; behind the last step, only wait."""
    slot, piece = _slot(shared, step), gcd(page_size, TOKENS)
    for side, (buffer, there, free) in enumerate(
        ((shared.keys, shared.keys_there, shared.keys_free), (shared.values, shared.values_there, shared.values_free))
    ):
        pl.when(step >= shared.keys.shape[0])(lambda free=free: plgpu.barrier_wait(free.at[slot]))

        @pl.when(step < steps)
        def _(side=side, buffer=buffer, there=there):
            column = pl.ds((side * heads.num_kv_heads + kv_head) * heads.head_dim, heads.head_dim)
            for index in range(TOKENS // piece):
                position = step * TOKENS + index * piece
                page = tables_ref[row, jnp.minimum(lax.div(position, page_size), tables_ref.shape[1] - 1)]
                source = pages_ref.at[pl.ds(page * page_size + lax.rem(position, page_size), piece), column]
                plgpu.copy_gmem_to_smem(source, buffer.at[slot, pl.ds(index * piece, piece)], there.at[slot])
