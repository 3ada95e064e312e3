"""The Triton kernels for decode rows, which have one query each.

A piece of a row's context leaves its maximum, its sum and its weighted values, of which one result of a row's pieces is made
(flash-decoding). Queries come rotated and keys and values written, and `_join_kernel` joins the pieces and writes the zeros of
the padding tokens; or one kernel does all that itself (`attend_joined_decode_rows`), which spares a layer three launches.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jinfercept.layouts.pages import KVPages
from jinfercept.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.operands import EVERYWHERE, with_ints
from jinfercept.pallas.rotation import Rotation
from jinfercept.pallas.tiles import Tile, Tiles, power_of_two
from jinfercept.pallas.triton_rotation import load_turned, own_token_carry
from jinfercept.pallas.triton_softmax import (
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
)
from jinfercept.pallas.work_schedule import Work

JOINED_UNITS = 8  # pieces of a row that are joined in one turn
JOIN_WARPS = 4  # few rows have few programs, whose loads bound their time


def attend_decode_rows(
    q: Float[Array, "T H D"],
    pages: KVPages,
    work: Work,
    chunks: Float[Array, "T H D"] | None,
    tiles: Tiles,
    interpret: bool,
    scoring: Scoring = PLAIN,
) -> Float[Array, "T H D"]:
    """The results of all decode rows, zeros for padding tokens, and the results of `chunks`, whose memory is used, between."""
    operands, specs = with_ints((q, as_operand(pages)), work.context_lens, work.page_tables, *work.decodes[:4])
    tile = tiles.decode
    kernel = partial(
        _decode_kernel,
        tile=tile,
        pages_per_row=work.page_tables.shape[1],
        pages_shape=pages.shape,
        scoring=scoring._replace(sinks=None),
    )
    pieces = pl.pallas_call(
        kernel,
        grid=_grid(tiles, work, pages.shape[3]),
        in_specs=specs,
        out_specs=[EVERYWHERE] * 3,
        out_shape=_pieces(work, q.shape[1], q.shape[2]),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="paged_decode_attention",
    )(*operands)
    return _join(tuple(pieces), work, q, chunks, interpret, scoring.sinks)


def attend_joined_decode_rows(
    qkv: Float[Array, "T K G2 D"],
    rotation: Rotation,
    pages: KVPages,
    work: Work,
    counts: Int[Array, "SK"] | None,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Float[Array, "T H D"], KVPages, Int[Array, "SK"]]:
    """The results of a batch of decode rows, and the pages with the rows' keys and values, of what their product leaves.

    The last piece of a row turns and writes the row's key and value, and attends to them where it has them, in registers: no
    program reads a slot that another one writes.

    Args:
        qkv: by KV head: its query heads, its key, its value; not rotated.
        rotation: of queries and keys.
        pages: without the step's own tokens; changed in place if donated.
        counts: of the pieces that are computed, by row and KV head, as this function returned them for the step's last layer:
            zeros, before a call and behind it; None for the first layer.
    """
    num_tokens, num_kv_heads, width, head_dim = qkv.shape
    num_heads = num_kv_heads * (width - 2)
    normed, tile = rotation.q_norm is not None, tiles.decode
    arrays = (qkv, pages, rotation.cos, rotation.sin)
    arrays += (rotation.q_norm, rotation.k_norm) if normed else ()
    arrays += (jnp.zeros(work.context_lens.shape[0] * num_kv_heads, jnp.int32) if counts is None else counts,)
    operands, specs = with_ints(arrays, work.query_starts, work.context_lens, work.page_tables, *work.decodes[:4])  # pyright: ignore[reportArgumentType]
    kernel = partial(
        _joined_decode_kernel,
        tile=tile,
        pages_per_row=work.page_tables.shape[1],
        interleaved=rotation.interleaved,
        eps=rotation.eps if normed else None,
        interpret=interpret,
    )
    shapes = (num_tokens, num_heads, head_dim), pages.shape, arrays[-1].shape
    whole = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in zip(shapes, (qkv.dtype, pages.dtype, jnp.int32), strict=True)
    ]
    *_, out, pages, counts = pl.pallas_call(
        kernel,
        grid=_grid(tiles, work, num_kv_heads),
        in_specs=specs,
        out_specs=[EVERYWHERE] * 6,
        out_shape=[*_pieces(work, num_heads, head_dim), *whole],
        input_output_aliases={1: 4, len(arrays) - 1: 5},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="paged_decode_attention_joined",
    )(*operands)
    return out, pages, counts


def _grid(tiles: Tiles, work: Work, num_kv_heads: int) -> tuple[int]:
    """One wave of programs, each of which serves units until none is left; fewer where a bucket has fewer units."""
    return (min(tiles.programs, num_kv_heads * work.decodes.unit_rows.shape[0]),)


def _serve_units(row_units_ref, num_kv_heads: int, serve: Callable[[Int[Array, ""], Int[Array, ""]], None]) -> None:
    """Call `serve` with KV head and position in the schedule for every unit that falls to this program.

    The schedule has long units first, so that the programs' shares are even.
    """
    _share(row_units_ref[row_units_ref.shape[0] - 1], num_kv_heads, serve)


def _share(count: Int[Array, ""], num_heads: int, serve: Callable[[Int[Array, ""], Int[Array, ""]], None]) -> None:
    """Call `serve` with head and number for this program's part of `count` numbers; heads go to neighbours."""
    program, programs = pl.program_id(0), pl.num_programs(0)

    def turn(number, _):
        unit = program + number * programs
        serve(jax.lax.rem(unit, num_heads), jax.lax.div(unit, num_heads))

    jax.lax.fori_loop(0, jax.lax.div(count * num_heads - program + programs - 1, programs), turn, None)


