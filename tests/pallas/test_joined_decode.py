"""The Triton kernel that rotates queries and keys and writes keys and values itself, interpreted, against all that in XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prepared_batch import prepare
from jinfercept.models.blocks import separate_heads
from jinfercept.models.config import RopeConfig
from jinfercept.models.rope import rotate, rotation
from jinfercept.pallas.layouts.pages import OUT_OF_RANGE, Batch, write_kv
from jinfercept.pallas.layouts.rows import rms_normed
from jinfercept.pallas.tiles import Heads, Tile, Tiles, work_cut
from jinfercept.pallas.triton_decode import joined_attention_triton
from tests.support.attention_steps import Shapes, make_step, reference

SHAPES = Shapes(12, 9, 7, 16, 9, 3, 24)
TILES = Tiles(Tile(16, 16, 4, 3), Tile(16, 16, 4, 3), programs=24)
EPS = 1e-5
ROPES = {
    "llama": RopeConfig(theta=10_000.0, rotary_dim=24),
    "gptj": RopeConfig(theta=10_000.0, rotary_dim=16, interleaved=True),
    "qwen3": RopeConfig(theta=1_000_000.0, rotary_dim=24),
}
joined = jax.jit(
    lambda qkv, pages, batch, scales, rope: joined_attention_triton(
        qkv, rotation(batch.positions, rope)._replace(eps=EPS, **scales), pages, batch, tiles=TILES, interpret=True
    ),
    static_argnums=4,
)


@partial(jax.jit, static_argnums=4)
def separately(qkv: jax.Array, pages: jax.Array, batch: Batch, scales: dict[str, jax.Array], rope: RopeConfig):
    q, k, v = separate_heads(qkv)
    if scales:
        q, k = rms_normed(q, scales["q_norm"], EPS), rms_normed(k, scales["k_norm"], EPS)
    q, k = rotate(q, batch.positions, rope), rotate(k, batch.positions, rope)
    pages = write_kv(pages, k, v, batch.write_index)
    return reference(q, pages, batch), pages


def step_of(contexts: list[int], seed: int, dtype: str, *, normed: bool):
    _, pages, batch = make_step(SHAPES, len(contexts), [(1, context) for context in contexts], seed, jnp.dtype(dtype))
    last, rows = np.array(contexts, np.int32) - 1, np.arange(len(contexts))
    index = np.arange(OUT_OF_RANGE, OUT_OF_RANGE + SHAPES.num_tokens, dtype=np.int32)
    index[rows] = np.asarray(batch.page_tables)[rows, last // 16] * 16 + last % 16
    batch = prepare(
        batch._replace(write_index=jnp.asarray(index)), work_cut(Heads(9, 3, 24, 4), TILES), decode_only=True
    )
    rng = np.random.default_rng(seed)
    qkv = jnp.asarray(rng.standard_normal((SHAPES.num_tokens, 3, 5, 24)), dtype)
    scales = {name: jnp.asarray(rng.uniform(0.5, 2.0, 24), dtype) for name in ("q_norm", "k_norm")} if normed else {}
    return qkv, pages, batch, scales


@pytest.mark.parametrize("family", ROPES)
@settings(max_examples=5)
@given(contexts=st.lists(st.integers(1, 112), max_size=9), seed=st.integers(0, 2**31 - 1))
def test_rotation_writes_and_attention_in_one_kernel_are_those_of_xla(
    family: str, contexts: list[int], seed: int
) -> None:
    step = step_of(contexts, seed, "float32", normed=family == "qwen3")
    (out, pages, counts), (want, written) = (run(*step, ROPES[family]) for run in (joined, separately))
    assert not np.any(counts), "the next layer counts from nothing"
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=0)
    np.testing.assert_allclose(pages, written, atol=2e-6, rtol=2e-6)  # slots that no row has written are NaN in both


@pytest.mark.parametrize(
    "family", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in ROPES]
)
def test_in_bfloat16_it_agrees_up_to_rounding(family: str) -> None:
    step = step_of([1, 2, 16, 17, 33, 100, 112], 3, "bfloat16", normed=family == "qwen3")
    (out, pages, counts), (want, written) = (run(*step, ROPES[family]) for run in (joined, separately))
    assert not np.any(counts), "the next layer counts from nothing"
    for computed, expected in ((out, want), (pages, written)):
        computed, expected = (numbers.astype(jnp.float32) for numbers in (computed, expected))
        np.testing.assert_allclose(computed, expected, atol=2**-6, rtol=2**-6)
