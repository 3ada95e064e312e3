"""Products with weights of 4 or 8 bits as they lie: numbers in blocks of columns, with a scale for every few of a column.

A weight is a matrix `[K, N]` of `scale * (q - zero) + offset`; scale and offset belong to `group` neighbours along K.
A block is contiguous, so that a kernel that computes its columns reads memory in sequence. Knows arrays only.
"""

from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jinfercept.pallas import cpu_kernels, gpu_kernels
from jinfercept.pallas.rows import Rows, dense, rounded

WIDTH = 32
"""Columns of a block."""
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Inputs of a word's numbers of 4 bits, from the lowest: a shift brings two neighbours to the same place of both halves."""

GROUP_STEP = 16
"""Inputs of a group come in multiples of these, for a kernel."""


class Packed(NamedTuple):
    """A weight's arrays; `W` is `WIDTH`.

    Attributes:
        values: int8 or float8_e4m3fn `[N / W, K, W]`; or uint32 `[N / W, K / 8, W]`: words of eight neighbouring inputs of a
            column, 4 bits each, in the order `ORDER`.
        scales: `[N / W, K / group, W]`.
        offsets: as scales; None: no offsets.
        zero: subtracted from the numbers.
    """

    values: Shaped[Array, "B R W"]
    scales: Float[Array, "B G W"]
    offsets: Float[Array, "B G W"] | None = None
    zero: int = 0


def pack(
    q: Shaped[Array, "K N"],
    scales: Float[Array, "G N"],
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


def blocks(columns: Shaped[Array, "R N"]) -> Shaped[Array, "B R W"]:
    """A matrix in blocks of columns."""
    return jnp.moveaxis(columns.reshape(len(columns), -1, WIDTH), 1, 0)


def unblocked(columns: Shaped[Array, "B R W"]) -> Shaped[Array, "R N"]:
    """The inverse of `blocks`."""
    return jnp.moveaxis(columns, 0, 1).reshape(columns.shape[1], -1)


def unpack(packed: Packed, dtype: DTypeLike) -> Float[Array, "K N"]:
    """The weight's numbers, computed in float32."""
    return unblocked(unpack_blocks(packed, dtype))


def unpack_blocks(packed: Packed, dtype: DTypeLike) -> Float[Array, "B K W"]:
    """The weight's numbers in blocks of columns, here of any width."""
    values, scales, offsets, zero = packed
    if values.dtype == jnp.uint32:
        shifts = jnp.asarray([4 * ORDER.index(row) for row in range(len(ORDER))], jnp.uint32)
        values = (values[:, :, None] >> shifts[:, None] & 15).astype(jnp.int8)
    by_group = values.reshape(*scales.shape[:2], -1, scales.shape[2]).astype(jnp.float32) - zero
    wide = by_group * scales[:, :, None].astype(jnp.float32)
    if offsets is not None:
        wide += offsets[:, :, None].astype(jnp.float32)
    return wide.astype(dtype).reshape(len(values), -1, scales.shape[2])


def product(rows: Rows, packed: Packed, out: DTypeLike, *, int8_rows: bool = False) -> Float[Array, "T N"]:
    """`dense(rows) @ unpack(packed, dtype)` of the rows' dtype, summed in float32.

    The weight is never unpacked in memory where a kernel multiplies: on a CPU, and on a GPU up to 256 rows of 16-bit numbers.
    Otherwise XLA unpacks it into memory.

    Args:
        int8_rows: the rows are rounded to 8 bits first, as `rounded` does.
    """
    if int8_rows:
        return _of_int8_rows(rows, packed, out)
    x = dense(rows)
    if (by_gpu := gpu_kernels.quantized_product(len(x), x.dtype, packed.values.dtype)) is not None:
        return by_gpu(packed.zero, out, ORDER, x, *packed[:3])
    by_xla = partial(_by_xla, packed.zero, out)
    if not supports(x, packed):
        return by_xla(x, *packed[:3])
    from jinfercept.pallas import cpu_quantized

    kernel = partial(cpu_quantized.product, packed.zero, out)
    return jax.lax.platform_dependent(x, *packed[:3], cpu=kernel, default=by_xla)


def row_group(weight_group: int) -> int:
    """Numbers of a rounded row with one scale: 32, unless groups of a weight are smaller or no multiples of that."""
    return gcd(weight_group, 32)


def _of_int8_rows(rows: Rows, packed: Packed, out: DTypeLike) -> Float[Array, "T N"]:
    def by_xla(rows: Rows, *arrays: Any) -> Float[Array, "T N"]:
        x = dense(rows)
        near = rounded(x, row_group(x.shape[1] // packed.scales.shape[1])).astype(x.dtype)
        return product(near, Packed(*arrays, zero=packed.zero), out)

    if not supports(jax.eval_shape(dense, rows), packed):
        return by_xla(rows, *packed[:3])
    from jinfercept.pallas import cpu_int8_product

    if not cpu_int8_product.usable():
        return by_xla(rows, *packed[:3])

    def kernel(rows: Rows, *arrays: Any) -> Float[Array, "T N"]:
        return cpu_int8_product.product(rows, Packed(*arrays, zero=packed.zero), out)

    return jax.lax.platform_dependent(rows, *packed[:3], cpu=kernel, default=by_xla)


def supports(x: Float[Array, "T K"] | jax.ShapeDtypeStruct, packed: Packed) -> bool:
    """Whether a kernel of the CPU computes this product of rows, of which the shape and the type count."""
    if not cpu_kernels.usable():
        return False
    from jinfercept.pallas import cpu_quantized

    return (
        cpu_quantized.supports(x)
        and not jax.sharding.get_abstract_mesh().manual_axes  # several devices
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and packed.values.dtype in (jnp.int8, jnp.uint32)
        and packed.scales.dtype in (jnp.float16, jnp.float32)
        and x.shape[1] // packed.scales.shape[1] % GROUP_STEP == 0
    )


def _by_xla(
    zero: int,
    out: DTypeLike,
    x: Float[Array, "T K"],
    values: Shaped[Array, "B R W"],
    scales: Float[Array, "B G W"],
    offsets: Float[Array, "B G W"] | None,
) -> Float[Array, "T N"]:
    weight = unpack(Packed(values, scales, offsets, zero), x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, weight, precision=precision, preferred_element_type=out)