def _pieces(work: Work, num_heads: int, head_dim: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of every piece's maximum, sum and weighted values."""
    num_units = work.decodes.unit_rows.shape[0]
    per_unit = jax.ShapeDtypeStruct((num_units, num_heads), jnp.float32)
    return [per_unit, per_unit, jax.ShapeDtypeStruct((num_units, num_heads, head_dim), jnp.float32)]


def _join(
    pieces: tuple[Array, ...],
    work: Work,
    like: Array,
    chunks: Float[Array, "T H D"] | None,
    interpret: bool,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "T H D"]:
    """The pieces' results by row, of the shape and the type of `like`."""
    operands, specs = with_ints(pieces, work.decodes.row_units, work.num_decode, work.query_starts)
    for more in (sinks, chunks):
        if more is not None:
            operands, specs = [*operands, more], [*specs, EVERYWHERE]
    return pl.pallas_call(
        partial(_join_kernel, has_sinks=sinks is not None),
        grid=(like.shape[1], min(work.context_lens.shape[0], like.shape[0])),
        in_specs=specs,
        out_specs=EVERYWHERE,
        out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype),
        input_output_aliases={} if chunks is None else {len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=JOIN_WARPS, num_stages=1),
        interpret=interpret,
        name="paged_decode_join",
    )(*operands)


def _decode_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [N, B, 2, K, W]
    context_lens_ref,  # [S]
    tables_ref,  # [S · P]
    row_units_ref,  # [S + 1]
    unit_rows_ref,  # [W]
    unit_starts_ref,  # [W]
    unit_tokens_ref,  # [1]
    top_ref,  # [W, H]
    total_ref,  # [W, H]
    weighted_ref,  # [W, H, D]
    *,
    tile: Tile,
    pages_per_row: int,
    pages_shape: tuple[int, ...],
    scoring: Scoring,
):
    """Pieces of rows' contexts, each for one KV head; a piece before the row's window has no weight."""
    num_kv_heads = pages_shape[3]
    group, head_dim, columns = q_ref.shape[1] // num_kv_heads, q_ref.shape[2], pieces_of(pages_ref.dtype)

    def serve(kv_head, position):
        row, start = unit_rows_ref[position], unit_starts_ref[position]
        end = jnp.minimum(start + unit_tokens_ref[0], context_lens_ref[row])
        place = jnp.arange(tile.rows)
        head, real = kv_head * group + place, place < group

        queries = load_rows(q_ref, (row, head), head_dim, real, columns)  # a decode row's token has the row's number
        context = RowPages(pages_ref, pages_shape, tables_ref, row * pages_per_row, kv_head)
        in_window = scoring._replace(window=None)  # where the loop begins
        attend = partial(attend_tile, queries, context, tile.tokens, head_dim=head_dim, scoring=in_window)
        first = start if scoring.window is None else jnp.maximum(start, context_lens_ref[row] - scoring.window)
        carry = _attend_piece(attend, first, end, tile, empty_carry(tile.rows, head_dim, columns))
        unit = row_units_ref[row] + start // unit_tokens_ref[0]
        _store_piece((top_ref, total_ref, weighted_ref), (unit, head), head_dim, real, carry, columns)

    _serve_units(row_units_ref, num_kv_heads, serve)


