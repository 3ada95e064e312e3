"""The arrays that attention reads: the axis order of the pages and the packed batch. Nothing of jinfercept is imported here.

Letters, for the whole repository: `T` query tokens in the step, `S` sequences (batch rows), `P` pages per sequence,
`N` pages in the pool, `B` tokens per page, `H` query heads, `K` KV heads, `D` head dim, `E` embed, `F` ffn, `V` vocab,
`L` layers, `R` sampled rows.

One layer's pages are one array `[N, B, 2, K, D]`: pages first, a token's key and value heads in one contiguous row, so that
writing a token is one row and a page is one contiguous block. Page 0 is scratch: padding tokens write there.
`benchmarks/kv_layout.py` is the measurement behind the order.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SCRATCH_PAGE = 0


class Batch(NamedTuple):
    """One step's queries, ragged: row `s` owns the query tokens `query_starts[s] : query_starts[s + 1]`.

    The first `num_decode` rows have exactly one query token each (token `s` is row `s`); the chunks follow. Unused rows come
    last, with `query_starts` repeating the number of tokens in use and a context length of 0. Padding tokens follow the
    last used one; their `write_index` lies in the scratch page and their position is 0.
    """

    tokens: Int[Array, "T"]
    positions: Int[Array, "T"]
    write_index: Int[Array, "T"]  # where the token's KV goes: page · B + offset
    query_starts: Int[Array, "S1"]  # S + 1 entries
    context_lens: Int[Array, "S"]  # tokens visible to the row's last query, itself included
    page_tables: Int[Array, "S P"]  # unused entries are the scratch page
    num_decode: Int[Array, ""]
    work: tuple[Any, ...] = ()  # work schedules of an implementation of attention, the same for all layers


KVPages = Float[Array, "N B 2 K D"]
"""One layer's pages."""


def kv_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int, int]:
    """The shape of one layer's `KVPages`; `num_pages` counts the scratch page too."""
    return (num_pages, page_size, 2, num_kv_heads, head_dim)


def write_kv(
    pages: KVPages, key: Float[Array, "T K D"], value: Float[Array, "T K D"], write_index: Int[Array, "T"]
) -> KVPages:
    """Write every token's key and value to its place in the pages, `Batch.write_index`. In place if `pages` is donated."""
    page_size = pages.shape[1]
    rows = jnp.stack([key, value], axis=1).astype(pages.dtype)  # [T, 2, K, D]
    return pages.at[write_index // page_size, write_index % page_size].set(rows)
