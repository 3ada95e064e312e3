"""Inputs for attention by itself: random pages, scattered page tables, and the ragged batch of some rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from benchmarks.suite.sizes import AttentionCase, HeadSizes, Sizes
from jinfercept.layouts.interleaved import interleaved_shape
from jinfercept.layouts.pages import Batch, KVPages, kv_shape
from jinfercept.runner.packing import PackedShape, pack, unpack
from jinfercept.sched.plan import Chunk

BLOCK_PAGES = 1024


def random_pages(heads: HeadSizes, num_pages: int, sizes: Sizes) -> KVPages:
    """One layer's pages; a block of random ones, repeated."""
    if sizes.interleaved:
        shape = interleaved_shape(num_pages, sizes.page_size, heads.kv, heads.dim, sizes.dtype)
    else:
        shape = kv_shape(num_pages, sizes.page_size, heads.kv, heads.dim)
    block, ones = min(BLOCK_PAGES, num_pages), (1,) * (len(shape) - 1)

    @jax.jit
    def draw(key: Array) -> KVPages:
        drawn = jax.random.uniform(key, (block, *shape[1:]), sizes.dtype, -1.0, 1.0)
        return jnp.tile(drawn, (-(-num_pages // block), *ones))[:num_pages]

    return draw(jax.random.key(0))


def interleaved(pages: KVPages) -> KVPages:
    """Pages `[N, B, 2, K, W]` as those of TPUs lie; the slots of zeros beside them are zero."""
    num_pages, page_size, _, num_kv_heads, head_dim = pages.shape
    shape = interleaved_shape(num_pages, page_size, num_kv_heads, head_dim, pages.dtype)
    missing = shape[2] // 2 - num_kv_heads, shape[3] - head_dim
    padded = jnp.pad(pages, ((0, 0),) * 3 + ((0, missing[0]), (0, missing[1])))
    return jnp.moveaxis(padded, 2, 3).reshape(shape)


def make_batch(
    rows: Sequence[tuple[int, int]],
    tables: Int32[np.ndarray, "S P"],
    page_size: int,
    spare_tokens: int = 0,
    spare_rows: int = 0,
) -> Batch:
    """The batch of such rows, each (start, query tokens), those of one token first.

    Args:
        rows: row by row.
        tables: their pages.
        spare_tokens, spare_rows: padding.
    """
    chunks = tuple(Chunk(slot, start, (1,) * tokens, (), None) for slot, (start, tokens) in enumerate(rows))
    num_tokens = sum(tokens for _, tokens in rows) + spare_tokens
    shape = PackedShape(num_tokens, len(rows) + spare_rows, tables.shape[1])
    packed = pack(chunks, tables, page_size, shape)
    return jax.jit(unpack, static_argnums=2)(packed, np.zeros(len(rows), np.int32), shape)


def scattered_batches(case: AttentionCase, num_pages: int, page_size: int, count: int, width: int) -> list[Batch]:
    """So many batches of one case, whose pages lie all over the pool, as different from each other as the pool allows.

    Args:
        num_pages: of the pool, the scratch page included.
        width: pages of a row of the table.
    """
    each = -(-case.context // page_size)
    order = 1 + np.random.default_rng(0).permutation(num_pages - 1)
    rows = [(case.context - case.chunk, case.chunk)] * case.rows
    batches = []
    for index in range(count):
        taken = np.arange(index * case.rows * each, (index + 1) * case.rows * each) % order.size
        tables = np.zeros((case.rows, width), np.int32)
        tables[:, :each] = order[taken].reshape(case.rows, each)
        batches.append(make_batch(rows, tables, page_size))
    return batches


def random_queries(heads: HeadSizes, num_tokens: int, dtype: str) -> Float[Array, "T H D"]:
    """Queries of one step."""
    return jax.random.normal(jax.random.key(1), (num_tokens, heads.query, heads.dim), dtype)
