"""The GPU's kernel for quantised products, interpreted, against the unpacked weight."""

import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.layouts.packed_weights import ORDER, pack, unpack
from jinfercept.pallas import triton_quantized
from tests.support.quantized_weight import mxfp4_weight


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "bits", "group", "offset", "zero"),
    [
        (1, 576, 96, 4, 32, True, 0),  # stored rows and blocks that fill no tile
        (20, 1024, 64, 4, 128, False, 8),
        (70, 512, 128, 8, 16, True, 0),  # two tiles of rows
        (3, 4096, 64, 8, 32, False, 0),  # inputs in eight parts
        (5, 256, 96, "e4m3", 256, False, 0),
    ],
)
def test_the_kernel_multiplies_with_the_unpacked_numbers(
    rows: int, inputs: int, outputs: int, bits: int | str, group: int, offset: bool, zero: int
) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 16, (inputs, outputs), np.int8)
    if bits != 4:
        numbers = (numbers * np.int16(16) - 128).astype(np.int8 if bits == 8 else jnp.float8_e4m3fn)
    scales, offsets = jnp.asarray(rng.standard_normal((2, inputs // group, outputs)), jnp.float16)
    packed = pack(jnp.asarray(numbers), scales, offsets if offset else None, bits=4 if bits == 4 else 8, zero=zero)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.bfloat16)
    y = triton_quantized.product(zero, jnp.float32, ORDER, x, *packed[:3], interpret=True)
    expected = np.asarray(x, np.float64) @ np.asarray(unpack(packed, jnp.bfloat16), np.float64)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


def test_the_kernel_multiplies_numbers_in_mxfp4() -> None:
    packed, numbers = mxfp4_weight(96, 64)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 96)), jnp.bfloat16)
    y = triton_quantized.product(0, jnp.float32, ORDER, x, *packed[:3], interpret=True)
    expected = np.asarray(x, np.float64) @ numbers
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())
