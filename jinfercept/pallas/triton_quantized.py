"""The Triton kernel for products of up to `MOST_ROWS` rows with weights of 4 or 8 bits, which are unpacked in registers.

A program multiplies a tile of rows with a few blocks of columns, over a part of the inputs; the parts' sums are added later.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Integer, Shaped

from jinfercept.pallas.layouts.kv_rows import e4m3_shares
from jinfercept.pallas.layouts.packed_weights import e2m1_pairs, wide_numbers, wide_scales
from jinfercept.pallas.tiles import AMPERE, power_of_two
from jinfercept.pallas.triton_softmax import EVERYWHERE

ADA = 89  # its compute capability
MOST_ROWS, MOST_FLOAT8_ROWS = 64, 32
"""Above, the copy that XLA makes of a weight costs less than to unpack the weight again for every tile of rows. Timed on an
H200, as the sizes of tiles were (`benchmarks/gpu/`)."""
ROWS = 64  # of a tile
PROGRAMS = 264  # two for each multiprocessor of an H100, for words of 4-bit numbers; four times as many for others
MOST_PARTS = 8


class Cut(NamedTuple):
    """How a product is divided."""

    rows: int  # of `x` in a tile; a matrix unit needs 16
    blocks: int  # of columns in a tile
    depth: int  # stored rows of the weight in a tile
    part: int  # stored rows of the weight that one program reads
    per_value: int  # numbers in a stored value
    group: int  # inputs that have the same scale
    zero: int


def product(
    zero: int,
    out: DTypeLike,
    order: tuple[int, ...],
    x: Float[Array, "T K"],
    values: Shaped[Array, "B R W"],
    scales: Shaped[Array, "B G W"],
    offsets: Float[Array, "B G W"] | None,
    interpret: bool = False,
) -> Float[Array, "T N"]:
    """`x @ weight`, of a weight as in `packed_weights.Packed`; `x` has 16 bits a number.

    Args:
        order: of the inputs in a word of 4-bit numbers.
        interpret: run the kernel's Python instead of compiling it.
    """
    num_blocks, num_stored, width = values.shape
    per_value = x.shape[1] // num_stored
    float8 = values.dtype == jnp.float8_e4m3fn
    values = jax.lax.bitcast_convert_type(values, jnp.int8) if float8 else values  # masked loads know no float8
    cut = _cut(len(x), num_blocks, num_stored, per_value, x.shape[1] // scales.shape[1], zero)
    num_parts = pl.cdiv(num_stored, cut.part)
    operands = (by_place(x, num_stored, order), values, scales, *(() if offsets is None else (offsets,)))
    sums = pl.pallas_call(
        partial(_kernel, cut=cut, float8=float8),
        grid=(pl.cdiv(num_blocks, cut.blocks), pl.cdiv(len(x), cut.rows), num_parts),
        in_specs=[EVERYWHERE] * len(operands),
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct((num_parts, len(x), num_blocks * width), jnp.float32 if num_parts > 1 else out),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="quantized_product",
    )(*operands)
    return sums[0] if num_parts == 1 else sums.sum(0).astype(out)


def most_rows(values: DTypeLike) -> int:
    """Most rows of a product with numbers of this type."""
    return MOST_FLOAT8_ROWS if values == jnp.float8_e4m3fn else MOST_ROWS


def least_capability(values: DTypeLike) -> int:
    """Compute capability of the oldest GPUs that have code for numbers of this type."""
    return ADA if values == jnp.float8_e4m3fn else AMPERE


def _cut(num_rows: int, num_blocks: int, num_stored: int, per_value: int, group: int, zero: int) -> Cut:
    rows = max(16, min(ROWS, power_of_two(num_rows)))
    are_words = per_value > 1
    blocks = 4 if are_words and rows > 16 else 2
    depth = 32 if are_words or rows > 16 else 64
    tiles = pl.cdiv(num_blocks, blocks) * pl.cdiv(num_rows, rows)
    num_turns = pl.cdiv(num_stored, depth)
    parts = min(MOST_PARTS, pl.cdiv(PROGRAMS if are_words else 4 * PROGRAMS, tiles), num_turns)
    return Cut(rows, blocks, depth, pl.cdiv(num_turns, parts) * depth, per_value, group, zero)


def _kernel(
    x_ref,  # [places, T, R]
    values_ref,  # [B, R, W]
    scales_ref,  # [B, G, W]
    *refs,  # offsets [B, G, W], if there are any; the sums [parts, T, N]
    cut: Cut,
    float8: bool,
):
    *offsets_ref, out_ref = refs
    num_blocks, num_stored, width = values_ref.shape
    first_block, tile, part = (pl.program_id(axis) for axis in range(3))
    row, place = tile * cut.rows + jnp.arange(cut.rows), jnp.arange(cut.blocks * width)
    block, lane = first_block * cut.blocks + jax.lax.div(place, width), jax.lax.rem(place, width)
    real, there = (row < x_ref.shape[1])[:, None], (block < num_blocks)[None, :]
    weight = WeightTile(
        values_ref, scales_ref, offsets_ref, block, lane, there, cut.per_value, cut.group, cut.zero, float8
    )

    def add(turn, sums):
        stored = part * cut.part + turn * cut.depth + jnp.arange(cut.depth)
        return add_products(sums, x_ref, row, real, weight, stored)

    turns = pl.cdiv(jnp.minimum(cut.part, num_stored - part * cut.part), cut.depth)
    sums = jax.lax.fori_loop(0, turns, add, jnp.zeros((cut.rows, cut.blocks * width), jnp.float32))
    where = out_ref.at[part, row[:, None], first_block * cut.blocks * width + place[None, :]]
    plgpu.store(where, sums.astype(out_ref.dtype), mask=real & there)


class WeightTile(NamedTuple):
    """Columns of a weight as a kernel reads them."""

    # references to the arrays of `Packed`; offsets are in a list, which may be empty
    values: Any
    scales: Any
    offsets: Sequence[Any]
    block: Int[Array, "N"]  # of each column
    lane: Int[Array, "N"]  # the column's place in its block
    there: Bool[Array, "1 N"]  # whether a column exists
    per_value: int  # as in `Cut`, like the next two
    group: int
    zero: int
    float8: bool  # values are bytes that stand for float8


def add_products(
    sums: Float[Array, "M N"],
    x_ref: Any,
    row: Int[Array, "M"],
    real: Bool[Array, "M 1"],
    weight: WeightTile,
    stored: Int[Array, "R"],
) -> Float[Array, "M N"]:
    """Add to `sums` the products of some rows, over the inputs in some stored rows of a weight.

    `x_ref` has the rows' inputs by place in a stored value, `[places, T, R]`. `real` says which rows exist.
    """
    inside = (stored < weight.values.shape[1])[:, None]
    mask = inside & weight.there
    at = weight.block[None, :], stored[:, None], weight.lane[None, :]
    packed = plgpu.load(weight.values.at[at], mask=mask, other=0)
    packed = packed.astype(jnp.uint8) if weight.float8 else packed
    group = jax.lax.div(stored * weight.per_value, weight.group)
    at = weight.block[None, :], group[:, None], weight.lane[None, :]
    stored_scale = plgpu.load(weight.scales.at[at], mask=mask, other=0)
    if weight.scales.dtype == jnp.uint8 and x_ref.dtype == jnp.bfloat16:
        for i, pair in enumerate(e2m1_pairs(packed, stored_scale)):
            for place, half in ((i, pair & 0xFFFF), (i + 4, pair >> 16)):
                numbers = jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)
                inputs = plgpu.load(x_ref.at[place, row[:, None], stored[None, :]], mask=real & inside.T, other=0)
                sums += plgpu.dot(inputs, numbers)
        return sums
    scale = wide_scales(stored_scale)
    offset = plgpu.load(weight.offsets[0].at[at], mask=mask, other=0).astype(jnp.float32) if weight.offsets else 0.0
    for i in range(x_ref.shape[0]):
        if weight.scales.dtype == jnp.uint8:
            numbers = wide_numbers((packed >> 4 * i & 15).astype(jnp.int32), weight.zero, weight.scales.dtype) * scale
        else:
            near, factor, bias = near_numbers(packed, i)
            numbers = near * (scale * factor) + (offset - scale * (bias + weight.zero))
        inputs = plgpu.load(x_ref.at[i, row[:, None], stored[None, :]], mask=real & inside.T, other=0)
        sums += plgpu.dot(inputs, numbers.astype(inputs.dtype))
    return sums


def near_numbers(stored: Integer[Array, "..."], place: int) -> tuple[Float32[Array, "..."], float, float]:
    """Numbers in float32 whose bits contain the stored ones, the factor that makes them the stored numbers, and what is then to
    be subtracted. A GPU converts a whole number in four times as long as it multiplies one.

    Args:
        stored: words of 4-bit numbers; int8; or uint8 of the bits of e4m3.
        place: of a 4-bit number in its word.
    """
    if stored.dtype == jnp.uint8:
        return e4m3_shares(stored), 256.0, 0.0
    if stored.dtype == jnp.int8:  # 192 + q / 2
        word = (stored.astype(jnp.uint8).astype(jnp.uint32) << 15) ^ np.uint32(0x43400000)
        return jax.lax.bitcast_convert_type(word, jnp.float32), 2.0, 384.0
    shift = 16 - 4 * place  # 128 + q
    moved = stored << shift if shift >= 0 else stored >> -shift
    word = moved & np.uint32(0xF0000) | np.uint32(0x43000000)
    return jax.lax.bitcast_convert_type(word, jnp.float32), 1.0, 128.0


def by_place(x: Float[Array, "T K"], num_stored: int, order: tuple[int, ...]) -> Float[Array, "places T R"]:
    """Rows with their inputs by their place in a stored value."""
    per_value = x.shape[1] // num_stored
    planes = x.reshape(len(x), num_stored, per_value)
    return jnp.stack([planes[:, :, row] for row in (order if per_value > 1 else (0,))])
