"""Attention over pages: the reference against a dense oracle in numpy, every implementation against the reference."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.attention import CHUNK_QUERIES, DECODE_ROWS, _tiled, paged_attention_cpu
from jinfercept.models.attention import available, paged_attention
from jinfercept.pallas.layouts.pages import write_kv
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tiles import Heads
from tests.support.attention_steps import Shapes, make_step, reference, steps

SMALL = Shapes(12, 16, 12, 4, 6, 2, 16)  # fewer tokens than rows
RAGGED = Shapes(140, 11, 14, 16, 9, 3, 32)  # several tiles of rows, of queries and of pages
ONE_HEAD_EACH = Shapes(40, 3, 5, 40, 2, 2, 256)  # no groups, pages that do not divide a tile
WIDE_PAGES = Shapes(70, 4, 3, 128, 4, 1, 32)  # one KV head, pages larger than a tile
ONE_TOKEN = Shapes(1, 1, 20, 16, 9, 3, 64)
ALL_SHAPES = [SMALL, RAGGED, ONE_HEAD_EACH, WIDE_PAGES, ONE_TOKEN]

cpu, tiled = jax.jit(paged_attention_cpu), jax.jit(_tiled)


def dense_attention(
    q: np.ndarray, key: np.ndarray, value: np.ndarray, positions: Sequence[int], scoring: Scoring
) -> np.ndarray:
    """Causal attention on one unpaged sequence, as a layer scores: q [T, H, D], key and value [C, K, D], in float64."""
    out, group = np.zeros(q.shape, np.float64), q.shape[1] // key.shape[1]
    for token, head in np.ndindex(q.shape[:2]):
        end = positions[token] + 1
        seen = slice(max(0, end - (scoring.window or end)), end)
        scores = key[seen, head // group].astype(np.float64) @ q[token, head] / np.sqrt(q.shape[2])
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * np.tanh(scores / scoring.soft_cap)
        weights = np.exp(scores)
        sink = 0.0 if scoring.sinks is None else np.exp(scoring.sinks[head])
        out[token, head] = weights / (weights.sum() + sink) @ value[seen, head // group]
    return out


@settings(max_examples=20)
@given(steps(ALL_SHAPES))
def test_cpu_attention_agrees_with_the_reference_on_any_ragged_batch(step):
    q, pages, batch = make_step(*step)
    np.testing.assert_allclose(cpu(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


@settings(max_examples=10)
@given(steps([SMALL]))
def test_cpu_attention_without_kernels_agrees_with_the_reference(step):
    q, pages, batch = make_step(*step)
    np.testing.assert_allclose(tiled(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


@settings(max_examples=10)
@given(steps([SMALL, RAGGED]))
def test_cpu_attention_on_bfloat16_pages_agrees_up_to_rounding(step):
    q, pages, batch = make_step(*step, dtype=jnp.bfloat16)
    got, want = cpu(q, pages, batch), reference(q, pages, batch)
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=2**-8, rtol=2**-7)


@pytest.mark.skipif(not native.usable(), reason="this CPU has no AVX2")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_in_vectors_of_eight_numbers_agree_with_the_reference(dtype, monkeypatch):
    from jinfercept.cpu_kernels import chunks, decode

    monkeypatch.setattr(native, "lanes", lambda: 8)
    for num_decode in (2, 6):
        rows = [(1, 7 + 20 * row) for row in range(num_decode)] + [(40, 100), (3, 3)]
        q, pages, batch = make_step(RAGGED, num_decode, rows, 4, dtype=dtype)
        got = jax.jit(decode.decode_attention)(q, pages, batch, batch.num_decode)
        want = reference(q, pages, batch)
        if chunks.supports(q, pages):
            got = jax.jit(chunks.chunk_attention)(q, pages, batch, got)
        else:
            got, want = got[:num_decode], want[:num_decode]
        tolerance = 2e-5 if dtype == jnp.float32 else 2**-7
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("attend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("shapes", [RAGGED, ONE_HEAD_EACH, WIDE_PAGES])
def test_attention_over_pages_is_dense_causal_attention_on_the_unpaged_sequence(attend, shapes):
    rows = [(1, 33), (1, 1), (30, 100)]
    q, pages, batch = make_step(shapes, 2, rows, seed=1)
    out = np.asarray(attend(q, pages, batch))
    for row, (length, context) in enumerate(rows):
        mine = slice(int(batch.query_starts[row]), int(batch.query_starts[row]) + length)
        sequence = np.asarray(pages[batch.page_tables[row]]).reshape(-1, 2, shapes.num_kv_heads, shapes.head_dim)
        dense = dense_attention(
            np.asarray(q[mine]), sequence[:context, 0], sequence[:context, 1], batch.positions[mine].tolist(), Scoring()
        )
        np.testing.assert_allclose(out[mine], dense, atol=2e-5, rtol=0)


@pytest.mark.parametrize("attend", [reference, cpu], ids=["reference", "cpu"])
def test_padding_tokens_and_an_empty_batch_give_zeros(attend):
    q, pages, batch = make_step(RAGGED, 1, [(1, 50), (70, 90)], seed=2)
    out = attend(q, pages, batch)
    assert not np.any(out[71:])
    assert np.all(np.any(np.asarray(out[:71]), axis=-1))
    assert not np.any(attend(*make_step(RAGGED, 0, [], seed=2)))


def test_tile_borders_make_no_difference():
    shapes = RAGGED._replace(num_tokens=480, pages_per_row=18)
    for number, chunk in enumerate(range(CHUNK_QUERIES - 1, CHUNK_QUERIES + 2)):
        num_decode = DECODE_ROWS - 1 + number
        rows = [(1, 17)] * num_decode + [(chunk, chunk), (min(200, shapes.num_tokens - num_decode - chunk), 210)]
        q, pages, batch = make_step(shapes, num_decode, rows, seed=chunk)
        np.testing.assert_allclose(cpu(q, pages, batch), reference(q, pages, batch), atol=2e-5, rtol=0)


def test_batches_of_one_bucket_share_one_executable():
    traces = []

    def traced(q, pages, batch):
        traces.append(q.shape)
        return paged_attention_cpu(q, pages, batch)

    attend = jax.jit(traced)
    for num_decode, rows in ((0, []), (1, [(1, 5)]), (0, [(12, 48)]), (3, [(1, 1), (1, 40), (1, 7), (9, 9)])):
        attend(*make_step(SMALL, num_decode, rows, seed=5))
    assert len(traces) == 1


def test_a_donated_write_and_the_attention_after_it_copy_no_pool():
    q, pages, batch = make_step(RAGGED, 1, [(1, 50), (70, 90)], seed=6)

    def layer(q, pages, batch):
        new = q[:, : RAGGED.num_kv_heads]
        pages = write_kv(pages, new, new, batch.write_index)
        return paged_attention(q, pages, batch, implementation="cpu"), pages

    pool = jnp.pad(pages, ((0, 4000), *((0, 0),) * 4))
    memory = jax.jit(layer, donate_argnums=1).lower(q, pool, batch).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 10


def test_what_is_available_on_a_cpu_is_its_own():
    assert available("float32", "float32", Heads(4, 2, 64, 4), 16) == ["cpu"]


SINKS = jnp.linspace(-1, 3, RAGGED.num_heads, dtype=jnp.float32)
SCORINGS = {
    "window": Scoring(window=23),
    "cap and sinks": Scoring(soft_cap=0.7, sinks=SINKS),
    "all": Scoring(1, 2.0, SINKS),
}


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_the_reference_scores_as_a_layer_says(scoring: Scoring) -> None:
    shapes = RAGGED
    q, pages, batch = make_step(shapes, 0, [(90, 90)], 3)
    context = np.asarray(pages)[np.asarray(batch.page_tables)[0]].reshape(-1, *pages.shape[2:])[:90]
    expected = dense_attention(np.asarray(q[:90]), context[:, 0], context[:, 1], range(90), scoring)
    np.testing.assert_allclose(paged_attention_reference(q, pages, batch, scoring)[:90], expected, atol=2e-5)


def check_scored(scoring: Scoring, attend, dtype) -> None:
    scored = jax.jit(lambda q, pages, batch: attend(q, pages, batch, scoring))
    expected = jax.jit(lambda q, pages, batch: paged_attention_reference(q, pages, batch, scoring))
    for num_decode, rows in ((3, [(1, 224), (1, 1), (1, 30)]), (1, [(1, 90), (60, 60), (70, 200), (0, 1)])):
        step = make_step(RAGGED, num_decode, rows, 5, dtype=dtype)
        got, want = (of(*step).astype(jnp.float32) for of in (scored, expected))
        tolerance = 3e-5 if dtype == jnp.float32 else 2**-7
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=0 if dtype == jnp.float32 else 2**-7)


# a window alone: `test_a_kernel_reads_no_page_before_the_window`
@pytest.mark.parametrize(
    ("name", "dtype", "lanes"),
    [("cap and sinks", jnp.float32, None), ("all", jnp.float32, 8), ("all", jnp.bfloat16, None)],
)
def test_attention_on_a_cpu_scores_as_the_reference(name: str, dtype, lanes: int | None, monkeypatch) -> None:
    if lanes is not None and native.usable():
        monkeypatch.setattr(native, "lanes", lambda: lanes)
    check_scored(SCORINGS[name], paged_attention_cpu, dtype)


def test_attention_without_kernels_scores_as_the_reference() -> None:
    check_scored(SCORINGS["all"], _tiled, jnp.float32)


def test_a_kernel_reads_no_page_before_the_window() -> None:
    scoring = Scoring(window=23)
    rows = [(1, 224), (1, 90), (1, 30), (20, 150)]
    q, pages, batch = make_step(RAGGED, 3, rows, 5)
    expected = jax.jit(paged_attention_reference)(q, pages, batch, scoring)
    for row, (length, context) in enumerate(rows):
        behind = max(0, context - length + 1 - 23) // RAGGED.page_size
        pages = pages.at[batch.page_tables[row, :behind]].set(jnp.nan)
    scored = jax.jit(lambda q, pages, batch: paged_attention_cpu(q, pages, batch, scoring))
    np.testing.assert_allclose(scored(q, pages, batch), expected, atol=3e-5, rtol=0)
