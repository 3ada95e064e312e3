"""The Triton kernel for products of few rows with weights of 16 bits, whose time is that of reading the weight.

Programs are about as many as a GPU has multiprocessors, each with several tiles of the weight on their way. With more rows,
columns are wider, since every program reads all rows; if few programs are left, each reads half of the inputs.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jinfercept.pallas.operands import EVERYWHERE
from jinfercept.pallas.skinny_products import MOST_ROWS
from jinfercept.pallas.tiles import power_of_two

MOST_BYTES = 128 << 20
"""Of a weight: cuBLAS reads larger ones at the rate of copies (measured by others, see the GPU bill)."""
FEWEST_PROGRAMS = 96
"""Of a product of more than 16 rows, before its inputs are cut in two parts: with fewer, multiprocessors stand idle."""
NAME = "skinny_product"


class _Cut(NamedTuple):
    """How a product is divided.

    Attributes:
        rows: of `x` in a tile, which are all; a matrix unit needs 16.
        columns, depth: of the weight in a tile.
        parts: one, or two halves of the inputs, a program each.
        stages: tiles of the weight that a program has on their way, and the one that it multiplies.
    """

    rows: int
    columns: int
    depth: int
    parts: int
    stages: int


def product(
    x: Float[Array, "T K"], weight: Float[Array, "K N"], out: DTypeLike, interpret: bool = False
) -> Float[Array, "T N"]:
    """`x @ weight`, summed in float32; only for what `supports` allows.

    Args:
        out: type of the result.
        interpret: run the kernel's Python instead of compiling it.
    """
    num_rows, num_columns = len(x), weight.shape[1]
    cut = _cut(num_rows, num_columns)
    sums = pl.pallas_call(
        partial(_kernel, cut=cut),
        grid=(num_columns // cut.columns, cut.parts),
        in_specs=[EVERYWHERE] * 2,
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct((cut.parts, num_rows, num_columns), jnp.float32 if cut.parts > 1 else out),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=cut.stages),
        interpret=interpret,
        name=NAME,
    )(x, weight)
    if cut.parts == 1:
        return sums[0]
    return (sums[0] + sums[1]).astype(out)  # an addition, which XLA fuses with the norm behind it, and no reduction


def supports(x: Float[Array, "T K"] | jax.ShapeDtypeStruct, weight: Float[Array, "K N"] | jax.ShapeDtypeStruct) -> bool:
    """Whether the kernel computes this product: its rows are few, its weight is neither too large nor of odd sizes."""
    inputs, num_columns = weight.shape
    cut = _cut(len(x), num_columns)
    return (
        len(x) <= MOST_ROWS
        and x.dtype == weight.dtype
        and x.dtype.itemsize == 2
        and 2 * inputs * num_columns <= MOST_BYTES
        and num_columns % cut.columns == 0
        and inputs % (cut.parts * cut.depth) == 0
    )


def _cut(num_rows: int, num_columns: int) -> _Cut:
    rows = max(16, power_of_two(num_rows))
    if rows <= 16:
        return _Cut(rows, 32, 128, 1, 5)
    return _Cut(rows, 64, 64, 1 if num_columns >= 64 * FEWEST_PROGRAMS else 2, 5)


def _kernel(
    x_ref,  # [T, K]
    weight_ref,  # [K, N]
    out_ref,  # [parts, T, N]
    *,
    cut: _Cut,
):
    """All rows times a few columns, over one part of the inputs."""
    num_rows, num_inputs = x_ref.shape
    block, part = pl.program_id(0), pl.program_id(1)
    row, column = jnp.arange(cut.rows), block * cut.columns + jnp.arange(cut.columns)
    real, per_part = (row < num_rows)[:, None], num_inputs // cut.parts

    def add(turn, sums):
        depth = part * per_part + turn * cut.depth + jnp.arange(cut.depth)
        rows = plgpu.load(x_ref.at[row[:, None], depth[None, :]], mask=real, other=0)
        weights = plgpu.load(weight_ref.at[depth[:, None], column[None, :]])
        return sums + plgpu.dot(rows, weights)

    zeros = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, per_part // cut.depth, add, zeros)
    plgpu.store(out_ref.at[part, row[:, None], column[None, :]], sums.astype(out_ref.dtype), mask=real)
