"""The body of the Mosaic kernel: the shared memory of a block, and the work of its warpgroups.

One warpgroup fetches pages by TMA, as far ahead as there are buffers; two multiply by wgmma, each one half of the tile of
queries, and keep the online softmax in registers. A step's softmax runs while the next step's scores are multiplied. Interpret
mode knows neither wgmma's operand in registers nor accumulators that outlive a step (jax 0.11.2). So weights go through shared
memory and sums are added up in registers; both are the first things to change when the kernel is timed on a GPU.
"""

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.triton_softmax import LOG2_E, LOWEST

HALF = 64  # rows of a warpgroup: of one wgmma
COMPUTING = 2  # warpgroups that multiply; one more fetches
ROWS = COMPUTING * HALF  # (query, head) pairs of a tile
TOKENS = 64  # of context per step
STAGES = 4  # steps whose keys and values are being fetched or used
COMPUTE_REGISTERS, FETCH_REGISTERS = 240, 32  # of a thread


class Shared(NamedTuple):
    """Shared memory of a block; the barriers signal which buffers are filled, and which may be overwritten."""

    queries: Any  # [COMPUTING, HALF, D]; the result at last
    weights: Any  # [COMPUTING, HALF, TOKENS]
    keys: Any  # [STAGES, TOKENS, D]
    values: Any  # [STAGES, TOKENS, D]
    queries_there: Any
    keys_there: Any
    values_there: Any
    keys_free: Any
    values_free: Any
    cleared: Any


def share(head_dim: int, page_size: int, dtype: DTypeLike) -> Shared:
    """Shapes and barriers of a block's shared memory."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    pieces = TOKENS // gcd(page_size, TOKENS)
    there = plgpu.Barrier(num_arrivals=pieces, num_barriers=STAGES)
    free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=STAGES)
    return Shared(
        queries=plgpu.SMEM((COMPUTING, HALF, head_dim), dtype, transforms=transforms),
        weights=plgpu.SMEM((COMPUTING, HALF, TOKENS), dtype, transforms=transforms),
        keys=plgpu.SMEM((STAGES, TOKENS, head_dim), dtype, transforms=transforms),
        values=plgpu.SMEM((STAGES, TOKENS, head_dim), dtype, transforms=transforms),
        queries_there=plgpu.Barrier(num_barriers=COMPUTING),
        keys_there=there,
        values_there=there,
        keys_free=free,
        values_free=free,
        cleared=plgpu.Barrier(num_arrivals=COMPUTING),
    )


def chunk_kernel(
    q_ref,  # [W · ROWS, K · D]
    pages_ref,  # [N · B, 2 · K · D]
    tables_ref,  # [S, P]
    unit_rows_ref,  # [W]
    starts_ref,  # [W]: the position of a unit's first query
    limits_ref,  # [W]: the context tokens that its last query sees; 0 of a unit without work
    out_ref,  # [W · ROWS, K · D]
    shared: Shared,
    *,
    heads: Heads,
    page_size: int,
):
    """One tile of queries of one row, for one KV head."""
    kv_head, unit, warpgroup = lax.axis_index("kv_head"), lax.axis_index("unit"), lax.axis_index("warpgroup")
    limit = limits_ref[unit]
    steps = lax.div(limit + TOKENS - 1, TOKENS)

    @pl.when((limit > 0) & (warpgroup < COMPUTING))
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        rows, columns = pl.ds(unit * ROWS + warpgroup * HALF, HALF), pl.ds(kv_head * heads.head_dim, heads.head_dim)
        queries, there = shared.queries.at[warpgroup], shared.queries_there.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[rows, columns], queries, there)
        plgpu.barrier_wait(there)
        place = warpgroup * HALF + plgpu.broadcasted_iota(jnp.int32, (HALF, TOKENS), 0, layout=plgpu.Layout.WGMMA)
        visible = starts_ref[unit] + place // heads.group  # each row's last visible position
        score = partial(_score, shared, warpgroup)
        soften = partial(_soften, shared, warpgroup, visible, heads)
        weigh = partial(_weigh, shared, warpgroup, limit)

        def attend(step, carry):
            scores, top, total, weighted = carry
            scores, (top, total, weighted) = score(step + 1, lambda: soften(step, scores, top, total, weighted))
            return scores, top, total, weigh(step, weighted)

        scores, _ = score(0, lambda: None)
        scores, top, total, weighted = lax.fori_loop(0, steps - 1, attend, (scores, *_empty_carry(heads.head_dim)))
        _, total, weighted = soften(steps - 1, scores, top, total, weighted)
        weighted = weigh(steps - 1, weighted)
        queries[...] = (weighted / lax.broadcast_in_dim(total, weighted.shape, [0])).astype(queries.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, out_ref.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    @pl.when((limit > 0) & (warpgroup == COMPUTING))
    def _():
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        fetch = partial(_fetch, shared, pages_ref, tables_ref, unit_rows_ref[unit], kv_head, steps, heads, page_size)
        lax.fori_loop(0, steps + STAGES, lambda step, _: fetch(step), None)


def _empty_carry(head_dim: int):
    """The carry of an online softmax: maximum [HALF], sum [HALF], weighted values [HALF, D]; scores count in powers of 2."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    top = plgpu.layout_cast(jnp.full(HALF, LOWEST), by_row)
    total = plgpu.layout_cast(jnp.zeros(HALF), by_row)
    return top, total, plgpu.layout_cast(jnp.zeros((HALF, head_dim)), plgpu.Layout.WGMMA)


