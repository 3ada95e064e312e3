"""Paged attention of chunks for Hopper, in Pallas' Mosaic GPU backend.

One block serves one KV head of one tile of queries, the heads of the group side by side. Tiles are gathered before the kernel
and scattered after it, since TMA copies a tile in one piece. Sums are in float32. Its values are tested in interpret mode, and
it compiles for H100 without spills, was right on one and on an H200, and faster than Triton's kernel there
(`docs/gpu_kernels.md`).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.layouts.pages import Batch, KVPages, as_array
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.mosaic_kernel import COMPUTING, ROWS, chunk_kernel, share
from jinfercept.pallas.work_schedule import WorkSchedule

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)  # what a warpgroup's registers hold, in rows of whole swizzles
LEAST_PAGE = 8  # a page has a multiple of so many tokens: the rows of a swizzled tile


def check(q: Float[Array, "T H D"], pages: KVPages) -> None:
    """Raises `ValueError` if the type, the head dim or the page size has no kernel."""
    heads, page_size = Heads(q.shape[1], pages.shape[3], q.shape[2], q.dtype.itemsize), pages.shape[1]
    if not is_supported(q.dtype, pages.dtype, heads, page_size):
        got = f"queries in {q.dtype}, pages of {page_size} tokens in {pages.dtype}, head dim {heads.head_dim}"
        got += f", {heads.group} query heads for each KV head"
        fix = f"{' or '.join(DTYPES)} for both, a head dim of 64 or 128, pages of a multiple of {LEAST_PAGE} tokens"
        fix += f" and at most {ROWS} query heads"
        raise ValueError(f"the Mosaic kernel has no such attention; got {got}; fix: use {fix}, or the kernel triton")


def is_supported(q: DTypeLike, pages: DTypeLike, heads: Heads, page_size: int) -> bool:
    """Whether the kernel can be compiled for queries and pages of these types."""
    dtype = jnp.dtype(q)
    shapes = heads.head_dim in HEAD_DIMS and heads.group <= ROWS and page_size % LEAST_PAGE == 0
    return dtype == jnp.dtype(pages) and dtype.name in DTYPES and shapes


def attend_chunks(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, *, interpret: bool = False
) -> Float[Array, "T H D"]:
    """The results of all chunks; zeros for all other tokens.

    Args:
        q, pages, batch: as for `paged_attention_reference`; what `check` lets pass. The batch has its `work`.
        interpret: run without a GPU, slowly, by an interpreter that knows asynchronous wgmma.
    """
    work = WorkSchedule(*map(as_array, batch.work.chunks))
    return _attend(q, pages, batch._replace(work=None, states=None, window=None), work, interpret)


@partial(jax.jit, static_argnames="interpret")
def _attend(
    q: Float[Array, "T H D"], pages: KVPages, batch: Batch, work: WorkSchedule, interpret: bool
) -> Float[Array, "T H D"]:
    """As `attend_chunks`, with the schedule as arrays: all layers of an executable share one kernel, which is lowered once."""
    heads = Heads(q.shape[1], pages.shape[3], q.shape[2], q.dtype.itemsize)
    num_pages, page_size, _, num_kv_heads, head_dim = pages.shape
    num_units, tile_queries = work.unit_rows.shape[0], ROWS // heads.group
    row, skipped = work.unit_rows, work.unit_starts
    lengths = jnp.diff(batch.query_starts)
    starts = batch.context_lens[row] - lengths[row] + skipped
    limits = jnp.minimum(starts + tile_queries, batch.context_lens[row])
    limits = jnp.where(jnp.arange(num_units) < work.row_units[-1], limits, 0)

    def paged_chunk_attention(*refs):
        chunk_kernel(*refs, heads=heads, page_size=page_size)

    rows = plgpu.kernel(
        paged_chunk_attention,
        out_type=jax.ShapeDtypeStruct((num_units * ROWS, num_kv_heads * head_dim), q.dtype),
        scratch_types=[share(head_dim, page_size, q.dtype)],
        grid=(num_kv_heads, num_units),
        grid_names=("kv_head", "unit"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(
        _to_tiles(q, batch.query_starts[row] + skipped, heads, tile_queries),
        pages.reshape(num_pages * page_size, -1),
        batch.page_tables,
        row,
        starts,
        limits,
    )
    return _from_tiles(rows, batch, work, heads, tile_queries, q.shape[0])


def _to_tiles(
    q: Float[Array, "T H D"], first_tokens: Int[Array, "W"], heads: Heads, tile_queries: int
) -> Float[Array, "tile_rows KD"]:
    """Every program's queries, `ROWS` rows each: the group's heads of one token side by side, KV head by KV head."""
    num_tokens, _, head_dim = q.shape
    tokens = jnp.minimum(first_tokens[:, None] + jnp.arange(tile_queries)[None], num_tokens - 1)
    tiles = q.reshape(num_tokens, -1, heads.group, head_dim)[tokens]  # [W, queries, K, group, D]
    tiles = tiles.transpose(0, 1, 3, 2, 4).reshape(tokens.shape[0], tile_queries * heads.group, -1)
    return jnp.pad(tiles, ((0, 0), (0, ROWS - tiles.shape[1]), (0, 0))).reshape(-1, tiles.shape[2])


def _from_tiles(
    rows: Float[Array, "tile_rows KD"],
    batch: Batch,
    work: WorkSchedule,
    heads: Heads,
    tile_queries: int,
    num_tokens: int,
) -> Float[Array, "T H D"]:
    """The tokens of the chunks, from tiles to their places in the batch."""
    token = jnp.arange(num_tokens)
    row = jnp.sum(batch.query_starts[None, 1:-1] <= token[:, None], axis=1)
    skipped = token - batch.query_starts[row]
    tile = work.unit_programs[work.row_units[row] + skipped // tile_queries]
    first = tile * ROWS + skipped % tile_queries * heads.group
    token_rows = rows.reshape(rows.shape[0], -1, heads.head_dim)[
        first[:, None] + jnp.arange(heads.group)[None]
    ]  # [T, group, K, D]
    inside = (row >= batch.num_decode) & (token < batch.query_starts[-1])
    token_rows = jnp.where(inside[:, None, None, None], token_rows, 0)
    return token_rows.transpose(0, 2, 1, 3).reshape(num_tokens, heads.num_heads, heads.head_dim)