def _joined_decode_kernel(
    qkv_ref,  # [T, K, G + 2, D]
    pages_ref,  # [N, B, 2, K, D]
    cos_ref,  # [T, half]
    sin_ref,  # [T, half]
    *refs,  # the norms' scales [D] and [D] if `eps` is not None, counts, then as unpacked here
    tile: Tile,
    pages_per_row: int,
    interleaved: bool,
    eps: float | None,
    interpret: bool,
):
    """Pieces of rows' contexts, each for one KV head; a row's last one writes its key and value. Then the rows' results.

    A program counts its pieces when it has stored all of them: the barrier puts the stores of its threads before the counts,
    each of which releases them and acquires those of the programs that have counted before. So the program that counts a row's
    last piece sees all of them, and joins them. A row of one piece has its result at once.
    """
    q_norm_ref, k_norm_ref, *refs = refs if eps is not None else (None, None, *refs)
    _, query_starts_ref, context_lens_ref, tables_ref, row_units_ref, unit_rows_ref, unit_starts_ref, *refs = refs
    unit_tokens_ref, *piece_refs, out_ref, written_ref, counts_ref = refs
    num_kv_heads = pages_ref.shape[3]
    group, head_dim, page_size = qkv_ref.shape[2] - 2, qkv_ref.shape[3], pages_ref.shape[1]

    def serve(kv_head, position):
        row, start = unit_rows_ref[position], unit_starts_ref[position]
        context, table = context_lens_ref[row], row * pages_per_row
        is_last = start + unit_tokens_ref[0] >= context
        end = jnp.minimum(start + unit_tokens_ref[0], context - 1)  # the row's own token is in no page yet
        place = jnp.arange(tile.rows)
        real = place < group

        turn = partial(load_turned, qkv_ref, cos_ref, sin_ref, row, interleaved=interleaved, eps=eps)
        queries = turn((kv_head, place[:, None]), real[:, None], q_norm_ref)  # [rows, Dp]
        key = turn((kv_head, group), is_last, k_norm_ref)  # [Dp]
        column = jnp.arange(power_of_two(head_dim))
        inside = (column < head_dim) & is_last
        value = plgpu.load(qkv_ref.at[row, kv_head, group + 1, column], mask=inside, other=0.0)
        page, slot = tables_ref[table + (context - 1) // page_size], (context - 1) % page_size
        for side, numbers in enumerate((key, value)):
            plgpu.store(written_ref.at[page, slot, side, kv_head, column], numbers, mask=inside)

        carry = own_token_carry(queries, key, value, head_dim, is_last)
        pages = RowPages(pages_ref, pages_ref.shape, tables_ref, table, kv_head)
        attend = partial(attend_tile, (queries,), pages, tile.tokens, head_dim=head_dim)
        carry = _attend_piece(attend, start, end, tile, carry)
        unit, head = row_units_ref[row] + start // unit_tokens_ref[0], kv_head * group + place
        is_alone = row_units_ref[row + 1] - row_units_ref[row] == 1

        @pl.when(is_alone)
        def _():
            _, total, (weighted,) = carry
            store_rows(out_ref, (row, head), head_dim, real, (weighted / total[:, None],), WHOLE)

        @pl.when(~is_alone)
        def _():
            _store_piece(piece_refs, (unit, head), head_dim, real, carry, WHOLE)

    def count(kv_head, position):
        row = unit_rows_ref[position]
        first, end = row_units_ref[row], row_units_ref[row + 1]
        place = row * num_kv_heads + kv_head

        @pl.when(end - first > 1)
        def _():
            @pl.when(plgpu.atomic_add(counts_ref, (place,), jnp.int32(1)) == end - first - 1)
            def _():
                heads = kv_head * group, (kv_head + 1) * group
                jax.lax.fori_loop(*heads, lambda head, _: _join_row(piece_refs, out_ref, row, first, end, head), None)
                plgpu.store(counts_ref.at[place], jnp.int32(0))

    padding = query_starts_ref[query_starts_ref.shape[0] - 1]
    _share(out_ref.shape[0] - padding, num_kv_heads * group, lambda head, token: _clear(out_ref, padding + token, head))
    _serve_units(row_units_ref, num_kv_heads, serve)
    if not interpret:  # there programs run one after the other
        plgpu.debug_barrier()
    _serve_units(row_units_ref, num_kv_heads, count)


def _attend_piece(attend, start: Int[Array, ""], end: Int[Array, ""], tile: Tile, carry):
    """The carry after the context tokens from `start` to `end`."""
    visible = jnp.full(tile.rows, end - 1)
    return jax.lax.fori_loop(
        0,
        pl.cdiv(end - start, tile.tokens),
        lambda turn, carry: attend(start + turn * tile.tokens, visible, carry, limit=end),
        carry,
    )


def _store_piece(refs, where, head_dim: int, real: Bool[Array, "rows"], carry, columns: tuple[Piece, ...]) -> None:
    """Leave a piece's maximum, sum and weighted values."""
    (top_ref, total_ref, weighted_ref), (top, total, weighted) = refs, carry
    plgpu.store(top_ref.at[where], top, mask=real)
    plgpu.store(total_ref.at[where], total, mask=real)
    store_rows(weighted_ref, where, head_dim, real, weighted, columns)


def _join_kernel(
    top_ref,  # [W, H]
    total_ref,  # [W, H]
    weighted_ref,  # [W, H, D]
    row_units_ref,  # [S + 1]
    num_decode_ref,  # [1]
    query_starts_ref,  # [S + 1]
    *refs,  # sinks [H] and the chunks' [T, H, D], if there are any; the same memory as [T, H, D] with all results
    has_sinks: bool,
):
    """All pieces of one row, and the zeros of some padding tokens, for one query head."""
    head, row = pl.program_id(0), pl.program_id(1)
    out_ref = refs[-1]

    @pl.when(row < num_decode_ref[0])
    def _():
        sink = refs[0][head].astype(jnp.float32) * LOG2_E if has_sinks else None
        _join_row(
            (top_ref, total_ref, weighted_ref), out_ref, row, row_units_ref[row], row_units_ref[row + 1], head, sink
        )

    num_rows, padding = pl.num_programs(1), query_starts_ref[query_starts_ref.shape[0] - 1] + row
    turns = pl.cdiv(out_ref.shape[0] - padding, num_rows)
    jax.lax.fori_loop(0, turns, lambda turn, _: _clear(out_ref, padding + turn * num_rows, head), None)


def _join_row(piece_refs, out_ref, row, first: Int[Array, ""], end: Int[Array, ""], head, sink=None) -> None:
    """Leave a row's result for one query head, of its pieces from `first` on."""
    (top_ref, total_ref, weighted_ref), head_dim = piece_refs, out_ref.shape[2]
    column = jnp.arange(power_of_two(head_dim))

    def join(turn, carry):
        top, total, weighted = carry  # [], [], [D]
        unit = first + turn * JOINED_UNITS + jnp.arange(JOINED_UNITS)
        real = unit < end
        tops = plgpu.load(top_ref.at[unit, head], mask=real, other=LOWEST)
        totals = plgpu.load(total_ref.at[unit, head], mask=real, other=0.0)
        (values,) = load_rows(weighted_ref, (unit, head), head_dim, real)  # [units, D]
        new_top = jnp.maximum(top, tops.max())
        scale, fade = jnp.exp2(tops - new_top), jnp.exp2(top - new_top)
        added = jnp.sum(values * scale[:, None], axis=0)
        return new_top, total * fade + jnp.sum(totals * scale), weighted * fade + added

    top, total = (jnp.float32(LOWEST), jnp.float32(0.0)) if sink is None else (sink, jnp.float32(1.0))
    initial = (top, total, jnp.zeros(power_of_two(head_dim)))
    _, total, weighted = jax.lax.fori_loop(0, pl.cdiv(end - first, JOINED_UNITS), join, initial)
    plgpu.store(out_ref.at[row, head, column], (weighted / total).astype(out_ref.dtype), mask=column < head_dim)


def _clear(out_ref, token: Int[Array, ""], head: Int[Array, ""]) -> None:
    """Leave zeros as the result of a padding token."""
    column = jnp.arange(power_of_two(out_ref.shape[2]))
    zeros = jnp.zeros(len(column), out_ref.dtype)
    plgpu.store(out_ref.at[token, head, column], zeros, mask=column < out_ref.shape[2])
