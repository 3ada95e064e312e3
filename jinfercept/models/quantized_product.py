"""Products with weights of 4 or 8 bits as `packed_weights.py` stores them, and which implementation multiplies."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jinfercept.cpu_kernels import native
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.layouts.packed_weights import ORDER, Packed, row_group, unpack
from jinfercept.pallas.layouts.rows import Rows, dense, precision, rounded

GROUP_STEP = 16
"""Inputs of a group come in multiples of these, for a kernel."""


def product(rows: Rows, packed: Packed, out: DTypeLike, *, int8_rows: bool = False) -> Float[Array, "T N"]:
    """`dense(rows) @ unpack(packed, dtype)` of the rows' dtype, summed in float32. `int8_rows`: of rows as `rounded` has them.

    The weight is never unpacked in memory where a kernel multiplies: on a CPU, and on a GPU up to `triton_quantized.most_rows`
    rows of 16-bit numbers. Otherwise XLA unpacks it into memory.
    """
    if int8_rows:
        return _of_int8_rows(rows, packed, out)
    x = dense(rows)
    if (by_gpu := gpu_kernels.quantized_product(len(x), x.dtype, packed.values.dtype)) is not None:
        return by_gpu(packed.zero, out, ORDER, x, *packed[:3])
    by_xla = partial(_by_xla, packed.zero, out)
    if not supports(x, packed):
        return by_xla(x, *packed[:3])
    from jinfercept.cpu_kernels import packed_product

    kernel = partial(packed_product.product, packed.zero, out)
    return jax.lax.platform_dependent(x, *packed[:3], cpu=kernel, default=by_xla)


def _of_int8_rows(rows: Rows, packed: Packed, out: DTypeLike) -> Float[Array, "T N"]:
    def by_xla(rows: Rows, *arrays: Any) -> Float[Array, "T N"]:
        x = dense(rows)
        near = rounded(x, row_group(x.shape[1] // packed.scales.shape[1])).astype(x.dtype)
        return product(near, Packed(*arrays, zero=packed.zero), out)

    if not supports(jax.eval_shape(dense, rows), packed):
        return by_xla(rows, *packed[:3])
    from jinfercept.cpu_kernels import int8_product

    if not int8_product.usable():
        return by_xla(rows, *packed[:3])

    def kernel(rows: Rows, *arrays: Any) -> Float[Array, "T N"]:
        return int8_product.product(rows, Packed(*arrays, zero=packed.zero), out)

    return jax.lax.platform_dependent(rows, *packed[:3], cpu=kernel, default=by_xla)


def supports(x: Float[Array, "T K"] | jax.ShapeDtypeStruct, packed: Packed) -> bool:
    """Whether a kernel of the CPU computes this product; only the shape and the dtype of `x` count."""
    if not native.usable():
        return False
    from jinfercept.cpu_kernels import packed_product

    return (
        packed_product.supports(x)
        and not jax.sharding.get_abstract_mesh().manual_axes  # several devices
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and packed.values.dtype in (jnp.int8, jnp.uint32)
        and packed.scales.dtype in (jnp.float16, jnp.float32, jnp.uint8)
        and x.shape[1] // packed.scales.shape[1] % GROUP_STEP == 0
    )


def _by_xla(
    zero: int,
    out: DTypeLike,
    x: Float[Array, "T K"],
    values: Shaped[Array, "B R W"],
    scales: Shaped[Array, "B G W"],
    offsets: Float[Array, "B G W"] | None,
) -> Float[Array, "T N"]:
    weight = unpack(Packed(values, scales, offsets, zero), x.dtype)
    return jnp.dot(x, weight, precision=precision(x.dtype), preferred_element_type=out)
