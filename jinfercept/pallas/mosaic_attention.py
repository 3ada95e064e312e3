"""Paged attention of chunks for Hopper, in Pallas' Mosaic GPU backend.

One block serves one KV head of one tile of queries, the heads of the group side by side. TMA copies queries and results from
and to their places in the batch. Sums are in float32. The kernel's values are tested in interpret mode, and it compiles for
H100 without spills. Its predecessor, whose tiles XLA gathered, was right and faster than Triton's kernel on an H100 and an H200
(`docs/gpu_kernels.md`).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.layouts.pages import Batch, KVPages, as_array
from jinfercept.pallas.mosaic_kernel import COMPUTING, HALF, chunk_kernel, share, warpgroup_queries
from jinfercept.pallas.work_schedule import WorkSchedule

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)  # what a warpgroup's registers hold, in rows of whole swizzles
GROUPS = (*range(1, 17), 24, 32, 40, 48, HALF)  # query heads of a KV head: others take more registers or shared memory
LEAST_PAGE = 8  # a page has a multiple of so many tokens: the rows of a swizzled tile


def check(q: Float[Array, "T H D"], pages: KVPages) -> None:
    """Raise `ValueError` if the type, the head dim, the number of query heads or the page size has no kernel."""
    heads, page_size = Heads(q.shape[1], pages.shape[3], q.shape[2], q.dtype.itemsize), pages.shape[1]
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


def attend_chunks(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, *, interpret: bool = False
) -> Float[Array, "T H D"]:
    """The results of all chunks, for arguments that pass `check` and a batch with its `work`. All other tokens are left
    unwritten. `interpret` runs slowly without a GPU, by an interpreter that knows asynchronous wgmma."""
    work = WorkSchedule(*map(as_array, batch.work.chunks))
    return _attend(q, pages, batch._replace(work=None, states=None, window=None), work, interpret)


# jitted with the schedule as arrays, so that all layers of an executable share one kernel, which is lowered once
@partial(jax.jit, static_argnames="interpret")
def _attend(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, work: WorkSchedule, interpret: bool
) -> Float[Array, "T H D"]:
    heads = Heads(q.shape[1], pages.shape[3], q.shape[2], q.dtype.itemsize)
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
