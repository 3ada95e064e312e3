"""Distributes a batch over the programs of a kernel's static grid: plain arrays, made outside of the kernels.

The grid is as large as a bucket's fullest batch needs; the programs after the last unit in use do nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jinfercept.pallas.layout import Batch


class WorkSchedule(NamedTuple):
    """Units of work, ragged: row `s` has the units `row_units[s] : row_units[s + 1]`. `W` is static, all else is data.

    Unit `u` is piece `u - row_units[r]` of row `r = unit_rows[u]`, in pieces of `unit_tokens`; the row's last may be shorter.
    """

    row_units: Int[Array, "S1"]
    unit_rows: Int[Array, "W"]
    unit_tokens: Int[Array, "1"]


def split_contexts(batch: Batch, spare_units: int, tile_tokens: int, least_split: int) -> WorkSchedule:
    """Cut the contexts of the decode rows into at most `S + spare_units` pieces of one length.

    However few the rows are, and however unequal, the pieces are about as many as there are spare units, unless that would
    make them shorter than `least_split` tokens. The length is a multiple of `tile_tokens`.
    """
    num_rows = batch.context_lens.shape[0]
    contexts = jnp.where(jnp.arange(num_rows) < batch.num_decode, batch.context_lens, 0)
    least = jnp.maximum(_ceil_div(contexts.sum(), spare_units), least_split)
    return _work(contexts, _ceil_div(least, tile_tokens) * tile_tokens, num_rows + spare_units)


def tile_chunks(batch: Batch, num_tokens: int, tile_queries: int) -> WorkSchedule:
    """Cut the queries of all rows that are not decoded into tiles of at most `tile_queries` tokens."""
    num_rows = batch.context_lens.shape[0]
    queries = jnp.where(jnp.arange(num_rows) < batch.num_decode, 0, jnp.diff(batch.query_starts))
    most_rows = min(num_rows, num_tokens)  # each with one tile, and the other tokens in full tiles
    return _work(queries, jnp.int32(tile_queries), most_rows + (num_tokens - most_rows) // tile_queries)


def _work(lengths: Int[Array, "S"], unit_tokens: Int[Array, ""], most_units: int) -> WorkSchedule:
    """Comparisons of all with all: a search or a running sum would be many small kernels."""
    units, row = _ceil_div(lengths, unit_tokens), jnp.arange(lengths.shape[0])
    row_units = jnp.sum(jnp.where(row < jnp.arange(row.size + 1)[:, None], units, 0), axis=1, dtype=jnp.int32)
    unit_rows = jnp.sum(row_units[1:-1] <= jnp.arange(most_units)[:, None], axis=1, dtype=jnp.int32)
    return WorkSchedule(row_units, unit_rows, unit_tokens[None])


def _ceil_div(number: Int[Array, "*any"], by: Int[Array, ""] | int) -> Int[Array, "*any"]:
    return (number + by - 1) // by
