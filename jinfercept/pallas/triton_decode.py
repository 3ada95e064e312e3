"""The Triton kernels for decode rows, which have one query each.

A row of one piece has its result at once. Otherwise each piece of the row's context leaves its maximum, its sum and its
weighted values, of which the program that ends last makes the row's result (flash-decoding). Queries come rotated and keys and
values written, or the kernel does that too (`joined_attention_triton`), which spares a layer two launches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages, Scalar
from jinfercept.pallas.layouts.scoring import PLAIN, Rotation, Scoring
from jinfercept.pallas.tiles import AMPERE, Heads, Tile, Tiles, compute_capability, power_of_two, tiles_for
from jinfercept.pallas.triton_softmax import (
    EVERYWHERE,
    LOG2_E,
    LOWEST,
    WHOLE,
    Piece,
    RowPages,
    as_operand,
    attend_tile,
    empty_carry,
    load_rows,
    pieces_of,
    store_rows,
    with_ints,
)
from jinfercept.pallas.work_schedule import Work

NARROW = 64  # head dim up to which joining four pieces a turn can spill: threads have few registers
OUT = 3  # the place of `out` in `_Results`


class _Schedule(NamedTuple):
    """References to the rows and units of a batch, inside a kernel; see `Work` and `WorkSchedule`."""

    query_starts: Any
    context_lens: Any
    tables: Any  # [S · P]
    row_units: Any
    unit_rows: Any
    unit_starts: Any
    unit_tokens: Any


class _Results(NamedTuple):
    """References to the results of a kernel."""

    # [W, H], [W, H] and [W, H, D], of every piece
    top: Any
    total: Any
    weighted: Any
    out: Any  # [T, H, D]
    counts: Any  # of the pieces that are stored, by row and KV head; zeros before a call and behind it


def attend_decode_rows(
    q: HeadRows,
    pages: KVPages,
    work: Work,
    chunks: HeadRows | None,
    tiles: Tiles,
    interpret: bool,
    scoring: Scoring = PLAIN,
) -> HeadRows:
    """The results of all decode rows and those of `chunks`, whose memory is used; zeros for padding tokens."""
    kernel = partial(
        _decode_kernel,
        tile=tiles.decode,
        pages_per_row=work.page_tables.shape[1],
        pages_shape=pages.shape,
        scoring=scoring._replace(sinks=None),
        has_sinks=scoring.sinks is not None,
        interpret=interpret,
    )
    arrays = [q, as_operand(pages), *([] if scoring.sinks is None else [scoring.sinks])]
    aliases = {} if chunks is None else {len(arrays): OUT}
    arrays += [] if chunks is None else [chunks]
    name = "paged_decode_attention"
    return _call(kernel, name, arrays, None, work, q.shape, pages.shape[3], tiles, interpret, aliases)[OUT]


def joined_attention_triton(
    qkv: Float[Array, "T K G2 D"],
    rotation: Rotation,
    pages: KVPages,
    batch: Batch,
    counts: Int[Array, "SK"] | None = None,
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[HeadRows, KVPages, Int[Array, "SK"]]:
    """Attention of decode rows that also norms and rotates queries and keys, and writes keys and values. Padding tokens give
    zeros.

    Args:
        qkv: by KV head: its query heads, its key, its value, as their product leaves them.
        pages: one layer's pages, without the step's own tokens; in place if donated.
        counts: those that the step's last call has returned, after results and pages; None: this is its first call.
    """
    num_tokens, num_kv_heads, width, head_dim = qkv.shape
    heads, work = Heads(num_kv_heads * (width - 2), num_kv_heads, head_dim, qkv.dtype.itemsize), batch.work
    tiles = tiles or tiles_for(heads, AMPERE if interpret else compute_capability())
    normed = rotation.q_norm is not None
    kernel = partial(
        _joined_decode_kernel,
        tile=tiles.decode,
        pages_per_row=work.page_tables.shape[1],
        interleaved=rotation.interleaved,
        eps=rotation.eps if normed else None,
        interpret=interpret,
    )
    arrays = [qkv, pages, rotation.cos, rotation.sin]
    arrays += [rotation.q_norm, rotation.k_norm] if normed else []
    out_shape, name = (num_tokens, heads.num_heads, head_dim), "paged_decode_attention_joined"
    *_, out, counted, written = _call(
        kernel, name, arrays, counts, work, out_shape, num_kv_heads, tiles, interpret, {1: OUT + 2}
    )
    return out, written, counted


def _call(
    kernel: Callable[..., None],
    name: str,
    arrays: list[Any],
    counts: Int[Array, "SK"] | None,
    work: Work,
    out_shape: tuple[int, ...],
    num_kv_heads: int,
    tiles: Tiles,
    interpret: bool,
    aliases: dict[int, int],
) -> list[Any]:
    (num_tokens, num_heads, head_dim), dtype = out_shape, arrays[0].dtype
    num_units, tile = work.decodes.unit_rows.shape[0], tiles.decode
    if counts is None:
        counts = jnp.zeros(work.context_lens.shape[0] * num_kv_heads, jnp.int32)
    operands, specs = with_ints(
        (*arrays, counts), work.query_starts, work.context_lens, work.page_tables, *work.decodes
    )
    struct = jax.ShapeDtypeStruct
    results = [
        struct((num_units, num_heads), jnp.float32),
        struct((num_units, num_heads), jnp.float32),
        struct((num_units, num_heads, head_dim), jnp.float32),
        struct((num_tokens, num_heads, head_dim), dtype),
        struct(counts.shape, counts.dtype),
    ]
    results += [struct(arrays[place].shape, arrays[place].dtype) for place, to in aliases.items() if to != OUT]
    # one wave of programs, each of which serves units until none is left; fewer where a bucket has fewer units
    return pl.pallas_call(
        kernel,
        grid=(min(tiles.programs, num_kv_heads * num_units),),
        in_specs=specs,
        out_specs=[EVERYWHERE] * len(results),
        out_shape=results,
        input_output_aliases=aliases | {len(arrays): OUT + 1},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name=name,
    )(*operands)


def _decode_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N, B, 2, K, W]
    *refs,  # sinks [H] and the chunks' results, if there are any; counts, then a schedule and results
    tile: Tile,
    pages_per_row: int,
    pages_shape: tuple[int, ...],
    scoring: Scoring,
    has_sinks: bool,
    interpret: bool,
):
    schedule, results = _Schedule(*refs[-12:-5]), _Results(*refs[-5:])
    head_dim, columns = q_ref.shape[2], pieces_of(pages_ref.dtype)

    def attend(kv_head, row, start, head, real):
        context = schedule.context_lens[row]
        end = jnp.minimum(start + schedule.unit_tokens[0], context)
        queries = load_rows(q_ref, (row, head), head_dim, real, columns)  # a decode row's token has the row's number
        pages = RowPages(pages_ref, pages_shape, schedule.tables, row * pages_per_row, kv_head)
        in_window = scoring._replace(window=None)  # where the loop begins
        turn = partial(attend_tile, queries, pages, tile.tokens, head_dim=head_dim, scoring=in_window)
        top, total, weighted = empty_carry(tile.rows, head_dim, columns)
        if has_sinks:  # which have a weight once, and no value
            sinks = plgpu.load(refs[0].at[head], mask=real, other=0.0).astype(jnp.float32) * LOG2_E
            top, total = jnp.where(start == 0, sinks, top), jnp.where(start == 0, 1.0, total)
        # a piece before the row's window has no weight
        first = start if scoring.window is None else jnp.maximum(start, context - scoring.window)
        return _attend_piece(turn, first, end, tile, (top, total, weighted))

    units = 4 if columns == WHOLE and NARROW < head_dim < 128 else 2
    _serve_rows(schedule, results, pages_shape[3], tile, columns, units, attend, interpret)


def _joined_decode_kernel(
    qkv_ref,  # [T, K, G + 2, D]
    pages_ref,  # [N, B, 2, K, D]
    cos_ref,  # [T, half]
    sin_ref,  # [T, half]
    *refs,  # the norms' scales [D] and [D] if `eps` is not None; counts, then a schedule, results and the written pages
    tile: Tile,
    pages_per_row: int,
    interleaved: bool,
    eps: float | None,
    interpret: bool,
):
    q_norm_ref, k_norm_ref = refs[:2] if eps is not None else (None, None)
    schedule, results, written_ref = _Schedule(*refs[-13:-6]), _Results(*refs[-6:-1]), refs[-1]
    group, head_dim, page_size = qkv_ref.shape[2] - 2, qkv_ref.shape[3], pages_ref.shape[1]

    def attend(kv_head, row, start, _, real):
        context, table = schedule.context_lens[row], row * pages_per_row
        # The row's last piece turns and writes its key and value, and attends to them in registers: no program reads a slot
        # that another one writes.
        is_last = start + schedule.unit_tokens[0] >= context
        end = jnp.minimum(start + schedule.unit_tokens[0], context - 1)  # the row's own token is in no page yet
        turn = partial(load_turned, qkv_ref, cos_ref, sin_ref, row, interleaved=interleaved, eps=eps)
        queries = turn((kv_head, jnp.arange(tile.rows)[:, None]), real[:, None], q_norm_ref)  # [rows, Dp]
        key = turn((kv_head, group), is_last, k_norm_ref)  # [Dp]
        column = jnp.arange(power_of_two(head_dim))
        inside = (column < head_dim) & is_last
        value = plgpu.load(qkv_ref.at[row, kv_head, group + 1, column], mask=inside, other=0.0)
        page, slot = schedule.tables[table + (context - 1) // page_size], (context - 1) % page_size
        for side, numbers in enumerate((key, value)):
            plgpu.store(written_ref.at[page, slot, side, kv_head, column], numbers, mask=inside)

        pages = RowPages(pages_ref, pages_ref.shape, schedule.tables, table, kv_head)
        attend_turn = partial(attend_tile, (queries,), pages, tile.tokens, head_dim=head_dim)
        carry = own_token_carry(queries, key, value, head_dim, is_last)
        return _attend_piece(attend_turn, start, end, tile, carry)

    units = 4 if head_dim > NARROW else 2
    _serve_rows(schedule, results, pages_ref.shape[3], tile, WHOLE, units, attend, interpret)


def _attend_piece(attend, start: Scalar, end: Scalar, tile: Tile, carry):
    visible = jnp.full(tile.rows, end - 1)
    return jax.lax.fori_loop(
        0,
        pl.cdiv(end - start, tile.tokens),
        lambda turn, carry: attend(start + turn * tile.tokens, visible, carry, limit=end),
        carry,
    )


def _serve_rows(
    schedule: _Schedule,
    results: _Results,
    num_kv_heads: int,
    tile: Tile,
    columns: tuple[Piece, ...],
    units: int,
    attend: Callable[..., Any],
    interpret: bool,
) -> None:
    num_tokens, num_heads, head_dim = results.out.shape
    group = num_heads // num_kv_heads
    place = jnp.arange(tile.rows)
    real = place < group
    # Of quantised numbers, and of long rows in float32, both ways take too many registers
    stores_rows = columns == WHOLE and (results.out.dtype.itemsize == 2 or head_dim <= 128)

    def clear(head, token):
        column = jnp.arange(power_of_two(head_dim))
        zeros = jnp.zeros(len(column), results.out.dtype)
        plgpu.store(results.out.at[padding + token, head, column], zeros, mask=column < head_dim)

    def is_alone(first, end):
        return (end - first == 1) & stores_rows

    def serve(kv_head, position):
        row, start = schedule.unit_rows[position], schedule.unit_starts[position]
        first, end = schedule.row_units[row], schedule.row_units[row + 1]
        head = kv_head * group + place
        top, total, weighted = attend(kv_head, row, start, head, real)

        @pl.when(is_alone(first, end))
        def _():
            values = tuple(part / total[:, None] for part in weighted)
            store_rows(results.out, (row, head), head_dim, real, values, columns)

        @pl.when(~is_alone(first, end))
        def _():
            where = first + start // schedule.unit_tokens[0], head
            plgpu.store(results.top.at[where], top, mask=real)
            plgpu.store(results.total.at[where], total, mask=real)
            store_rows(results.weighted, where, head_dim, real, weighted, columns)

    def count(kv_head, position):
        row = schedule.unit_rows[position]
        first, end = schedule.row_units[row], schedule.row_units[row + 1]
        counted = row * num_kv_heads + kv_head

        @pl.when(~is_alone(first, end))
        def _():
            @pl.when(plgpu.atomic_add(results.counts, (counted,), jnp.int32(1)) == end - first - 1)
            def _():
                _join(results, row, first, end, kv_head, group, units)
                plgpu.store(results.counts.at[counted], jnp.int32(0))

    # A program counts its units when it has stored all of them. The barrier puts the stores of its threads before the counts;
    # each count releases them, and acquires those of the programs that have counted before. So the program that counts a row's
    # last unit sees all of them, and no program waits for another one.
    def last(ref):
        return ref[ref.shape[0] - 1]

    padding = last(schedule.query_starts)
    _share(num_tokens - padding, num_heads, clear)
    # long units come first, so that the programs' shares are even
    _share(last(schedule.row_units), num_kv_heads, serve)
    if not interpret:  # there programs run one after the other
        plgpu.debug_barrier()
    # The number of units is read again: keeping it takes a register, and another one spills.
    _share(last(schedule.row_units), num_kv_heads, count)


def _share(count: Scalar, num_heads: int, serve: Callable[[Scalar, Scalar], None]) -> None:
    end = count * num_heads

    def turn(unit):
        # heads go to neighbouring programs
        serve(jax.lax.rem(unit, num_heads), jax.lax.div(unit, num_heads))
        return unit + pl.num_programs(0)

    jax.lax.while_loop(lambda unit: unit < end, turn, pl.program_id(0))


def _join(results: _Results, row: Scalar, first: Scalar, end: Scalar, kv_head, group: int, units: int) -> None:
    head_dim = results.out.shape[2]
    heads, width = power_of_two(group), power_of_two(head_dim)
    head, column = kv_head * group + jnp.arange(heads), jnp.arange(width)
    inside = jnp.arange(heads) < group
    whole = inside[:, None] & (column < head_dim)[None, :]

    def add(unit, carry):
        top, total, weighted = carry  # [heads], [heads], [heads, Dp]
        real = inside & (unit < end)
        unit_top = plgpu.load(results.top.at[unit, head], mask=real, other=LOWEST)
        unit_total = plgpu.load(results.total.at[unit, head], mask=real, other=0.0)
        (values,) = load_rows(results.weighted, (unit, head), head_dim, real)
        new_top = jnp.maximum(top, unit_top)
        scale, fade = jnp.exp2(unit_top - new_top), jnp.exp2(top - new_top)
        return new_top, total * fade + unit_total * scale, weighted * fade[:, None] + values * scale[:, None]

    def turn(number, carry):
        for place in range(units):  # whose loads do not wait for each other
            carry = add(first + number * units + place, carry)
        return carry

    initial = jnp.full(heads, LOWEST), jnp.zeros(heads), jnp.zeros((heads, width))
    _, total, weighted = jax.lax.fori_loop(0, pl.cdiv(end - first, units), turn, initial)
    values = (weighted / total[:, None]).astype(results.out.dtype)
    plgpu.store(results.out.at[row, head[:, None], column[None, :]], values, mask=whole)


def load_turned(
    qkv_ref,  # [T, K, G + 2, D]
    cos_ref,  # [T, half]
    sin_ref,  # [T, half]
    token: Scalar,
    where: tuple[Scalar, Int[Array, "*rows"] | int],
    mask: Bool[Array, "*rows"],
    norm_ref,  # [D], or None
    *,
    interleaved: bool,
    eps: float | None,
) -> Float[Array, "*any Dp"]:
    """Heads of one token, normed and rotated, in their own type; zeros in the padding and where the mask is false. `where` is a
    KV head, and the places of heads beside it."""
    head_dim, half = qkv_ref.shape[3], cos_ref.shape[1]
    column = jnp.arange(power_of_two(head_dim))
    column = column[None, :] if jnp.ndim(where[1]) else column  # for rows of heads, or for one
    first = column % 2 == 0 if interleaved else column < half
    step = 1 if interleaved else half
    turning = column < 2 * half
    # every dimension is loaded beside the other one of its pair, since a block's columns cannot change places
    partner = jnp.where(turning, jnp.where(first, column + step, column - step), column)
    pair = jnp.where(turning, column // 2 if interleaved else column % half, 0)
    cos = plgpu.load(cos_ref.at[token, pair], mask=turning, other=1.0)
    sin = plgpu.load(sin_ref.at[token, pair], mask=turning, other=0.0)
    inside = mask & (column < head_dim)
    mine, beside = (
        plgpu.load(qkv_ref.at[token, *where, columns], mask=inside, other=0.0).astype(jnp.float32)
        for columns in (column, partner)
    )
    if norm_ref is not None:
        assert eps is not None
        mean = jnp.sum(mine * mine, axis=-1, keepdims=True) / head_dim
        factor = jax.lax.rsqrt(mean + eps)
        mine, beside = (
            _scaled(numbers * factor, plgpu.load(norm_ref.at[columns], mask=column < head_dim, other=0.0))
            for numbers, columns in ((mine, column), (beside, partner))
        )
    return (mine * cos + beside * jnp.where(first, -sin, sin)).astype(qkv_ref.dtype)


def own_token_carry(
    queries: Float[Array, "rows Dp"],
    key: Float[Array, "Dp"],
    value: Float[Array, "Dp"],
    head_dim: int,
    is_there: Bool[Array, ""],
):
    """The carry of an online softmax over one token alone, or over none; see `triton_softmax.empty_carry`."""
    products = queries.astype(jnp.float32) * key.astype(jnp.float32)[None, :]
    top = jnp.sum(products, axis=1) * (head_dim**-0.5 * LOG2_E)
    there = jnp.broadcast_to(is_there, top.shape)
    return (
        jnp.where(there, top, LOWEST),
        jnp.where(there, 1.0, 0.0),
        (jnp.zeros(queries.shape) + value.astype(jnp.float32)[None, :],),
    )


def _scaled(normed: Float[Array, "*any Dp"], scale: Float[Array, "*one Dp"]) -> Float[Array, "*any Dp"]:
    # rounded where the models round
    rounded = normed.astype(scale.dtype).astype(jnp.float32) * scale.astype(jnp.float32)
    return rounded.astype(scale.dtype).astype(jnp.float32)
