"""Writing keys and values into pages, and the abstract batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.layouts.pages import OUT_OF_RANGE, Batch, _write_rows, _write_words, kv_shape, write_kv
from tests.support.batch_shapes import batch_shapes

PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
SHAPE = kv_shape(6, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
write = jax.jit(write_kv, donate_argnums=0)


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
