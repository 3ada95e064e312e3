"""What the Triton kernels share: the online softmax of a tile of queries, one tile of context after the other, and operands.

Runs inside kernels only. Triton's blocks are powers of two, so rows of other widths are padded by zeros: `Dp` numbers for D.
Rows are handled in pieces. A row in the model's type is one piece. Of a quantised row the numbers at one place of its words are
a piece, so that four products of a quarter of the columns take the place of one, and no number changes its thread.
"""

from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from jinfercept.pallas.layouts.kv_rows import BYTES, is_quantised, numbers_of, widened
from jinfercept.pallas.layouts.pages import SCRATCH_PAGE, Ints, KVPages, Scalar, VectorPart
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.tiles import LEAST_ROWS, power_of_two

LOG2_E = 1.4426950408889634
LOWEST = -1e30  # of a masked score: its weight is exactly 0


class Piece(NamedTuple):
    """The columns `first`, `first + step` and so on of a row."""

    first: int
    step: int


WHOLE = (Piece(0, 1),)
PLACES = tuple(Piece(place, BYTES) for place in range(BYTES))


def pieces_of(stored: DTypeLike) -> tuple[Piece, ...]:
    return PLACES if is_quantised(stored) else WHOLE


class RowPages(NamedTuple):
    """The pages of one row of a batch, for one KV head, inside a kernel."""

    pages_ref: Any  # `as_operand` of the pages
    shape: tuple[int, ...]  # of the pages, [N, B, 2, K, W]
    tables_ref: Any  # the page tables, in one dimension
    table: Scalar  # where the row's table begins
    kv_head: Scalar


def as_operand(pages: KVPages) -> Num[Array, "..."]:
    """Pages as the kernels' operand: quantised ones as a block of words each, `[N, B · 2 · K · W]`."""
    return pages.reshape(pages.shape[0], -1) if is_quantised(pages.dtype) else pages


def empty_carry(rows: int, head_dim: int, pieces: tuple[Piece, ...] = WHOLE):
    """The initial carry of an online softmax in base 2: maximum [rows], sum [rows], weighted values [rows, Dp] by piece."""
    weighted = tuple(jnp.zeros((rows, _width(head_dim, piece))) for piece in pieces)
    return jnp.full(rows, LOWEST), jnp.zeros(rows), weighted


