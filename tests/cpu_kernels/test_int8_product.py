"""Rows rounded to int8: products are those of the rounded rows, with and without kernels, and do not depend on other rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.cpu_kernels import native
from jinfercept.models.quantized import product
from jinfercept.pallas.layouts.packed_weights import row_group
from jinfercept.pallas.layouts.rows import Gated, Normed, Rows, dense, rounded
from tests.support.pretend import older_cpu
from tests.support.quantized_weight import weight

CPU = Literal["this", "eight numbers", "no bytes"]


@contextmanager
def on(cpu: CPU) -> Iterator[None]:
    """As on a CPU with shorter vectors, or without instructions for bytes."""
    with pytest.MonkeyPatch.context() as patch:
        if cpu != "this" and native.usable():
            bytes_ = {"avxvnni"} if cpu == "eight numbers" and "avx512vnni" in native.features() else set[str]()
            older_cpu(patch, *bytes_)
        yield


def int8_kernels_are_usable() -> bool:
    from jinfercept.cpu_kernels import int8_product

    return int8_product.usable()


@settings(max_examples=10)
@given(
    rows=st.sampled_from([1, 3, 8, 9, 40, 257]),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 48, 128]),
    bits=st.sampled_from([4, 8]),
    offset=st.booleans(),
    zero=st.sampled_from([0, 8]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kind=st.sampled_from(["plain", "gated", "normed"]),
    cpu=st.sampled_from(["this", "eight numbers", "no bytes"]),
)
def test_a_product_is_that_of_the_rounded_rows(
    rows: int, groups: int, group: int, bits: int, offset: bool, zero: int, dtype: str, kind: str, cpu: CPU
) -> None:
    depth = groups * group
    packed, numbers = weight(depth, 64, bits=bits, group=group, offset=offset, zero=zero)
    first, second = 2 * jax.random.normal(jax.random.key(0), (2, rows, depth), jnp.dtype(dtype))
    given: Rows = first
    if kind == "gated":
        given = Gated(jnp.stack([first, second], axis=1))
    elif kind == "normed":
        given = Normed(first, second[0], 1e-5)
    with on(cpu):
        got = jax.jit(lambda rows: product(rows, packed, jnp.float32, int8_rows=True))(given)
        multiplies_bytes = int8_kernels_are_usable() or not native.usable()
    exact = dense(jax.tree.map(lambda array: array.astype(jnp.float32), given))
    near = np.asarray(rounded(exact, row_group(group)), np.float64)
    by_group = (rows, -1, row_group(group))
    largest = np.abs(exact).reshape(by_group).max(2, keepdims=True)
    assert np.all(np.abs(near - exact).reshape(by_group) <= largest * 0.501 / 127)
    size = np.abs(near) @ np.abs(numbers.astype(np.float64))
    tolerance = (
        2e-2 if dtype == "bfloat16" and not multiplies_bytes else 1e-5 if kind == "plain" else 1e-2
    )  # halves go both ways
    assert np.all(np.abs(got - near @ numbers) <= tolerance * size + 1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_whatever_is_beside_it(bits: int) -> None:
    if not native.usable() or not int8_kernels_are_usable():
        pytest.skip("this CPU has no kernels, or no instructions for bytes")
    packed, _ = weight(96, 64, bits=bits, group=32, offset=True)
    x = jax.random.normal(jax.random.key(0), (300, 96), jnp.bfloat16)
    multiply = jax.jit(lambda x: product(x, packed, jnp.float32, int8_rows=True))
    whole = np.asarray(multiply(x))
    for start, end in ((0, 1), (5, 7), (3, 11), (8, 41), (0, 257)):
        np.testing.assert_array_equal(multiply(x[start:end]), whole[start:end])


def test_zeros_stay_zeros_and_what_is_no_number_is_not_hidden() -> None:
    packed, _ = weight(64, 32, bits=4, group=32)
    x = jnp.ones((4, 64)).at[0].set(0.0).at[1, 40].set(jnp.nan).at[2, 3].set(jnp.inf)
    got = np.asarray(jax.jit(lambda x: product(x, packed, jnp.float32, int8_rows=True))(x))
    assert not got[0].any()
    assert not np.isfinite(got[1:3]).any()
    assert np.isfinite(got[3]).all()
