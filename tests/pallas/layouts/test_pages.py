"""Writing keys and values into pages, those of TPUs too, and the abstract batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.pallas.layouts.interleaved import (
    FP8,
    apart,
    interleaved_shape,
    padded_dim,
    padded_heads,
    with_padded_heads,
    write_interleaved,
)
from jinfercept.pallas.layouts.pages import OUT_OF_RANGE, Batch, _write_rows, _write_words, kv_shape, write_kv
from tests.support.attention_steps import batch_shapes

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


def test_a_donated_pool_of_tpus_is_written_in_place():
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


PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
SHAPE = kv_shape(6, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)


def keys_and_values(num_tokens: int) -> tuple[jax.Array, jax.Array]:
    key = jax.random.normal(jax.random.key(0), (num_tokens, NUM_KV_HEADS, HEAD_DIM))
    return key, key + 10.0


def test_a_token_lands_in_its_page_at_its_offset_and_nowhere_else():
    key, value = keys_and_values(3)
    index = jnp.array([5 * PAGE_SIZE + 3, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1])
    expected = np.zeros(SHAPE, np.float32)
    for token, (page, offset) in enumerate([(5, 3), (2, 0), (2, 1)]):
        expected[page, offset, 0], expected[page, offset, 1] = key[token], value[token]
    np.testing.assert_array_equal(write(jnp.zeros(SHAPE), key, value, index), expected)


def test_padding_tokens_change_nothing():
    key, value = keys_and_values(5)
    assert not np.any(write(jnp.zeros(SHAPE), key, value, OUT_OF_RANGE + jnp.arange(5)))


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "float16"), (4, "bfloat16"), (16, "float32")])
def test_words_are_written_as_numbers_are(page_size: int, dtype: str):
    key, value = (x.astype(dtype) for x in keys_and_values(3))
    index = jnp.array([2 * page_size, OUT_OF_RANGE, 4 * page_size - 1])
    before = jax.random.normal(jax.random.key(1), kv_shape(6, page_size, NUM_KV_HEADS, HEAD_DIM), dtype)
    np.testing.assert_array_equal(
        _write_words(before, key, value, index), _write_rows(before, key, value, index), strict=True
    )


def test_a_donated_pool_is_written_in_place():
    key, value = keys_and_values(4)
    pages = jnp.zeros(kv_shape(512, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM))
    where = pages.unsafe_buffer_pointer()
    for first in (4, 400, 2044):
        pages = write(pages, key, value, jnp.arange(first, first + 4))
        assert pages.unsafe_buffer_pointer() == where


def test_keys_and_values_are_rounded_to_the_type_of_the_pages():
    key, value = keys_and_values(1)
    pages = write(jnp.zeros(SHAPE, jnp.bfloat16), key, value, jnp.array([PAGE_SIZE]))
    assert pages.dtype == jnp.bfloat16
    np.testing.assert_array_equal(pages[1, 0, 0], key[0].astype(jnp.bfloat16))


def test_the_abstract_batch_of_a_bucket_has_its_shapes():
    assert list(batch_shapes(7, 3, 5)) == [name for name in Batch._fields if name not in Batch._field_defaults]
    assert list(batch_shapes(7, 3, 5).values()) == [(7,), (7,), (7,), (4,), (3,), (3, 5), ()]
