"""Distributes a batch over the programs of a kernel's static grid: plain numpy on the host, where a step's contexts are known;
those of drafts, which depend on what a step draws, are known on the device alone (`even_schedule`).

A schedule has room for a bucket's fullest batch. A grid of chunks is as large, and its programs after the last used unit do
nothing. The decode kernel's grid is one wave, whose programs share the used units (`triton_decode._serve_rows`).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jinfercept.pallas.layouts.pages import Ints

MOST_WAVES = 2  # of spare units: a long context needs more only where other rows already fill the GPU
START_TOKENS = 64  # context tokens that a program could read in the time that it takes to start and to end (estimated)


class WorkSchedule(NamedTuple):
    """Units of work, ragged: row `s` has the units `row_units[s] : row_units[s + 1]`. `W` is static, all else is data.

    Place `p` of the schedule is row `unit_rows[p]` from its token `unit_starts[p]` on, at most `unit_tokens` tokens: this is
    unit `row_units[row] + unit_starts[p] // unit_tokens`. Places from `row_units[S]` on have no unit.
    Shapes: `[S + 1]`, `[W]`, `[W]`, `[1]`.
    """

    row_units: Ints
    unit_rows: Ints
    unit_starts: Ints
    unit_tokens: Ints


class WorkCut(NamedTuple):
    """How the kernels of a model on a GPU cut a batch into units."""

    num_kv_heads: int  # a unit takes a program for each
    programs: int  # of the decode kernel that run at once, one wave
    context_tokens: int  # of decode rows, per turn of the kernel's loop: units are multiples
    chunk_queries: int  # most query tokens of a unit of a chunk

    @property
    def spare_units(self) -> int:
        """Units of decode rows beyond one for each row."""
        return max(1, MOST_WAVES * self.programs // self.num_kv_heads)

    def shapes(self, num_tokens: int, num_rows: int, *, decode_only: bool) -> list[WorkSchedule]:
        """The shapes of a batch's `schedules`."""
        most_rows = min(num_rows, num_tokens)  # each with one tile, and the other tokens in full tiles
        units = [num_rows + self.spare_units]
        units += [] if decode_only else [most_rows + (num_tokens - most_rows) // self.chunk_queries]
        return [WorkSchedule((num_rows + 1,), (count,), (count,), (1,)) for count in units]


class Work(NamedTuple):
    """The kernels' input from a batch: four of its fields, and the schedules of decode rows and of chunks, if any."""

    query_starts: Ints
    context_lens: Ints
    page_tables: Ints
    num_decode: Ints
    decodes: WorkSchedule
    chunks: WorkSchedule | None


def schedules(
    cut: WorkCut,
    query_starts: Int[np.ndarray, "S1"],
    context_lens: Int[np.ndarray, "S"],
    num_decode: int,
    num_tokens: int,
    *,
    decode_only: bool,
) -> list[WorkSchedule]:
    """The schedules of a batch on the host: of decode rows and, unless `decode_only`, of chunks. `num_tokens` is T, the
    bucket."""
    is_decode = np.arange(len(context_lens)) < num_decode
    by_kind = [split_contexts(np.where(is_decode, context_lens, 0), cut)]
    if not decode_only:
        queries = np.where(is_decode, 0, np.diff(query_starts))
        by_kind.append(tile_chunks(queries, context_lens - queries, num_tokens, cut.chunk_queries))
    return by_kind


def split_contexts(contexts: Int[np.ndarray, "S"], cut: WorkCut) -> WorkSchedule:
    """Cut the contexts of the decode rows into pieces of one length, a multiple of `cut.context_tokens`. `contexts` are the
    tokens of every row, 0 for those that are not decoded.

    Of the lengths that divide the longest context evenly, takes the one with the lowest bound of the kernel's time: the number
    of waves, times the tokens of a piece and what its start costs. So one long row is cut until one wave is full, many equal
    rows stay whole where they fill waves by themselves, and unequal rows are cut until the waves are even.
    """
    most_units = len(contexts) + cut.spare_units
    even = _ceil_div(max(int(contexts.max(initial=0)), 1), np.arange(1, cut.spare_units + 2))
    lengths = np.unique(_ceil_div(even, cut.context_tokens))[::-1] * cut.context_tokens  # [choices]
    units = _ceil_div(contexts, lengths[:, None]).sum(axis=1)
    bounds = _ceil_div(units * cut.num_kv_heads, cut.programs) * (lengths + START_TOKENS)
    bounds[units > most_units] = np.iinfo(bounds.dtype).max
    # the longest units come first: short ones fill the end of a kernel
    work = _cut(contexts, int(lengths[np.argmin(bounds)]), most_units)
    return _longest_first(work, contexts[work.unit_rows] - work.unit_starts)


def even_schedule(contexts: Int[Array, "S"], cut: WorkCut) -> WorkSchedule:
    """The schedule of decode rows whose contexts only the device knows: pieces of the shortest length of which a schedule has
    room for all.

    Args:
        contexts: tokens of every row.
        cut: of the model and the GPU.
    """
    tokens, unit = jnp.maximum(jnp.sum(contexts), 1), jnp.arange(len(contexts) + cut.spare_units)
    length = _ceil_div(_ceil_div(tokens, cut.spare_units), cut.context_tokens) * cut.context_tokens
    row_units = jnp.append(0, jnp.cumsum(_ceil_div(contexts, length)))
    rows = jnp.searchsorted(row_units[1:-1], unit, side="right", method="compare_all")
    return WorkSchedule(row_units, rows, (unit - row_units[rows]) * length, length[None])


def tile_chunks(
    queries: Int[np.ndarray, "S"], before: Int[np.ndarray, "S"], num_tokens: int, tile_queries: int
) -> WorkSchedule:
    """Cut the queries of all rows that are not decoded into tiles of at most `tile_queries` tokens. `queries` are the tokens of
    every chunk, 0 for decode rows; `before` are the context tokens before it."""
    most_rows = min(len(queries), num_tokens)
    work = _cut(queries, tile_queries, most_rows + (num_tokens - most_rows) // tile_queries)
    return _longest_first(work, before[work.unit_rows] + work.unit_starts)


def _cut(lengths: Int[np.ndarray, "S"], unit_tokens: int, most_units: int) -> WorkSchedule:
    units = _ceil_div(lengths, unit_tokens)
    row_units = np.zeros(len(units) + 1, np.int32)
    np.cumsum(units, out=row_units[1:])
    used = int(row_units[-1])
    unit = np.arange(most_units, dtype=np.int32)
    rows, starts = np.zeros(most_units, np.int32), np.zeros(most_units, np.int32)
    rows[:used] = np.repeat(np.arange(len(units), dtype=np.int32), units)
    starts[:used] = (unit[:used] - row_units[rows[:used]]) * unit_tokens
    return WorkSchedule(row_units, rows, starts, np.array([unit_tokens], np.int32))


def _longest_first(work: WorkSchedule, tokens: Int[np.ndarray, "W"]) -> WorkSchedule:
    used = int(work.row_units[-1])
    units = np.arange(len(tokens), dtype=np.int32)  # of the programs
    units[:used] = np.argsort(-tokens[:used], kind="stable")
    return work._replace(unit_rows=work.unit_rows[units], unit_starts=work.unit_starts[units])


def _ceil_div(number: Any, by: Any) -> Any:
    """Of whole numbers or arrays of them, numpy's or JAX's."""
    return (number + by - 1) // by