def _score(shared: Shared, warpgroup, step, meanwhile: Callable[[], Any]):
    """The scores of a step's keys, not scaled, and what `meanwhile` returns, which runs while tensor cores multiply."""
    slot = lax.rem(step, STAGES)
    plgpu.barrier_wait(shared.keys_there.at[slot])

    def score(sums):
        plgpu.wgmma(sums, shared.queries.at[warpgroup], shared.keys.at[slot].transpose((1, 0)))
        result = meanwhile()
        return sums[...], result

    scored = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((HALF, TOKENS), jnp.float32))
    plgpu.barrier_arrive(shared.keys_free.at[slot])
    return scored


def _soften(shared: Shared, warpgroup, visible, heads: Heads, step, scores, top, total, weighted):
    """The maximum and the sum after a step's scores, and the values weighted before; its weights go to shared memory."""
    scores = scores * (heads.head_dim**-0.5 * LOG2_E)
    position = step * TOKENS + plgpu.broadcasted_iota(jnp.int32, (HALF, TOKENS), 1, layout=plgpu.Layout.WGMMA)
    scores = jnp.where(position <= visible, scores, LOWEST)
    new_top = jnp.maximum(top, scores.max(axis=1))
    weights, fade = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0])), jnp.exp2(top - new_top)
    shared.weights[warpgroup] = weights.astype(shared.weights.dtype)
    plgpu.commit_smem()
    weighted = weighted * lax.broadcast_in_dim(fade, weighted.shape, [0])
    return new_top, total * fade + weights.sum(axis=1), weighted


def _weigh(shared: Shared, warpgroup, limit, step, weighted):
    """The weighted values after one more step."""
    slot = lax.rem(step, STAGES)
    values = shared.values.at[slot]
    plgpu.barrier_wait(shared.values_there.at[slot])
    pl.when((step + 1) * TOKENS > limit)(lambda: _clear(shared, warpgroup, values, limit - step * TOKENS))

    def weigh(sums):
        plgpu.wgmma(sums, shared.weights.at[warpgroup], values)
        return sums[...]

    added = pl.run_scoped(weigh, plgpu.WGMMAAccumulatorRef(weighted.shape, jnp.float32))
    plgpu.barrier_arrive(shared.values_free.at[slot])
    return weighted + added


def _clear(shared: Shared, warpgroup, values, num_written) -> None:
    """Put zeros over the last values, behind the context's end: slots there may hold anything, and 0 · NaN is NaN."""

    @pl.when(warpgroup == 0)
    def _():
        place = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
        found = plgpu.load(values, (), layout=plgpu.Layout.WGMMA)
        values[...] = jnp.where(place < num_written, found, jnp.zeros_like(found))
        plgpu.commit_smem()

    plgpu.barrier_arrive(shared.cleared)
    plgpu.barrier_wait(shared.cleared)


def _fetch(shared: Shared, pages_ref, tables_ref, row, kv_head, steps, heads: Heads, page_size: int, step) -> None:
    """Bring a step's keys and values to their buffers, once those are free; behind the last step, only wait."""
    slot, piece = lax.rem(step, STAGES), gcd(page_size, TOKENS)
    for side, (buffer, there, free) in enumerate(
        ((shared.keys, shared.keys_there, shared.keys_free), (shared.values, shared.values_there, shared.values_free))
    ):
        pl.when(step >= STAGES)(lambda free=free: plgpu.barrier_wait(free.at[slot]))

        @pl.when(step < steps)
        def _(side=side, buffer=buffer, there=there):
            column = pl.ds((side * heads.num_kv_heads + kv_head) * heads.head_dim, heads.head_dim)
            for index in range(TOKENS // piece):
                position = step * TOKENS + index * piece
                page = tables_ref[row, jnp.minimum(lax.div(position, page_size), tables_ref.shape[1] - 1)]
                source = pages_ref.at[pl.ds(page * page_size + lax.rem(position, page_size), piece), column]
                plgpu.copy_gmem_to_smem(source, buffer.at[slot, pl.ds(index * piece, piece)], there.at[slot])
