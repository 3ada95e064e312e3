"""The Triton kernels against the reference, interpreted; `tests/aot` compiles them for GPUs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prepared_batch import prepare
from jinfercept.pallas.layouts.pages import Batch
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tiles import AMPERE, Heads, Tile, Tiles, is_supported, tiles_for, work_cut
from jinfercept.pallas.triton_attention import paged_attention_triton
from jinfercept.runner.draft_layer import row_queries
from tests.support.attention_steps import Shapes, make_step, reference, scheduled, steps

GROUPED = Shapes(40, 9, 7, 16, 9, 3, 24)  # groups and a head dim that fill no power of two
ONE_HEAD_EACH = Shapes(24, 30, 4, 40, 2, 2, 16)  # fewer tokens than rows, pages that do not divide a tile
WIDE_GROUP = Shapes(
    40, 4, 2, 128, 20, 1, 32
)  # more heads in a group than the least rows of a tile, pages wider than one
SMALL_TILES = Tiles(Tile(16, 16, 4, 3), Tile(16, 16, 4, 3), programs=24)  # so that small steps have many
Attend = Callable[..., jax.Array]

WIDE_TILES = SMALL_TILES._replace(decode=Tile(32, 16, 4, 3), chunk=Tile(32, 16, 4, 3))


def with_tiles(tiles: Tiles, **options: bool) -> Attend:
    return jax.jit(partial(paged_attention_triton, tiles=tiles, interpret=True, **options))


on_gpu = scheduled(jax.jit(paged_attention_triton), lambda _: None)
interpreted = scheduled(
    jax.jit(partial(paged_attention_triton, interpret=True)), lambda heads: tiles_for(heads, AMPERE)
)
triton = scheduled(with_tiles(SMALL_TILES), lambda _: SMALL_TILES)
triton_32 = scheduled(with_tiles(WIDE_TILES), lambda _: WIDE_TILES)
decoding = scheduled(with_tiles(SMALL_TILES, decode_only=True), lambda _: SMALL_TILES, decode_only=True)


@settings(max_examples=12)
@given(steps([GROUPED, ONE_HEAD_EACH]))
def test_triton_attention_agrees_with_the_reference_on_any_ragged_batch(step):
    q, pages, batch = make_step(*step)
    np.testing.assert_allclose(triton(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


@settings(max_examples=8)
@given(steps([WIDE_GROUP]))
def test_a_group_may_be_wider_than_the_least_tile(step):
    q, pages, batch = make_step(*step)
    np.testing.assert_allclose(triton_32(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


def test_contexts_of_a_thousand_pages_give_the_reference():
    q, pages, batch = make_step(Shapes(24, 2, 1024, 1, 2, 1, 16), 1, [(1, 1024), (20, 1023)], seed=1)
    np.testing.assert_allclose(triton(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


def test_in_bfloat16_it_agrees_up_to_the_rounding_of_weights_and_result():
    rows = [(1, 100), (1, 16), (1, 1), (20, 100), (0, 1), (9, 9)]
    q, pages, batch = make_step(GROUPED, 3, rows, seed=0, dtype=jnp.bfloat16)
    got, want = triton(q, pages, batch), reference(q, pages, batch)
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=2**-7, rtol=2**-7)


def test_tile_borders_make_no_difference():
    queries = SMALL_TILES.chunk.rows // 3  # of one tile
    for chunk in (queries - 1, queries, queries + 1):
        for context in (15, 16, 17, 31, 32, 33, 112):
            rows = [(1, context), (chunk, context), (chunk, chunk)]
            q, pages, batch = make_step(GROUPED, 1, rows, seed=chunk)
            np.testing.assert_allclose(triton(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


@settings(max_examples=8)
@given(st.lists(st.integers(1, 112), max_size=9), st.integers(0, 2**31 - 1))
def test_a_step_of_decodes_only_agrees_with_the_reference(contexts, seed):
    q, pages, batch = make_step(GROUPED, len(contexts), [(1, context) for context in contexts], seed)
    np.testing.assert_allclose(decoding(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


def test_drafts_of_every_row_attend_by_a_schedule_that_the_device_makes():
    """To fewer tokens than their rows have, as behind refused drafts."""
    lengths = (3, 112, 40, 1, 17, 64, 100, 5, 80)
    _, pages, batch = make_step(GROUPED, 9, [(1, length) for length in lengths], seed=4)
    queries, contexts = jax.random.normal(jax.random.key(0), (9, 9, 24)), jnp.array([max(1, n - 2) for n in lengths])

    @jax.jit
    def both(batch: Batch) -> tuple[jax.Array, jax.Array]:
        rows = row_queries(batch, contexts, work_cut(Heads(9, 3, 24, 4), SMALL_TILES))
        attend = partial(paged_attention_triton, tiles=SMALL_TILES, interpret=True, decode_only=True)
        return attend(queries, pages, rows), paged_attention_reference(queries, pages, rows)

    np.testing.assert_allclose(*both(batch), atol=2e-5, rtol=0)


def test_a_step_of_decodes_only_has_no_kernel_for_chunks():
    q, pages, batch = make_step(GROUPED, 1, [(1, 5)], seed=0)
    cut, kernels = work_cut(Heads(9, 3, 24, 4), SMALL_TILES), []
    for decode_only in (True, False):
        attend = partial(paged_attention_triton, tiles=SMALL_TILES, interpret=True, decode_only=decode_only)
        batch = prepare(batch, cut, decode_only=decode_only)
        kernels.append(str(jax.make_jaxpr(attend)(q, pages, batch)).count("pallas_call["))
    assert kernels == [1, 2]


def test_the_decode_grid_is_one_wave_and_its_programs_share_the_units():
    few = SMALL_TILES._replace(programs=4)
    q, pages, batch = make_step(GROUPED, 5, [(1, 10), (1, 112), (1, 1), (1, 64), (1, 65)], seed=8)
    batch = prepare(batch, work_cut(Heads(9, 3, 24, 4), few), decode_only=True)
    attend = partial(paged_attention_triton, tiles=few, interpret=True, decode_only=True)
    calls = [equation for equation in jax.make_jaxpr(attend)(q, pages, batch).eqns if "pallas_call" in str(equation)]
    assert calls[0].params["grid_mapping"].grid == (4,)
    assert batch.work.decodes.row_units[-1] * 3 > 4  # a program has several
    np.testing.assert_allclose(attend(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


def test_the_tiles_chosen_for_a_gpu_give_the_reference_too():
    shapes = Shapes(40, 4, 8, 32, 8, 2, 96)
    q, pages, batch = make_step(shapes, 2, [(1, 200), (1, 31), (36, 150)], seed=5)
    np.testing.assert_allclose(interpreted(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


def test_interpreting_costs_no_more_memory_with_a_larger_pool():
    q, pages, batch = make_step(Shapes(2, 2, 1, 16, 2, 1, 16), 1, [(1, 16)], seed=6)
    pool = jnp.pad(pages, ((0, 40_000), *((0, 0),) * 4))
    batch = prepare(batch, work_cut(Heads(2, 1, 16, 4), SMALL_TILES))
    memory = jax.jit(with_tiles(SMALL_TILES)).lower(q, pool, batch).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < pool.nbytes / 100


@pytest.mark.parametrize(
    ("q_dtype", "dtype", "head_dim"),
    [("bfloat16", "float32", 64), ("bfloat16", "int8", 64), ("float32", "float32", 8), ("float32", "float32", 1024)],
)
def test_types_and_head_dims_without_a_kernel_are_refused(q_dtype, dtype, head_dim):
    q, pages, batch = make_step(Shapes(1, 1, 1, 16, 1, 1, head_dim), 1, [(1, 1)], seed=7)
    q, pages = q.astype(q_dtype), pages.astype(dtype)
    assert not is_supported(q.dtype, pages.dtype, q.shape[2])
    with pytest.raises(
        ValueError, match=f"got queries in {q_dtype} and pages in {dtype} with head dim {head_dim}; fix"
    ):
        paged_attention_triton(q, pages, batch, interpret=True)


GROUPED_SINKS = jnp.linspace(-1, 3, GROUPED.num_heads, dtype=jnp.float32)
SCORINGS = {
    "window": Scoring(window=23),
    "cap and sinks": Scoring(soft_cap=0.7, sinks=GROUPED_SINKS),
    "all": Scoring(40, 2.0, GROUPED_SINKS),
}


def check_scored(scoring: Scoring, num_decode: int, rows: list[tuple[int, int]], seed: int) -> None:
    def attend(q, pages, batch):
        return paged_attention_triton(q, pages, batch, scoring=scoring, tiles=SMALL_TILES, interpret=True)

    q, pages, batch = make_step(GROUPED, num_decode, rows, seed)
    expected = jax.jit(paged_attention_reference)(q, pages, batch, scoring)
    if scoring.window is not None:  # pages that lie before all windows of their row may hold anything
        for row, (length, context) in enumerate(rows):
            behind = max(0, context - length + 1 - scoring.window) // GROUPED.page_size
            pages = pages.at[batch.page_tables[row, :behind]].set(jnp.nan)
    got = scheduled(jax.jit(attend), lambda _: SMALL_TILES)(q, pages, batch)
    np.testing.assert_allclose(got, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_decode_rows_and_chunks_score_as_the_reference(scoring: Scoring) -> None:
    check_scored(scoring, 3, [(1, 100), (1, 112), (1, 1), (20, 110), (0, 1), (9, 9)], 3)


def check_any_step(data: st.DataObject, attend: Attend, heads: tuple[int, int], *sizes: int, dtype: str) -> None:
    head_dim, page_size = sizes
    shapes = Shapes(48, 6, -(-300 // page_size), page_size, heads[0], heads[1], head_dim)
    q, pages, batch = make_step(*data.draw(steps([shapes])), dtype=jnp.dtype(dtype))
    out, want = (of(q, pages, batch).astype(jnp.float32) for of in (attend, reference))
    bound = 2e-5 if dtype == "float32" else 2**-6
    np.testing.assert_allclose(out, want, atol=bound, rtol=bound)


def over_every_case[**P](test: Callable[P, None]) -> Callable[P, None]:
    """Head dims, groups, page sizes and types, all with all."""
    for name, values in (
        ("dtype", ["float32", "bfloat16", "float16"]),
        ("page_size", [16, 48, 128]),
        ("heads", [(4, 4), (6, 2), (8, 1)]),
        ("head_dim", [64, 96, 128, 256]),
    ):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@pytest.mark.slow
@over_every_case
@settings(max_examples=5)
@given(data=st.data())
def test_every_head_dim_group_page_size_and_type(head_dim, heads, page_size, dtype, data):
    check_any_step(data, interpreted, heads, head_dim, page_size, dtype=dtype)


@pytest.mark.gpu
@over_every_case
@settings(max_examples=8)
@given(data=st.data())
def test_every_head_dim_group_page_size_and_type_on_a_gpu(head_dim, heads, page_size, dtype, data):
    check_any_step(data, on_gpu, heads, head_dim, page_size, dtype=dtype)
