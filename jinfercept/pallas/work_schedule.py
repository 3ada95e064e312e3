"""Distributes a batch over the programs of a kernel's static grid: plain arrays, made outside of the kernels.

The grid is as large as a bucket's fullest batch needs; the programs after the last unit in use do nothing. A GPU starts
programs in the order of their numbers, so the longest units come first: short ones fill the end of a kernel.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jinfercept.pallas.layout import Batch

MOST_WAVES = 2  # of spare units: a long context needs more only where other rows already fill the GPU
START_TOKENS = 64  # context tokens that a program could read in the time that it takes to start and to end (estimated)


class WorkSchedule(NamedTuple):
    """Units of work, ragged: row `s` has the units `row_units[s] : row_units[s + 1]`. `W` is static, all else is data.

    Program `p` serves row `unit_rows[p]` from its token `unit_starts[p]` on, at most `unit_tokens` tokens: this is unit
    `row_units[row] + unit_starts[p] // unit_tokens`. Programs from `row_units[S]` on have no unit.
    """

    row_units: Int[Array, "S1"]
    unit_rows: Int[Array, "W"]
    unit_starts: Int[Array, "W"]
    unit_tokens: Int[Array, "1"]
    unit_programs: Int[Array, "W"]  # the program that serves a unit


def split_contexts(batch: Batch, num_kv_heads: int, programs: int, tile_tokens: int) -> WorkSchedule:
    """Cut the contexts of the decode rows into pieces of one length, a multiple of `tile_tokens`.

    Of the lengths that divide the longest context evenly, takes the one with the lowest bound of the kernel's time: the
    number of waves, times the tokens of a piece and what its start costs. So one long row is cut until one wave is full,
    many equal rows stay whole where they fill waves by themselves, and unequal rows are cut until the waves are even.

    Args:
        num_kv_heads: a piece takes a program for each.
        programs: that run at once, one wave.
        tile_tokens: context tokens per turn of the kernel's loop.
    """
    num_rows = batch.context_lens.shape[0]
    contexts = jnp.where(jnp.arange(num_rows) < batch.num_decode, batch.context_lens, 0)
    spare_units = max(1, MOST_WAVES * programs // num_kv_heads)
    most_units = num_rows + spare_units
    even = _ceil_div(jnp.maximum(contexts.max(), 1), jnp.arange(1, spare_units + 2))
    lengths = _ceil_div(even, tile_tokens) * tile_tokens  # [choices]
    units = jnp.sum(_ceil_div(contexts, lengths[:, None]), axis=1, dtype=jnp.int32)
    bounds = _ceil_div(units * num_kv_heads, programs) * (lengths + START_TOKENS)
    bounds = jnp.where(units <= most_units, bounds, jnp.iinfo(jnp.int32).max)
    work = _cut(contexts, lengths[jnp.argmin(bounds)], most_units)
    return _longest_first(work, contexts[work.unit_rows] - work.unit_starts)


def tile_chunks(batch: Batch, num_tokens: int, tile_queries: int) -> WorkSchedule:
    """Cut the queries of all rows that are not decoded into tiles of at most `tile_queries` tokens."""
    num_rows = batch.context_lens.shape[0]
    queries = jnp.where(jnp.arange(num_rows) < batch.num_decode, 0, jnp.diff(batch.query_starts))
    most_rows = min(num_rows, num_tokens)  # each with one tile, and the other tokens in full tiles
    work = _cut(queries, jnp.int32(tile_queries), most_rows + (num_tokens - most_rows) // tile_queries)
    return _longest_first(work, (batch.context_lens - queries)[work.unit_rows] + work.unit_starts)


def _cut(lengths: Int[Array, "S"], unit_tokens: Int[Array, ""], most_units: int) -> WorkSchedule:
    """The units in the order of rows. Comparisons of all with all: a search or a running sum would be many small kernels."""
    units, row = _ceil_div(lengths, unit_tokens), jnp.arange(lengths.shape[0])
    row_units = jnp.sum(jnp.where(row < jnp.arange(row.size + 1)[:, None], units, 0), axis=1, dtype=jnp.int32)
    unit = jnp.arange(most_units, dtype=jnp.int32)
    unit_rows = jnp.sum(row_units[1:-1] <= unit[:, None], axis=1, dtype=jnp.int32)
    unit_starts = (unit - row_units[unit_rows]) * unit_tokens
    return WorkSchedule(row_units, unit_rows, unit_starts, unit_tokens[None], unit)


def _longest_first(work: WorkSchedule, tokens: Int[Array, "W"]) -> WorkSchedule:
    """The units by descending number of tokens that each of them reads, or by any number that grows with it."""
    unit = work.unit_programs
    tokens = jnp.where(unit < work.row_units[-1], tokens, -1)
    earlier = (tokens > tokens[:, None]) | ((tokens == tokens[:, None]) & (unit < unit[:, None]))
    programs = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    served = programs == unit[:, None]  # [program, unit]
    rows, starts = (jnp.sum(jnp.where(served, of, 0), axis=1) for of in (work.unit_rows, work.unit_starts))
    return work._replace(unit_rows=rows, unit_starts=starts, unit_programs=programs)


def _ceil_div(number: Int[Array, "*any"], by: Int[Array, "*other"] | int) -> Int[Array, "*result"]:
    return (number + by - 1) // by
