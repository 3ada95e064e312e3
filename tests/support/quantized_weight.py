"""Random quantised weights, as arrays and as the numbers that they stand for."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jinfercept.pallas.layouts.packed_weights import ORDER, Packed, blocks, from_e2m1


def pack(
    q: Shaped[Array, "K N"],
    scales: Shaped[Array, "G N"],
    offsets: Float[Array, "G N"] | None = None,
    *,
    bits: int,
    zero: int = 0,
) -> Packed:
    """The arrays of a weight, of its numbers by input and column.

    Args:
        q: from 0 to 15 if `bits` is 4, else of the type that is stored.
        scales, offsets: of groups of inputs.
    """
    values = pack_nibbles(q) if bits == 4 else q
    return Packed(blocks(values), blocks(scales), None if offsets is None else blocks(offsets), zero)


def pack_nibbles[A: Array](q: A) -> A:
    """Words of eight rows of a matrix `[K, N]` of numbers from 0 to 15: uint32 `[K / 8, N]`. Of JAX or of numpy."""
    words = q.astype("uint32").reshape(-1, len(ORDER), q.shape[1])
    packed = words[:, 0]
    for place, row in enumerate(ORDER):
        packed = packed | words[:, row] << 4 * place
    return packed  # pyright: ignore[reportReturnType]


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


def mxfp4_weight(num_inputs: int, num_columns: int, *, seed: int = 0) -> tuple[Packed, np.ndarray]:
    """A random weight in MXFP4, and its numbers by the definition."""
    rng, values = np.random.default_rng(seed), np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    bits = rng.integers(0, 16, (num_inputs, num_columns))
    exponents = rng.integers(90, 140, (num_inputs // 32, num_columns)).astype(np.uint8)
    numbers = np.where(bits > 7, -values[bits & 7], values[bits & 7])
    numbers = np.ldexp(numbers, np.repeat(exponents, 32, axis=0).astype(np.int32) - 127)
    return pack(jnp.asarray(from_e2m1(bits)), jnp.asarray(exponents), bits=4), numbers
