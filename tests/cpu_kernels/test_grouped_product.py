"""Products of rows with the weights of experts against numpy, by each kind of instruction that this CPU has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.cpu_kernels import native
from tests.support.pretend import older_cpu

pytestmark = pytest.mark.skipif(not native.usable(), reason="kernels need llvmlite and an x86 CPU with AVX2")
DEPTH, COLUMNS = 96, 128
SIZES = {"few": (0, 7, 1, 0, 5), "many": (40, 0, 13, 1, 27), "one": (0, 0, 0, 1, 0)}


def operands(sizes: tuple[int, ...], dtype: Any) -> tuple[jax.Array, ...]:
    rng, count = np.random.default_rng(sum(sizes)), sum(sizes)
    x, stack = rng.standard_normal((count + 3, DEPTH)), rng.standard_normal((len(sizes), DEPTH, COLUMNS))
    sources, places = rng.integers(0, len(x), count), rng.permutation(count)
    return jnp.asarray(x, dtype), jnp.asarray(stack, dtype), *map(jnp.asarray, (sizes, sources, places))


def product(*operands: jax.Array) -> jax.Array:
    from jinfercept.cpu_kernels import products

    assert products.supports_grouped(operands[1].shape, operands[0].dtype, operands[1].dtype)
    return jax.jit(products.grouped_product)(*operands)


def in_float32(x: jax.Array, stack: jax.Array, sizes: jax.Array, sources: jax.Array, places: jax.Array) -> np.ndarray:
    wide_x, wide_stack = np.asarray(x, np.float32), np.asarray(stack, np.float32)
    result = np.empty((len(places), COLUMNS), np.float32)
    for place, source, expert in zip(places, sources, np.repeat(np.arange(len(sizes)), sizes), strict=True):
        result[place] = wide_x[source] @ wide_stack[expert]
    return result


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_is_multiplied_with_its_experts_weight(
    sizes: tuple[int, ...], dtype: str, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:
        older_cpu(monkeypatch)
    arguments = operands(sizes, dtype)
    got = product(*arguments)
    assert got.dtype == dtype
    expected = in_float32(*arguments)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), expected, atol=1e-4, rtol=1e-2 if dtype == "bfloat16" else 1e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whatever_other_rows_its_expert_has(dtype: str) -> None:
    x, stack, *_ = operands(SIZES["many"], dtype)
    count = jnp.arange(40)
    alone, beside, all_of_it = (
        product(x[:40], stack, jnp.array(sizes), count, count)[0]
        for sizes in ((1, 39, 0, 0, 0), (3, 0, 30, 0, 7), (40, 0, 0, 0, 0))
    )
    np.testing.assert_array_equal(alone, beside)
    np.testing.assert_array_equal(alone, all_of_it)
