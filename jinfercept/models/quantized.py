"""`QuantizedTensor`: a weight that stays quantised on the device, in the place of an array among a model's parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jinfercept.cpu_kernels import native
from jinfercept.models.checkpoint import Packing
from jinfercept.pallas import gpu_kernels
from jinfercept.pallas.layouts.packed_weights import (
    ORDER,
    WIDTH,
    Packed,
    blocks,
    row_group,
    unblocked,
    unpack,
    unpack_blocks,
)
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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "offsets"],
    meta_fields=["zero", "inputs", "outputs", "outputs_first", "dtype", "int8_rows"],
)
@dataclass(frozen=True)
class QuantizedTensor:
    """A weight whose numbers are `scale * (q - zero) + offset`, stored as `packed_weights.Packed` says."""

    # arrays or their shapes; of a stack of weights, with one more axis in front
    values: Any
    scales: Any
    offsets: Any
    zero: int  # subtracted from the stored numbers
    # Sizes of the axes over which products sum, and of the others, without the first of each, which is what the arrays
    # have: devices cut first axes.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    outputs_first: bool  # whether the axes of the outputs come before those of the inputs
    dtype: jnp.dtype  # of the numbers that are stored so, which is that of the model's activations
    int8_rows: bool = False  # whether products round their rows to 8 bits

    @classmethod
    def of_shape(
        cls, shape: tuple[int, ...], num_inputs: int, packing: Packing, dtype: DTypeLike, stack: tuple[int, ...] = ()
    ) -> Self:
        """The shapes of the arrays of a weight of this `shape`, or of a `stack` of so many such weights.

        Products sum over its first `num_inputs` axes; 0: all but the first.
        """
        first, second = (shape[:num_inputs], shape[num_inputs:]) if num_inputs else (shape[1:], shape[:1])
        depth, num_blocks = prod(first), prod(second) // WIDTH

        def struct(num_rows: int, kind: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*stack, num_blocks, num_rows, WIDTH), jnp.dtype(kind))

        scales = struct(depth // packing.group, packing.scales)
        values = struct(depth // packing.per_value, packing.values)
        offsets = scales if packing.offset else None
        return cls(values, scales, offsets, packing.zero, first[1:], second[1:], not num_inputs, jnp.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for; inside `jax.shard_map`, of one device's part."""
        *stacked, num_blocks, num_rows, width = self.values.shape
        depth = num_rows * (8 if self.values.dtype == jnp.uint32 else 1)
        inputs = (depth // prod(self.inputs), *self.inputs)
        outputs = (num_blocks * width // prod(self.outputs), *self.outputs)
        return (*stacked, *((outputs + inputs) if self.outputs_first else (inputs + outputs)))

    @property
    def packing(self) -> Packing:
        depth = self.values.shape[-2] * (8 if self.values.dtype == jnp.uint32 else 1)
        return Packing(
            values=self.values.dtype.name,
            group=depth // self.scales.shape[-2],
            scales=self.scales.dtype.name,
            offset=self.offsets is not None,
            zero=self.zero,
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def sharding(self) -> Any:
        """The placement of the stored numbers."""
        return self.values.sharding

    def astype(self, dtype: DTypeLike) -> Self:
        """The same numbers, in a model of another dtype."""
        return replace(self, dtype=jnp.dtype(dtype))

    def of_int8_rows(self) -> Self:
        """The same weight, whose products round their rows to 8 bits if it is no stack and its numbers have 4 or 8 bits without
        an exponent."""
        is_whole = self.values.dtype in (jnp.int8, jnp.uint32) and self.scales.dtype != jnp.uint8
        return replace(self, int8_rows=is_whole and self.values.ndim == 3)

    def __len__(self) -> int:
        return self.shape[0]

    def product(self, x: Float[Array, "T ..."] | Rows, out: DTypeLike | None = None) -> Float[Array, "T ..."]:
        """Rows times this weight, summed over all axes of a row. `out`: dtype of the result; None: that of the rows."""
        rows = x.reshape(len(x), -1) if isinstance(x, jax.Array) else x
        y = product(rows, self.packed, out or jax.tree.leaves(rows)[0].dtype, int8_rows=self.int8_rows)
        return y.reshape(len(y), -1, *self.outputs)

    def products(self, x: Rows) -> Float[Array, "T G F"]:
        """The products of the same rows with all weights of a stack of matrices."""
        columns = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), self)
        y = columns.product(x)
        return y.reshape(len(y), len(self), -1)

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T ..."]:
        """Rows of a weight whose outputs are its first axis."""
        block, column = index // WIDTH, index % WIDTH
        rows = jax.tree.map(lambda array: array[block, :, column][:, :, None], self)
        return unpack_blocks(rows.packed, self.dtype).reshape(len(index), -1, *self.inputs)

    def split(self) -> list[Self]:
        """The weights of a stack."""
        return [jax.tree.map(lambda array, i=i: array[i], self) for i in range(len(self.values))]

    def at(self, index: Int[Array, ""]) -> Self:
        """A weight of a stack."""
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), self)

    def dense(self) -> Float[Array, "..."]:
        """The array that this stands for, in its `dtype`."""
        if self.values.ndim > 3:
            return jnp.stack([weight.dense() for weight in self.split()])
        matrix = unpack(self.packed, self.dtype)
        return (matrix.T if self.outputs_first else matrix).reshape(self.shape)

    def with_columns(
        self, change: Callable[..., Shaped[Array, "..."]], *others: Self, outputs: tuple[int, ...]
    ) -> Self:
        """A weight whose columns `change` makes of those of this and other weights, of every stored array alike.

        It gets an array `[rows, *axes of the outputs]` of each weight, and returns one such array, whose axes after the first
        output have the sizes in `outputs`.
        """

        def changed(*arrays: Shaped[Array, "_ R W"]) -> Shaped[Array, "B R W"]:
            columns = (unblocked(array).reshape(array.shape[1], -1, *self.outputs) for array in arrays)
            return blocks(change(*columns).reshape(arrays[0].shape[1], -1))

        return replace(jax.tree.map(changed, self, *others), outputs=outputs)

    @property
    def packed(self) -> Packed:
        """Its arrays as kernels take them."""
        return Packed(self.values, self.scales, self.offsets, self.zero)


def is_quantized(weight: Any) -> bool:
    """Whether a weight is a `QuantizedTensor`. As `is_leaf` it makes such weights the leaves of a tree."""
    return isinstance(weight, QuantizedTensor)


def weights_of(params: Any) -> list[Any]:
    """All weights of a tree, quantised ones as one each: they have `shape`, `dtype` and `sharding`, as arrays have."""
    return jax.tree.leaves(params, is_leaf=is_quantized)
