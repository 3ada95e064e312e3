"""The GPU's kernels for products of experts and of quantised weights, interpreted, against products one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.pallas import triton_grouped, triton_quantized
from jinfercept.pallas.layouts.packed_weights import ORDER, Packed, unpack
from jinfercept.pallas.triton_grouped import product, row_tiles
from tests.support.quantized_weight import mxfp4_weight, pack, weight


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


SIZES = ([0, 37, 1, 0, 22, 0], [16, 0, 0, 32, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6)


def expected(x: jax.Array, stack: np.ndarray, sizes: list[int]) -> np.ndarray:
    experts = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.asarray(x, np.float64)[: len(experts)]
    return np.stack([row @ stack[expert].astype(np.float64) for row, expert in zip(rows, experts, strict=True)])


@pytest.mark.parametrize("sizes", SIZES[:3])
@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(96, 144, 16), (64, 128, 64)])
def test_rows_are_multiplied_with_the_weights_of_their_experts(
    sizes: list[int], inputs: int, outputs: int, rows: int
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, inputs)), jnp.bfloat16)
    stack = jnp.asarray(rng.standard_normal((6, inputs, outputs)), jnp.bfloat16)
    y = product(x, row_tiles(jnp.asarray(sizes), 64, rows), stack, interpret=True)
    wanted = expected(x, np.asarray(stack), sizes)
    np.testing.assert_allclose(np.asarray(y, np.float64)[: len(wanted)], wanted, atol=0.01 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["mxfp4", "4 bits", "8 bits"])
@pytest.mark.parametrize("rows", [16, 128])
def test_rows_are_multiplied_with_quantised_weights(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_grouped, "MOST_UNPACKED_BYTES", 3 * 6 * 96 * 32 * 2)  # three blocks of five

    def made(seed: int) -> Packed:
        if kind == "mxfp4":
            return mxfp4_weight(96, 160, seed=seed)[0]
        return weight(96, 160, bits=int(kind[0]), group=32, offset=kind[0] == "4", zero=8, seed=seed)[0]

    packed = [made(seed) for seed in range(6)]
    arrays = jax.tree.map(lambda *parts: jnp.stack(parts), *(each[:3] for each in packed))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 96)), jnp.bfloat16)
    y = product(x, row_tiles(jnp.asarray(SIZES[0]), 64, rows), Packed(*arrays, zero=packed[0].zero), interpret=True)
    wanted = expected(x, np.stack([unpack(each, jnp.bfloat16) for each in packed]), SIZES[0])
    np.testing.assert_allclose(np.asarray(y, np.float64)[: len(wanted)], wanted, atol=0.01 * np.abs(wanted).max())
