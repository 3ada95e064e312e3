"""The Triton kernel for grouped products: rows that are sorted by expert, each times the weight of its expert.

A program multiplies a tile of rows of one expert with a tile of its columns, which it reads in the stack where they lie.
Quantised weights are unpacked in registers. Experts without rows are not read. Where experts have so many rows that each would
unpack its weights several times, XLA unpacks some columns of all experts into memory, and these are multiplied.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Shaped

from jinfercept.pallas.layouts.packed_weights import ORDER, WIDTH, Packed, unpack
from jinfercept.pallas.tiles import LEAST_ROWS, power_of_two
from jinfercept.pallas.triton_quantized import WeightTile, add_products, by_place
from jinfercept.pallas.triton_softmax import EVERYWHERE

MOST_ROWS = 128  # of a tile
MOST_PACKED_ROWS = 64
"""Rows of a tile whose weights are unpacked in registers: the inputs of a word are eight tiles in shared memory."""
MOST_UNPACKED_BYTES = 2**28
"""Weights in memory at a time."""


class RowTiles(NamedTuple):
    """The tiles of rows of a product, each of one expert and at most `rows` rows: experts, first rows, rows after the last."""

    experts: Int[Array, "M"]
    starts: Int[Array, "M"]
    ends: Int[Array, "M"]
    rows: int


class _GroupCut(NamedTuple):
    rows: int
    columns: int  # of a tile; of a quantised weight whole blocks
    depth: int  # inputs in a turn of the loop, or stored rows of a quantised weight


def tile_rows(num_rows: int, num_experts: int, *, quantised: bool) -> int:
    """Rows of a tile for `num_rows` rows, spread over all experts; a matrix unit needs 16. Quantised weights of tiles with more
    than `MOST_PACKED_ROWS` are unpacked in memory."""
    mean_rows = max(1, num_rows // num_experts)
    most = MOST_PACKED_ROWS if quantised and mean_rows < MOST_ROWS else MOST_ROWS
    return max(LEAST_ROWS, min(most, power_of_two(mean_rows)))


def row_tiles(sizes: Int[Array, "X"], num_rows: int, rows: int) -> RowTiles:
    """The tiles of the rows that experts have by `sizes`, together at most `num_rows`. There are as many tiles as there may be;
    the last ones have no rows."""
    num_tiles = (num_rows + (rows - 1) * min(len(sizes), num_rows)) // rows
    counts = -(-sizes // rows)
    last, ends, tile = jnp.cumsum(counts), jnp.cumsum(sizes), jnp.arange(num_tiles)
    experts = jnp.minimum(jnp.sum(tile[:, None] >= last[None], axis=1), len(sizes) - 1)
    starts = ends[experts] - sizes[experts] + (tile - last[experts] + counts[experts]) * rows
    tile_ends = jnp.where(tile < last[-1], jnp.minimum(starts + rows, ends[experts]), starts)
    return RowTiles(experts.astype(jnp.int32), starts.astype(jnp.int32), tile_ends.astype(jnp.int32), rows)


def product(
    rows: Float[Array, "N K"], tiles: RowTiles, stack: Float[Array, "X K C"] | Packed, interpret: bool = False
) -> Float[Array, "N C"]:
    """Rows times the weights of their experts, summed in float32. Rows that are in no tile may be anything.

    Args:
        rows: of 16 bits a number, sorted by expert.
        stack: weights, or the arrays of quantised ones with an axis for the experts in front.
        interpret: run the kernel's Python instead of compiling it.
    """
    if isinstance(stack, Packed) and tiles.rows > MOST_PACKED_ROWS:
        return _unpacked_product(rows, tiles, stack, interpret)
    numbers, num_stages = (tiles.experts, tiles.starts, tiles.ends), 3
    if isinstance(stack, Packed):
        num_experts, num_blocks, num_stored, _ = stack.values.shape
        cut = _GroupCut(tiles.rows, 64 if tiles.rows == LEAST_ROWS else 128, 32)
        float8 = stack.values.dtype == jnp.float8_e4m3fn
        values = jax.lax.bitcast_convert_type(stack.values, jnp.int8) if float8 else stack.values
        arrays = [array for array in (values, stack.scales, stack.offsets) if array is not None]
        arrays = [array.reshape(num_experts * num_blocks, *array.shape[2:]) for array in arrays]
        operands, num_columns = (by_place(rows, num_stored, ORDER), *arrays), num_blocks * WIDTH
        depth, num_stages = rows.shape[1], 2 if tiles.rows >= MOST_PACKED_ROWS else 3
        sizes = {"group": depth // stack.scales.shape[2], "per_value": depth // num_stored, "zero": stack.zero}
        kernel = partial(_packed_kernel, cut=cut, num_blocks=num_blocks, float8=float8, **sizes)
    else:
        cut = _GroupCut(tiles.rows, 64 if tiles.rows == LEAST_ROWS else 128, 64)
        operands, num_columns, kernel = (rows, stack), stack.shape[2], partial(_kernel, cut=cut)
    return pl.pallas_call(
        kernel,
        grid=(len(tiles.experts), pl.cdiv(num_columns, cut.columns)),
        in_specs=[EVERYWHERE] * (3 + len(operands)),
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct((len(rows), num_columns), rows.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4 if cut.rows < 64 else 8, num_stages=num_stages),
        interpret=interpret,
        name="grouped_product",
    )(*numbers, *operands)


def _unpacked_product(
    rows: Float[Array, "N K"], tiles: RowTiles, stack: Packed, interpret: bool
) -> Float[Array, "N C"]:
    num_experts, num_blocks, *_ = stack.values.shape
    most_blocks = max(1, MOST_UNPACKED_BYTES // (num_experts * rows.shape[1] * WIDTH * rows.dtype.itemsize))
    num_parts = -(-num_blocks // most_blocks)
    arrays, parts = stack[:3], list[Array]()
    for part in range(num_parts):
        first, end = num_blocks * part // num_parts, num_blocks * (part + 1) // num_parts
        if parts:  # whose weights are not needed any more
            arrays, parts[-1] = jax.lax.optimization_barrier((arrays, parts[-1]))
        blocks = [None if array is None else array[:, first:end] for array in arrays]
        weights = jax.vmap(lambda *blocks: unpack(Packed(*blocks, zero=stack.zero), rows.dtype))(*blocks)
        parts.append(product(rows, tiles, weights, interpret))
    return jnp.concatenate(parts, axis=1)


def _kernel(
    experts_ref,  # [M]
    starts_ref,  # [M]
    ends_ref,  # [M]
    rows_ref,  # [N, K]
    stack_ref,  # [X, K, C]
    out_ref,  # [N, C]
    *,
    cut: _GroupCut,
):
    tile = pl.program_id(0)
    expert, start, end = experts_ref[tile], starts_ref[tile], ends_ref[tile]
    _, num_inputs, num_columns = stack_ref.shape
    row, column = start + jnp.arange(cut.rows), pl.program_id(1) * cut.columns + jnp.arange(cut.columns)
    real, there = (row < end)[:, None], (column < num_columns)[None, :]

    def add(turn, sums):
        place = turn * cut.depth + jnp.arange(cut.depth)
        inside = (place < num_inputs)[:, None]
        weight = plgpu.load(stack_ref.at[expert, place[:, None], column[None, :]], mask=inside & there, other=0)
        inputs = plgpu.load(rows_ref.at[row[:, None], place[None, :]], mask=real & inside.T, other=0)
        return sums + plgpu.dot(inputs, weight)

    sums = _summed(cut, start < end, num_inputs, add)
    where = out_ref.at[row[:, None], column[None, :]]
    plgpu.store(where, sums.astype(out_ref.dtype), mask=real & there)


def _packed_kernel(
    experts_ref,  # [M]
    starts_ref,  # [M]
    ends_ref,  # [M]
    rows_ref,  # [places, N, R]
    values_ref,  # [X B, R, W]
    scales_ref,  # [X B, G, W]
    *refs,  # offsets [X B, G, W], if there are any; the result [N, C]
    cut: _GroupCut,
    num_blocks: int,
    float8: bool,
    **sizes: Any,
):
    *offsets_ref, out_ref = refs
    tile = pl.program_id(0)
    expert, start, end = experts_ref[tile], starts_ref[tile], ends_ref[tile]
    row, column = start + jnp.arange(cut.rows), pl.program_id(1) * cut.columns + jnp.arange(cut.columns)
    block, real = jax.lax.div(column, WIDTH), (row < end)[:, None]
    there = (block < num_blocks)[None, :]
    place = expert * num_blocks + block, jax.lax.rem(column, WIDTH), there
    weight = WeightTile(values_ref, scales_ref, offsets_ref, *place, float8=float8, **sizes)

    def add(turn, sums):
        return add_products(sums, rows_ref, row, real, weight, turn * cut.depth + jnp.arange(cut.depth))

    sums = _summed(cut, start < end, values_ref.shape[1], add)
    where = out_ref.at[row[:, None], column[None, :]]
    plgpu.store(where, sums.astype(out_ref.dtype), mask=real & there)


def _summed(cut: _GroupCut, is_there: Any, depth: int, add: Any) -> Shaped[Array, "M N"]:
    # nothing is read for a tile without rows
    turns = is_there.astype(jnp.int32) * pl.cdiv(depth, cut.depth)
    return jax.lax.fori_loop(0, turns, add, jnp.zeros((cut.rows, cut.columns), jnp.float32))
