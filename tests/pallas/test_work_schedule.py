"""Tiles that fit a chip, and dealing out a batch: every token of work in exactly one unit, no more units than the grid has."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.pallas.tiles import SHARED_MEMORY_BYTES, choose_tiles, power_of_two
from jinfercept.pallas.work_schedule import WorkCut, WorkSchedule, even_schedule, schedules, split_contexts

SOME_UNKNOWN_CHIP = 121


@given(
    st.integers(16, 256),
    st.integers(1, 128),
    st.sampled_from([2, 4]),
    st.sampled_from([*SHARED_MEMORY_BYTES, SOME_UNKNOWN_CHIP]),
)
def test_tiles_are_powers_of_two_that_hold_a_group_of_heads(head_dim, group, itemsize, compute_capability):
    tiles = choose_tiles(head_dim, group, itemsize, compute_capability, 100)
    for tile in (tiles.decode, tiles.chunk):
        assert tile.rows >= max(16, group)
        assert tile.tokens >= 16
        assert all(number == power_of_two(number) for number in (tile.rows, tile.tokens, tile.num_warps))


def test_hopper_gets_more_of_the_context_in_flight_than_a_chip_with_little_shared_memory():
    large, little = (choose_tiles(128, 4, 2, generation, 100) for generation in (90, 89))
    assert large.decode.tokens > little.decode.tokens
    assert large.chunk.tokens > little.chunk.tokens


def test_the_waves_of_the_decode_kernel_are_what_registers_and_shared_memory_allow():
    h100, a100, l4 = (
        [choose_tiles(head_dim, 4, 2, *gpu).programs // gpu[1] for head_dim in (64, 128, 256)]
        for gpu in ((90, 132), (80, 108), (89, 58))
    )
    assert (h100, a100) == ([4, 3, 3], [4, 3, 3])  # as in code that was compiled for them
    assert all(1 <= blocks <= 4 for blocks in l4)


NUM_ROWS, NUM_TOKENS = 6, 40


def schedule(num_decode: int, lengths: list[int], contexts: list[int], cut: WorkCut) -> list[WorkSchedule]:
    """The schedules of rows with so many query and context tokens, of decode rows and of chunks, in a bucket."""
    starts = np.full(NUM_ROWS + 1, sum(lengths), np.int32)
    starts[: len(lengths) + 1] = np.cumsum([0, *lengths])
    padded = np.array(contexts + [0] * (NUM_ROWS - len(contexts)), np.int32)
    works = schedules(cut, starts, padded, num_decode, NUM_TOKENS, decode_only=False)
    for work, shapes in zip(works, cut.shapes(NUM_TOKENS, NUM_ROWS, decode_only=False), strict=True):
        assert tuple(numbers.shape for numbers in work) == shapes
        assert all(numbers.dtype == np.int32 for numbers in work)
    return works


def chunk_units(num_decode: int, lengths: list[int], contexts: list[int], tile_queries: int) -> WorkSchedule:
    return schedule(num_decode, lengths, contexts, WorkCut(1, 1, 16, tile_queries))[1]


def units(work: WorkSchedule) -> list[tuple[int, int]]:
    """(row, first token within the row) of every unit in use, in the order of the units."""
    row_units, rows, starts, (unit_tokens,) = work
    used = int(row_units[-1])
    places = list(zip(rows[:used].tolist(), starts[:used].tolist(), strict=True))
    by_unit = {int(row_units[row] + start // unit_tokens): (row, start) for row, start in places}
    assert sorted(by_unit) == list(range(used))
    return [by_unit[unit] for unit in range(used)]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5000), min_size=NUM_ROWS, max_size=NUM_ROWS), st.sampled_from([1, 3, 50]))
def test_contexts_that_the_device_knows_are_cut_into_even_pieces_that_all_have_room(contexts, programs):
    work = even_schedule(jnp.array(contexts), WorkCut(2, programs, 16, 8))
    numbers = WorkSchedule(*map(np.asarray, work))
    starts = [
        (row, start) for row, tokens in enumerate(contexts) for start in range(0, tokens, int(work.unit_tokens[0]))
    ]
    assert units(numbers) == starts
    assert len(starts) <= len(work.unit_rows)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 5000), max_size=NUM_ROWS),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 48]),
    st.sampled_from([16, 64]),
)
def test_contexts_are_cut_into_pieces_that_cover_them_once(contexts, num_kv_heads, programs, tile_tokens):
    cut = WorkCut(num_kv_heads, programs, tile_tokens, 16)
    work = schedule(len(contexts), [1] * len(contexts), contexts, cut)[0]
    length = int(work.unit_tokens[0])
    assert length % tile_tokens == 0
    assert units(work) == [(row, start) for row, tokens in enumerate(contexts) for start in range(0, tokens, length)]


def pieces(contexts: list[int]) -> list[int]:
    """The number of pieces of every row, on a GPU that runs 66 of them at once in turns of 64 tokens."""
    return np.diff(split_contexts(np.array(contexts), WorkCut(8, 528, 64, 16)).row_units).tolist()


def test_one_long_row_fills_one_wave():
    assert pieces([8192]) == [64]


def test_equal_rows_that_fill_a_wave_stay_whole():
    assert pieces([1024] * 64) == [1] * 64


def test_rows_just_beyond_a_wave_are_cut_into_even_waves():
    assert pieces([1024] * 72) == [2] * 72  # three waves of 512 tokens, not two of 1,024


def test_one_long_row_among_short_ones_is_cut():
    assert pieces([8192] + [1024] * 63)[0] >= 16


def test_a_short_context_is_not_split():
    assert pieces([64, 63]) == [1, 1]


def test_the_longest_units_start_first():
    work = split_contexts(np.array([100, 5000, 2600] + [0] * 3), WorkCut(1, 4, 64, 16))
    tokens = np.minimum(np.asarray([100, 5000, 2600] + [0] * 3)[work.unit_rows] - work.unit_starts, work.unit_tokens)
    assert list(tokens) == sorted(tokens, reverse=True)
    chunks = chunk_units(0, [10, 20, 9], [10, 400, 90], 8)
    order = list(zip(chunks.unit_rows.tolist(), chunks.unit_starts.tolist(), strict=True))
    assert order[:7] == [(1, 16), (1, 8), (1, 0), (2, 8), (2, 0), (0, 8), (0, 0)]


@settings(max_examples=50)
@given(st.integers(0, NUM_ROWS), st.lists(st.integers(0, NUM_TOKENS), max_size=NUM_ROWS), st.sampled_from([1, 8]))
def test_chunks_are_cut_into_tiles_that_cover_them_once(num_decode, lengths, tile_queries):
    lengths = [1] * num_decode + lengths[: NUM_ROWS - num_decode]
    while sum(lengths) > NUM_TOKENS:
        lengths[lengths.index(max(lengths))] //= 2
    work = chunk_units(num_decode, lengths, lengths, tile_queries)
    want = [
        (row, first)
        for row, tokens in enumerate(lengths)
        if row >= num_decode
        for first in range(0, tokens, tile_queries)
    ]
    assert units(work) == want


def test_the_fullest_batch_fills_the_grid():
    work = chunk_units(0, [1] * 5 + [35], [1] * 5 + [35], 8)
    assert len(work.unit_rows) == len(units(work)) == 10
