"""Quantised weights: their numbers come back from blocks, and products are those of the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.pallas.quantized_product import Packed, pack, product, unpack


def weight(
    depth: int, columns: int, *, bits: int, group: int, offset: bool = False, zero: int = 0, seed: int = 0
) -> tuple[Packed, np.ndarray]:
    """A random weight, packed and as its numbers."""
    random = np.random.default_rng(seed)
    q = random.integers(0, 16, (depth, columns)) if bits == 4 else random.integers(-128, 128, (depth, columns))
    scales, offsets = (random.normal(size=(depth // group, columns)).astype(np.float16) for _ in range(2))
    numbers = (q - zero) * np.repeat(scales.astype(np.float32), group, 0)
    if offset:
        numbers += np.repeat(offsets.astype(np.float32), group, 0)
    stored = jnp.asarray(q, jnp.uint8 if bits == 4 else jnp.int8)
    packed = pack(stored, jnp.asarray(scales), jnp.asarray(offsets) if offset else None, bits=bits, zero=zero)
    return packed, numbers.astype(np.float32)


@settings(max_examples=8)
@given(
    rows=st.sampled_from([1, 3, 40]),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 128]),
    columns=st.integers(1, 3).map(lambda n: 32 * n),
    bits=st.sampled_from([4, 8]),
    offset=st.booleans(),
    zero=st.sampled_from([0, 8]),
)
def test_a_product_is_that_of_the_numbers(
    rows: int, groups: int, group: int, columns: int, bits: int, offset: bool, zero: int
):
    packed, numbers = weight(groups * group, columns, bits=bits, group=group, offset=offset, zero=zero)
    np.testing.assert_allclose(unpack(packed, jnp.float32), numbers, rtol=1e-6)
    x = jax.random.normal(jax.random.key(0), (rows, groups * group))
    np.testing.assert_allclose(product(x, packed, jnp.float32), np.asarray(x) @ numbers, rtol=1e-4, atol=1e-2)