def attend_tile(
    queries: tuple[Float[Array, "rows Dp"], ...],
    context: RowPages,
    tokens: int,
    start: Scalar,
    visible: Int[Array, "rows"] | None,
    carry,
    *,
    head_dim: int,
    limit: Scalar,
    scoring: Scoring = PLAIN,
):
    """The carry after `tokens` context tokens of a row, from position `start` on, for one KV head.

    Args:
        queries: by piece.
        visible: each query's last visible position, below `limit`; None: all see the whole tile, and `limit` is beyond it.
        limit: positions from here on are not read.
        scoring: a window, which is for queries with `visible` only, and a soft cap.
    """
    page_size = context.shape[1]
    top, total, weighted = carry
    position = start + jnp.arange(tokens)
    pages_of = context.tables_ref.at[context.table + position // page_size]
    if visible is None:
        written = None
        page = plgpu.load(pages_of)
    else:
        written = position < limit  # slots beyond it may hold anything
        page = plgpu.load(pages_of, mask=written, other=SCRATCH_PAGE)
    slot = position % page_size
    load = partial(_load_stored, context, page, slot, head_dim=head_dim, mask=written, dtype=queries[0].dtype)
    keys, key_scale = load(side=0)  # [tokens, D], [tokens] if quantised
    values, value_scale = load(side=1)

    dot = partial(plgpu.dot, precision=jax.lax.Precision.HIGHEST)
    products = [dot(query, key, trans_b=True) for query, key in zip(queries, keys, strict=True)]
    scores = reduce(jnp.add, products) * (head_dim**-0.5 * LOG2_E)  # [rows, tokens]
    if key_scale is not None:
        scores *= key_scale[None, :]
    if scoring.soft_cap is not None:
        # `cap * tanh(scores / cap)`, by the one function of the chip's that is fast and exact enough: a power of 2
        cap = scoring.soft_cap * LOG2_E
        scores = cap - 2 * cap / (jnp.exp2(scores * (2 * LOG2_E / cap)) + 1)
    if visible is not None:
        seen = position[None, :] <= visible[:, None]
        if scoring.window is not None:
            seen &= position[None, :] > visible[:, None] - scoring.window
        scores = jnp.where(seen, scores, LOWEST)
    new_top = jnp.maximum(top, scores.max(axis=1))
    weights, fade = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
    scaled = weights if value_scale is None else weights * value_scale[None, :]
    weighted = tuple(
        before * fade[:, None] + dot(scaled.astype(value.dtype), value)
        for before, value in zip(weighted, values, strict=True)
    )
    return new_top, total * fade + weights.sum(axis=1), weighted


def _load_stored(
    context: RowPages, page, slot, *, side: int, head_dim: int, mask: Array | None, dtype: DTypeLike
) -> tuple[tuple[Float[Array, "tokens Dp"], ...], Float[Array, "tokens"] | None]:
    ref, kv_head = context.pages_ref, context.kv_head
    if not is_quantised(ref.dtype):
        return load_rows(ref, (page, slot, side, kv_head), head_dim, mask), None
    page_size, num_kv_heads = context.shape[1], context.shape[3]
    width, columns = head_dim // BYTES, _width(head_dim, PLACES[0])
    column = jnp.arange(columns)[None, :]
    row = (slot * 2 + side) * num_kv_heads + kv_head
    inside = _both(None if mask is None else mask[:, None], column < width if columns > width else None)
    zero = jnp.zeros((), ref.dtype)
    words = plgpu.load(
        ref.at[page[:, None], row[:, None] * width + column], mask=inside, other=None if inside is None else zero
    )
    place = ((2 * width + side) * num_kv_heads + kv_head) * page_size + slot  # behind all words
    scales = plgpu.load(ref.at[page, place], mask=mask, other=None if mask is None else zero)
    rows = tuple(widened(numbers_of(words, byte), dtype) for byte in range(BYTES))
    return rows, jax.lax.bitcast_convert_type(scales, jnp.float32)


def load_rows(
    ref, where, head_dim: int, mask: Array | None, pieces: tuple[Piece, ...] = WHOLE
) -> tuple[Float[Array, "rows Dp"], ...]:
    """Rows of `head_dim` numbers by piece, padded by zeros to a power of two; zeros where the mask [rows] is false."""
    places = (_columns(where, head_dim, mask, piece) for piece in pieces)
    zero = jnp.zeros((), ref.dtype)
    return tuple(
        plgpu.load(ref.at[place], mask=inside, other=None if inside is None else zero) for place, inside in places
    )


def store_rows(
    ref, where, head_dim: int, mask: Array, rows: tuple[Float[Array, "rows Dp"], ...], pieces: tuple[Piece, ...]
) -> None:
    """Write rows, given by piece, without their padding, where the mask [rows] is true."""
    for piece, numbers in zip(pieces, rows, strict=True):
        place, inside = _columns(where, head_dim, mask, piece)
        plgpu.store(ref.at[place], numbers.astype(ref.dtype), mask=inside)


def _columns(where, head_dim: int, mask: Array | None, piece: Piece):
    width = _width(head_dim, piece)
    column = jnp.arange(width)[None, :]
    where = tuple(index if jnp.ndim(index) == 0 else index[:, None] for index in where)
    padding = column < head_dim // piece.step if width > head_dim // piece.step else None
    return (*where, piece.first + piece.step * column), _both(None if mask is None else mask[:, None], padding)


def _width(head_dim: int, piece: Piece) -> int:
    return power_of_two(max(LEAST_ROWS, head_dim // piece.step))


def _both(*masks: Array | None) -> Array | None:
    there = [mask for mask in masks if mask is not None]
    return reduce(jnp.logical_and, there) if there else None


EVERYWHERE = pl.BlockSpec(memory_space=pl.ANY)


def with_ints(arrays: tuple[Array, ...], *ints: Ints) -> tuple[list[Array], list[pl.BlockSpec]]:
    """A kernel's operands and their places: arrays, then whole numbers, which kernels see in one dimension."""
    operands, specs = list(arrays), [EVERYWHERE] * len(arrays)
    for numbers in ints:
        if isinstance(numbers, VectorPart):
            operands.append(numbers.vector)
            specs.append(pl.BlockSpec((pl.Element(prod(numbers.shape)),), partial(_place, numbers.first)))
        else:
            operands.append(jnp.reshape(numbers, -1))
            specs.append(EVERYWHERE)
    return operands, specs


def _place(first: int, *_: Array) -> tuple[int]:
    return (first,)
