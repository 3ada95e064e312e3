"""Dealing out a batch: every token of work in exactly one unit, in no more units than the grid has."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.pallas.layout import Batch
from jinfercept.pallas.work_schedule import WorkSchedule, split_contexts, tile_chunks

NUM_ROWS, NUM_TOKENS = 6, 40
split = jax.jit(split_contexts, static_argnums=1)
tile = jax.jit(tile_chunks, static_argnums=(1, 2))


def make_batch(num_decode: int, lengths: list[int], contexts: list[int]) -> Batch:
    starts = np.full(NUM_ROWS + 1, sum(lengths), np.int32)
    starts[: len(lengths) + 1] = np.cumsum([0, *lengths])
    padded = contexts + [0] * (NUM_ROWS - len(contexts))
    nothing = jnp.zeros(0, jnp.int32)
    tables = jnp.zeros((NUM_ROWS, 1), jnp.int32)
    return Batch(
        nothing, nothing, nothing, jnp.asarray(starts), jnp.asarray(padded, jnp.int32), tables, jnp.int32(num_decode)
    )


def units(work: WorkSchedule) -> list[tuple[int, int]]:
    """(row, first token within the row) of every unit in use."""
    row_units, unit_tokens = np.asarray(work.row_units), int(work.unit_tokens[0])
    assert row_units[-1] <= len(work.unit_rows)
    rows = [int(row) for row in work.unit_rows[: row_units[-1]]]
    return [(row, (unit - int(row_units[row])) * unit_tokens) for unit, row in enumerate(rows)]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 5000), max_size=NUM_ROWS), st.sampled_from([1, 16]), st.sampled_from([16, 64]))
def test_contexts_are_cut_into_pieces_that_cover_them_once(contexts, spare_units, tile_tokens):
    batch = make_batch(len(contexts), [1] * len(contexts), contexts)
    work = split(batch, spare_units, tile_tokens, 100)
    length = int(work.unit_tokens[0])
    assert length % tile_tokens == 0
    assert length >= 100
    assert units(work) == [(row, start) for row, tokens in enumerate(contexts) for start in range(0, tokens, length)]


def test_one_long_row_gets_all_spare_units():
    batch = make_batch(1, [1], [8192])
    assert len(units(split(batch, 16, 64, 256))) == 16


def test_many_long_rows_get_equal_pieces():
    batch = make_batch(6, [1] * 6, [8192, 1024, 1024, 1024, 1024, 4096])
    work = split(batch, 16, 64, 256)
    assert int(work.unit_tokens[0]) == 1024
    assert [row for row, _ in units(work)] == [0] * 8 + [1, 2, 3, 4] + [5] * 4


def test_a_short_context_is_not_split():
    assert units(split(make_batch(2, [1, 1], [255, 256]), 16, 64, 256)) == [(0, 0), (1, 0)]


@settings(max_examples=50)
@given(st.integers(0, NUM_ROWS), st.lists(st.integers(0, NUM_TOKENS), max_size=NUM_ROWS), st.sampled_from([1, 8]))
def test_chunks_are_cut_into_tiles_that_cover_them_once(num_decode, lengths, tile_queries):
    lengths = [1] * num_decode + lengths[: NUM_ROWS - num_decode]
    while sum(lengths) > NUM_TOKENS:
        lengths[lengths.index(max(lengths))] //= 2
    work = tile(make_batch(num_decode, lengths, lengths), NUM_TOKENS, tile_queries)
    want = [
        (row, first)
        for row, tokens in enumerate(lengths)
        if row >= num_decode
        for first in range(0, tokens, tile_queries)
    ]
    assert units(work) == want


def test_the_fullest_batch_fills_the_grid():
    work = tile(make_batch(0, [1] * 5 + [35], [1] * 5 + [35]), NUM_TOKENS, 8)
    assert len(work.unit_rows) == len(units(work)) == 10
