"""Quantised weights: their numbers come back from blocks, and products are those of the numbers."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.cpu_kernels import native
from jinfercept.models.quantized import product, supports
from jinfercept.pallas.layouts.packed_weights import ORDER, Packed, e2m1_pairs, from_e2m1, unpack
from tests.support.pretend import older_cpu
from tests.support.quantized_weight import mxfp4_weight, pack_nibbles, weight


@settings(max_examples=8)
@given(
    rows=st.sampled_from([1, 3, 13, 40, 257]),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 48, 128]),
    columns=st.integers(1, 3).map(lambda n: 32 * n),
    bits=st.sampled_from([4, 8]),
    offset=st.booleans(),
    zero=st.sampled_from([0, 8]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    older=st.booleans(),
)
def test_a_product_is_that_of_the_numbers(
    rows: int,
    groups: int,
    group: int,
    columns: int,
    bits: int,
    offset: bool,
    zero: int,
    dtype: str,
    older: bool,
):
    packed, numbers = weight(groups * group, columns, bits=bits, group=group, offset=offset, zero=zero)
    np.testing.assert_allclose(unpack(packed, jnp.float32), numbers, rtol=1e-6)
    x = jax.random.normal(jax.random.key(0), (rows, groups * group), jnp.dtype(dtype))
    with pytest.MonkeyPatch.context() as patch:
        if older and native.usable():
            older_cpu(patch)
        got = jax.jit(lambda x: product(x, packed, jnp.float32))(x)
    exact = np.abs(np.asarray(x, np.float32)) @ np.abs(numbers)
    tolerance = 1e-2 if dtype == "bfloat16" and (rows > 12 or not supports(x, packed)) else 1e-5
    assert np.all(np.abs(got - np.asarray(x, np.float32) @ numbers) <= tolerance * exact)


def test_pairs_of_mxfp4_are_the_scaled_numbers() -> None:
    bits, scales = np.arange(16, dtype=np.uint8), np.arange(1, 253, dtype=np.uint8)
    rows = np.concatenate([bits[:8], bits[8:]])[:, None] + np.zeros((1, len(scales)), np.uint8)
    words = jnp.asarray(pack_nibbles(jnp.asarray(from_e2m1(rows))))  # [2, scales]
    pairs = np.stack(e2m1_pairs(words, jnp.asarray(scales)[None].repeat(2, 0)), axis=1)  # [2, 4, scales]
    halves = np.concatenate([pairs & 0xFFFF, pairs >> 16], axis=1)[:, np.argsort(ORDER)].reshape(16, -1)
    numbers = np.asarray(halves, np.uint16).view(jnp.bfloat16).astype(np.float64)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = np.ldexp(np.concatenate([values, -values])[:, None], scales.astype(int)[None] - 127)
    normal = np.abs(expected) >= 2.0**-126
    np.testing.assert_array_equal(numbers[normal], expected[normal])
    assert np.abs(numbers[~normal]).max() < 2.0**-125


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_a_product_in_mxfp4_is_that_of_the_numbers(
    rows: int, dtype: str, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, numbers = mxfp4_weight(96, 64)
    np.testing.assert_array_equal(unpack(packed, jnp.bfloat16).astype(jnp.float32), numbers)
    x = jax.random.normal(jax.random.key(0), (rows, 96), jnp.dtype(dtype))
    if older and native.usable():
        older_cpu(monkeypatch)
    got = jax.jit(lambda x: product(x, packed, jnp.float32))(x)
    exact = np.abs(np.asarray(x, np.float32)) @ np.abs(numbers)
    assert np.all(np.abs(got - np.asarray(x, np.float32) @ numbers) <= 1e-5 * exact)


def test_a_product_is_part_of_a_scan_over_weights_and_of_a_map_over_rows():
    both = [weight(64, 64, bits=4, group=32, offset=True, seed=seed) for seed in (0, 1)]
    arrays = [packed[:3] for packed, _ in both]
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *arrays)
    x = jax.random.normal(jax.random.key(0), (3, 64))

    @jax.jit
    def scanned(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, arrays: (product(x, Packed(*arrays), jnp.float32), None), x, stack)[0]

    expected = np.asarray(x) @ both[0][1] @ both[1][1]
    np.testing.assert_allclose(scanned(x), expected, rtol=1e-4, atol=1e-2)
    mapped = jax.vmap(lambda row: product(row[None], both[0][0], jnp.float32)[0])(x)
    np.testing.assert_allclose(mapped, np.asarray(x) @ both[0][1], rtol=1e-4, atol=1e-3)


def test_several_threads_multiply_at_once():
    packed, numbers = weight(64, 3200, bits=4, group=32)
    x = jax.random.normal(jax.random.key(0), (3, 64))
    multiply = jax.jit(lambda x: product(x, packed, jnp.float32))
    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(lambda _: multiply(x), range(32)):
            np.testing.assert_allclose(got, np.asarray(x) @ numbers, rtol=1e-4, atol=1e-3)
