"""Steps for attention over pages: ragged batches on pages in random order, and the reference that every kernel must equal."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from benchmarks.prepared_batch import prepare
from jinfercept.pallas.layouts.pages import SCRATCH_PAGE, Batch, kv_shape
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tiles import Heads, Tiles, work_cut


class Shapes(NamedTuple):
    """The static shapes of a step: one compilation each."""

    num_tokens: int
    num_rows: int
    pages_per_row: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


reference = jax.jit(paged_attention_reference)


def make_step(shapes: Shapes, num_decode: int, rows: list[tuple[int, int]], seed: int, dtype=jnp.float32):
    """Queries, pages and batch for rows of (query tokens, context tokens), decode rows first.

    Pages are dealt in random order, and every slot that no row has written is NaN.
    """
    rng = np.random.default_rng(seed)
    num_pages = 1 + shapes.num_rows * shapes.pages_per_row
    pages = np.full(kv_shape(num_pages, shapes.page_size, shapes.num_kv_heads, shapes.head_dim), np.nan, np.float32)
    free = list(rng.permutation(np.arange(1, num_pages)))
    starts = np.full(shapes.num_rows + 1, sum(length for length, _ in rows), np.int32)
    starts[: len(rows) + 1] = np.cumsum([0, *(length for length, _ in rows)])
    positions = np.zeros(shapes.num_tokens, np.int32)
    context_lens = np.zeros(shapes.num_rows, np.int32)
    tables = np.full((shapes.num_rows, shapes.pages_per_row), SCRATCH_PAGE, np.int32)
    for row, (length, context) in enumerate(rows):
        positions[starts[row] : starts[row + 1]] = np.arange(context - length, context)
        context_lens[row] = context
        for index in range(-(-context // shapes.page_size)):
            tables[row, index] = free.pop()
            filled = min(shapes.page_size, context - index * shapes.page_size)
            pages[tables[row, index], :filled] = rng.standard_normal((filled, *pages.shape[2:]))
    q = rng.standard_normal((shapes.num_tokens, shapes.num_heads, shapes.head_dim))
    batch = Batch(
        tokens=jnp.zeros(shapes.num_tokens, jnp.int32),
        positions=jnp.asarray(positions),
        write_index=jnp.zeros(shapes.num_tokens, jnp.int32),
        query_starts=jnp.asarray(starts),
        context_lens=jnp.asarray(context_lens),
        page_tables=jnp.asarray(tables),
        num_decode=jnp.int32(num_decode),
    )
    return jnp.asarray(q, dtype), jnp.asarray(pages, dtype), batch


def scheduled(
    attend: Callable[..., jax.Array], tiles: Callable[[Heads], Tiles | None], *, decode_only: bool = False
) -> Callable[..., jax.Array]:
    """Attention that gets its work schedules made first, as a runner does on the host."""

    def run(q: jax.Array, pages: jax.Array, batch: Batch) -> jax.Array:
        heads = Heads.of(q, pages)
        return attend(q, pages, prepare(batch, work_cut(heads, tiles(heads)), decode_only=decode_only))

    return run


@st.composite
def steps(draw: st.DrawFn, choices: list[Shapes]):
    """A bucket's shapes with any ragged batch that fits: decode rows, then chunks, empty rows among them."""
    shapes = draw(st.sampled_from(choices))
    most_context = shapes.pages_per_row * shapes.page_size
    border = st.sampled_from([shapes.page_size - 1, shapes.page_size, shapes.page_size + 1, 1, most_context])
    num_decode = draw(st.integers(0, min(shapes.num_rows, shapes.num_tokens)))
    lengths, left = [1] * num_decode, shapes.num_tokens - num_decode
    for _ in range(draw(st.integers(0, shapes.num_rows - num_decode))):
        lengths.append(draw(st.integers(0, min(left, most_context))))
        left -= lengths[-1]
    contexts = [max(length, draw(border | st.integers(1, most_context))) for length in lengths]
    return shapes, num_decode, list(zip(lengths, contexts, strict=True)), draw(st.integers(0, 2**31 - 1))


def batch_shapes(num_tokens: int, num_rows: int, pages_per_row: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a bucket's `Batch`, by field; all are int32."""
    return {
        "tokens": (num_tokens,),
        "positions": (num_tokens,),
        "write_index": (num_tokens,),
        "query_starts": (num_rows + 1,),
        "context_lens": (num_rows,),
        "page_tables": (num_rows, pages_per_row),
        "num_decode": (),
    }
