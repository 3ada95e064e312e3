"""Quantised rows of pages: what rounding costs, what a row depends on, and every kernel on them."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.cpu_kernels.attention import paged_attention_cpu
from jinfercept.models.attention import available
from jinfercept.pallas.gpu_kernels import paged_attention_mosaic
from jinfercept.pallas.layouts.kv_rows import STORED, dequantised, quantised, row_width, widened
from jinfercept.pallas.layouts.pages import kv_shape, write_kv
from jinfercept.pallas.tiles import Heads, Tile, Tiles
from jinfercept.pallas.triton_attention import paged_attention_triton
from jinfercept.runner.page_transfers import _scatter_pages, _scatter_words
from tests.support.attention_steps import Shapes, make_step, reference, scheduled

FORMATS = sorted(STORED)
SHAPES = Shapes(16, 4, 3, 16, 6, 2, 24)
ROWS = [(1, 40), (1, 16), (9, 37), (5, 5)]
TILES = Tiles(Tile(16, 16, 4, 3), Tile(16, 16, 4, 3), programs=24)
interpreted = partial(paged_attention_triton, tiles=TILES, interpret=True)
KERNELS = {"cpu": jax.jit(paged_attention_cpu), "triton": scheduled(jax.jit(interpreted), lambda _: TILES)}


def pack_pages(rows: jax.Array, stored: jnp.dtype) -> jax.Array:
    """Whole pages of rows as page arrays of this type store them."""
    *before, page_size, _, num_kv_heads, head_dim = rows.shape
    words, scales = quantised(rows, stored)
    parts = words.reshape(*before, -1), jnp.moveaxis(scales, -3, -1).reshape(*before, -1)
    width = row_width(head_dim, stored)
    return jnp.concatenate(parts, axis=-1).reshape(*before, page_size, 2, num_kv_heads, width)


round_trip = jax.jit(lambda x, stored: dequantised(pack_pages(x, stored)), static_argnums=1)
write = jax.jit(write_kv)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31 - 1), exponent=st.integers(-20, 20), spread=st.floats(0, 12))
def test_a_number_is_stored_within_the_bound_of_its_format(name: str, seed: int, exponent: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 2, 1, 16)) * 2.0 ** (exponent - spread * rng.random((3, 2, 1, 16)))
    x = x.astype(np.float32)
    x[0, 0] = 0.0
    largest = np.abs(x).max(axis=-1, keepdims=True)
    bound = largest / 254 if name == "int8" else np.maximum(np.abs(x) / 16, largest / 458_752)
    assert np.all(np.abs(np.asarray(round_trip(x, STORED[name])) - x) <= bound * 1.001)


def test_every_number_of_e4m3_is_widened_exactly() -> None:
    bits = np.array([bits for bits in range(256) if bits & 0x7F != 0x7F], np.uint8)
    want = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_array_equal(jax.jit(widened, static_argnums=1)(bits, "float32"), want)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20)
@given(cuts=st.sets(st.integers(1, 11)), seed=st.integers(0, 2**31 - 1))
def test_pages_do_not_depend_on_how_tokens_were_cut_into_steps(name: str, cuts: set[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((12, 2, 8)).astype(np.float32) for _ in range(2))
    empty = jnp.zeros(kv_shape(5, 4, 2, 8, STORED[name]), STORED[name])
    whole, pieces = write(empty, key, value, np.arange(4, 16)), empty
    rows = jnp.stack([key, value], axis=1).reshape(3, 4, 2, 2, 8)
    np.testing.assert_array_equal(whole[1:4], pack_pages(rows, STORED[name]))
    borders = [0, *sorted(cuts), 12]
    for first, end in pairwise(borders):
        index = np.arange(2**30, 2**30 + 12)  # one static shape: the other rows are padding
        index[first:end] = np.arange(4 + first, 4 + end)
        pieces = write(pieces, key, value, index)
    np.testing.assert_array_equal(pieces, whole)


@pytest.mark.parametrize("name", FORMATS)
def test_words_of_quantised_pages_are_moved_as_numbers_are(name: str) -> None:
    stored, rng = STORED[name], np.random.default_rng(0)
    pages, empty = (
        pack_pages(jnp.asarray(rng.standard_normal((5, 4, 2, 2, 8))), stored),
        jnp.zeros(kv_shape(5, 4, 2, 8, stored), stored),
    )
    arrays, slots = (jnp.stack([pages[2:4]], axis=1),), jnp.array([4, 1])
    moved = (_scatter_pages((empty,), slots, arrays), _scatter_words((empty,), slots, arrays))
    np.testing.assert_array_equal(moved[0], moved[1], strict=True)
    np.testing.assert_array_equal(moved[0][0][4], pages[2])


@pytest.mark.parametrize(
    ("kernel", "name", "dtype"),
    [
        ("cpu", "int8", "float32"),
        ("cpu", "fp8", "bfloat16"),
        ("triton", "fp8", "float32"),
        ("triton", "int8", "bfloat16"),
    ],
)
def test_every_kernel_reads_quantised_pages_as_the_reference_does(kernel: str, name: str, dtype: str) -> None:
    q, pages, batch = make_step(SHAPES, 2, ROWS, seed=5, dtype=dtype)
    stored = pack_pages(pages, STORED[name])  # what no row has written stays NaN: its scale is
    got, want = KERNELS[kernel](q, stored, batch), reference(q, stored, batch)
    rounding = 2e-5 if dtype == "float32" else 2**-6
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=rounding, rtol=rounding)


def test_quantised_pages_go_to_the_kernels_that_read_them() -> None:
    q, pages, batch = make_step(SHAPES._replace(head_dim=64), 2, ROWS, seed=5, dtype=jnp.bfloat16)
    heads = Heads(6, 2, 64, 4, quantised=True)
    for stored in STORED.values():
        assert available("float32", stored, heads, 16) == [{"cpu": "cpu", "gpu": "triton"}[jax.default_backend()]]
        with pytest.raises(ValueError, match=r"the Mosaic kernel has no such attention; .* or the kernel triton"):
            paged_attention_mosaic(q, pack_pages(pages, stored), batch, interpret=True)


def test_a_head_that_fills_no_words_is_refused() -> None:
    with pytest.raises(ValueError, match="got head dim 6; fix: use kv_cache_dtype auto"):
        kv_shape(2, 4, 2, 6, STORED["int8"])
