"""Pages of TPUs: heads' keys and values next to each other, in rows that fill tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.layouts.interleaved import (
    FP8,
    apart,
    interleaved_shape,
    padded_dim,
    padded_heads,
    with_padded_heads,
    write_interleaved,
)
from jinfercept.layouts.pages import OUT_OF_RANGE, kv_shape, write_kv

write = jax.jit(write_kv, donate_argnums=0)


@pytest.mark.parametrize(("heads", "dtype", "padded"), [(1, "bfloat16", 1), (3, "bfloat16", 4), (8, "bfloat16", 8)])
def test_heads_are_as_many_as_jaxs_kernel_takes(heads, dtype, padded):
    assert padded_heads(heads, dtype) == padded


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", FP8.name])
def test_jaxs_kernel_takes_any_number_of_padded_heads(dtype):
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk

    for heads in range(1, 129):
        padded = padded_heads(heads, dtype)
        assert heads <= padded < 2 * heads + 8
        queries = jnp.dtype("bfloat16" if dtype == FP8.name else dtype)
        get_min_heads_per_blk(4 * padded, 2 * padded, queries, jnp.dtype(dtype))  # raises if it does not


def test_columns_are_whole_lanes():
    assert [padded_dim(dim) for dim in (64, 80, 96, 128, 256)] == [128, 128, 128, 128, 256]


def test_each_device_has_its_own_heads_of_zeros():
    assert interleaved_shape(5, 16, 6, 64, jnp.bfloat16, num_devices=2) == (5, 16, 2 * 2 * 4, 128)
    assert interleaved_shape(5, 16, 8, 128, FP8) == (5, 16, 2 * 8, 128)


def test_a_token_lands_in_its_page_with_each_heads_key_before_its_value():
    pages, plain = interleaved_shape(6, 4, 3, 64, jnp.bfloat16), kv_shape(6, 4, 3, 64)
    keys = jax.random.normal(jax.random.key(0), (4, 3, 64), jnp.bfloat16)
    index = jnp.array([5 * 4 + 3, 2 * 4, 2 * 4 + 1, OUT_OF_RANGE])
    written = write(jnp.zeros(pages, jnp.bfloat16), keys, keys + 10, index)
    expected = write(jnp.zeros(plain, jnp.bfloat16), keys, keys + 10, index)
    np.testing.assert_array_equal(apart(written)[:, :, :, :3, :64], expected)
    assert jnp.count_nonzero(written) == jnp.count_nonzero(expected)
    np.testing.assert_array_equal(written[5, 3, 1, :64], keys[0, 0] + 10)


def test_numbers_beyond_fp8_are_its_largest():
    keys = jnp.array([[[1e4, -1e4, 448.0, 0.3]]], jnp.bfloat16)
    written = write(jnp.zeros(interleaved_shape(2, 4, 1, 4, FP8), FP8), keys, keys, jnp.array([4]))
    np.testing.assert_allclose(written[1, 0, 0, :4].astype(jnp.float32), [448, -448, 448, 0.3], rtol=1 / 16)


def test_a_donated_pool_is_written_in_place():
    pages = jnp.zeros(interleaved_shape(512, 4, 2, 64, jnp.float32), jnp.float32)
    keys, where = jnp.ones((4, 2, 64)), pages.unsafe_buffer_pointer()
    written = jax.jit(write_interleaved, donate_argnums=0)(pages, keys, keys, jnp.arange(400, 404))
    assert written.unsafe_buffer_pointer() == where


def test_queries_of_heads_of_zeros_are_zeros_behind_the_others():
    pages, q = jnp.zeros(interleaved_shape(2, 4, 3, 64, jnp.bfloat16), jnp.bfloat16), jnp.ones((5, 9, 64))
    padded = with_padded_heads(q, 3, pages)
    assert padded.shape == (5, 12, 64)
    assert not np.any(padded[:, 9:])
    assert with_padded_heads(q, 3, jnp.zeros(kv_shape(2, 4, 3, 64))) is q
