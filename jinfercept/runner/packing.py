"""Packs a plan's chunks into one int32 vector, the first part of a step's upload, and unpacks it inside the executable.

For kernels with work schedules the vector has these too, and they read it where it lies.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, batched, chain
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.layouts.pages import OUT_OF_RANGE, Batch, StateSlots, VectorPart, WindowBatch
from jinfercept.pallas.work_schedule import Work, WorkCut, WorkSchedule, schedules
from jinfercept.sched.plan import FROM_DEVICE, Chunk


class PackedShape(NamedTuple):
    """The static sizes of one bucket's executable.

    Attributes:
        cut: how its attention cuts a batch, None if that has no work schedules.
        decode_only: the executable is for steps of decode rows: there is no schedule of chunks.
        joined: its attention rotates queries and keys itself, and writes keys and values.
        has_states: rows have states of recurrent layers.
        routed_experts: see `RunnerShape`.
        num_adapters: that the weights have room for; with any, the vector says which is every token's.
        window: tokens of the longest window of the layers that have a pool for windows; 0: there is none.
        attention: its implementation, see `pallas.attention`.
    """

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_row: int  # P
    cut: WorkCut | None = None
    decode_only: bool = False
    joined: bool = False
    has_states: bool = False
    routed_experts: int = 0
    num_adapters: int = 0
    window: int = 0
    attention: str = "auto"


def enter(
    chunks: tuple[Chunk, ...],
    tables: Int32[np.ndarray, "slots P"],
    states: Int32[np.ndarray, "slots"] | None = None,
    window_tables: Int32[np.ndarray, "slots P"] | None = None,
) -> None:
    """Write the chunks' new pages into the page tables, and the slots of their sequences' states."""
    for chunk in chunks:
        if chunk.new_pages:
            first, slots, state, window, _ = chunk.new_pages
            tables[chunk.slot, first : first + len(slots)] = slots
            if states is not None:
                states[chunk.slot] = state
            if window and window_tables is not None:
                window_tables[chunk.slot, window.first : window.first + len(window.slots)] = window.slots


def pack(
    chunks: tuple[Chunk, ...],
    tables: Int32[np.ndarray, "slots P"],
    page_size: int,
    shape: PackedShape,
    states: Int32[np.ndarray, "slots"] | None = None,
    window_tables: Int32[np.ndarray, "slots P"] | None = None,
) -> Int32[np.ndarray, "packed"]:
    """The packed batch of a plan.

    Args:
        chunks: at most `num_rows`, of at most `num_tokens` tokens together; those of one token come first.
        tables: device slots of every sequence slot's pages.
        states: slots of every sequence slot's states, if the model has some.
        window_tables: as `tables`, of layers with pages in the pool for windows, if it has some.
    """
    num_tokens, num_rows, *_ = shape
    places = _places(shape)
    vector = np.zeros(places[-1].end, np.int32)
    views = [vector[first:end] if len(dims) == 1 else vector[first:end].reshape(dims) for first, end, dims in places]
    parts = _split(shape, views)
    tokens, positions, write_index, token_slots, query_starts, context_lens, page_tables, num_decode = parts.batch
    for index in (write_index, *parts.window[:1]):
        index[:] = np.arange(OUT_OF_RANGE, OUT_OF_RANGE + num_tokens, dtype=np.int32)
    if not chunks:
        return vector  # no unit of work either
    slots, starts, lists, entries, *_, chunk_adapters = zip(*chunks, strict=True)
    rows = len(chunks)
    assert rows <= num_rows
    slots, starts = np.fromiter(slots, np.int32, rows), np.fromiter(starts, np.int32, rows)
    lengths = np.fromiter(map(len, lists), np.int32, rows)
    query_starts[1 : rows + 1] = lengths.cumsum()
    used = int(query_starts[rows])
    assert used <= num_tokens
    query_starts[rows + 1 :] = used
    context_lens[:rows] = starts + lengths
    tables.take(slots, axis=0, out=page_tables[:rows], mode="clip")
    num_decode[0] = np.count_nonzero(lengths == 1)
    tokens[:used] = np.fromiter(chain.from_iterable(lists), np.int32, used)
    row_of = slice(rows) if used == rows else np.arange(rows).repeat(lengths)  # every token's
    token_slots[:used] = slots[row_of]
    if parts.adapters is not None:
        parts.adapters[:used] = np.fromiter(chunk_adapters, np.int32, rows)[row_of]
    positions[:used] = (starts - query_starts[:rows])[row_of] + np.arange(used, dtype=np.int32)
    page, offset = np.divmod(positions[:used], page_size)
    write_index[:used] = tables[token_slots[:used], page] * page_size + offset
    if states is not None:
        state_slots, sources = parts.states
        state_slots[:rows] = sources[:rows] = states[slots]
        for row, new_pages in enumerate(entries):
            if new_pages and new_pages.state_from:
                sources[row] = new_pages.state_from
    if window_tables is not None:
        window_index, window_pages = parts.window
        window_index[:used] = window_tables[token_slots[:used], page] * page_size + offset
        seen, ends = np.maximum(starts - shape.window + 1, 0) // page_size, (starts + lengths - 1) // page_size + 1
        for row, slot, first, end in zip(range(rows), slots.tolist(), seen.tolist(), ends.tolist(), strict=True):
            window_pages[row, first:end] = window_tables[slot, first:end]
    if shape.cut is not None:
        work = schedules(
            shape.cut, query_starts, context_lens, int(num_decode[0]), num_tokens, decode_only=shape.decode_only
        )
        for into, numbers in zip(parts.schedules, chain.from_iterable(work), strict=True):
            into[:] = numbers
    return vector


def packed_size(shape: PackedShape) -> int:
    """Numbers of the packed batch."""
    return _places(shape)[-1].end


def unpack(packed: Int[Array, "packed"], last_tokens: Int[Array, "slots"], shape: PackedShape) -> Batch:
    """The batch on the device, with `FROM_DEVICE` replaced by the slots' last tokens."""
    tokens, _, _, token_slots, *_ = (part.array() for part in _parts(packed, shape).batch[:4])
    tokens = jnp.where(tokens == FROM_DEVICE, last_tokens[token_slots], tokens)
    return _batch(packed, shape)._replace(tokens=tokens)


def in_place(packed: Int[Array, "packed"], shape: PackedShape) -> Batch:
    """The batch inside an executable of layers; where there are work schedules, kernels read the packed vector itself.

    The tokens are as they were packed: layers do not read them.
    """
    if shape.cut is None:
        return _batch(packed, shape)
    parts = _parts(packed, shape)
    *_, query_starts, context_lens, page_tables, num_decode = parts.batch
    decodes, *chunks = (WorkSchedule(*fields) for fields in batched(parts.schedules, len(WorkSchedule._fields)))
    work = Work(query_starts, context_lens, page_tables, num_decode, decodes, chunks[0] if chunks else None)
    batch = _batch(packed, shape)._replace(work=work)
    if not shape.window:
        return batch
    return batch._replace(window=batch.window._replace(work=work._replace(page_tables=parts.window[1])))


def _batch(packed: Int[Array, "packed"], shape: PackedShape) -> Batch:
    """The batch as it was packed."""
    parts = _parts(packed, shape)
    tokens, positions, write_index, _, query_starts, context_lens, page_tables, num_decode = (
        part.array() for part in parts.batch
    )
    return Batch(
        *(tokens, positions, write_index, query_starts, context_lens, page_tables, num_decode[0]),
        states=StateSlots(*(part.array() for part in parts.states)) if shape.has_states else None,
        adapters=parts.adapters.array() if shape.num_adapters else None,
        window=WindowBatch(*(part.array() for part in parts.window)) if shape.window else None,
    )


_BATCH_PARTS = 8
ALIGNED = 64
"""Numbers, 256 bytes: XLA hands a part to a Mosaic kernel where it lies, which refuses arrays at other addresses."""


class _PackedParts(NamedTuple):
    """The parts of the vector, or what is at their places."""

    batch: Sequence[Any]
    schedules: Sequence[Any]
    states: Sequence[Any]  # of `StateSlots`
    window: Sequence[Any]  # the write index and the page tables
    adapters: Any


def _split(shape: PackedShape, parts: Sequence[Any]) -> _PackedParts:
    """The parts in the order of `_places`, by what they are."""
    adapters = len(parts) - bool(shape.num_adapters)
    window = adapters - 2 * bool(shape.window)
    states = window - 2 * shape.has_states
    return _PackedParts(
        parts[:_BATCH_PARTS],
        parts[_BATCH_PARTS:states],
        parts[states:window],
        parts[window:adapters],
        parts[adapters] if shape.num_adapters else None,
    )


class _RowPlace(NamedTuple):
    """Where a part of the vector lies, and its shape."""

    first: int
    end: int
    shape: tuple[int, ...]


@lru_cache
def _places(shape: PackedShape) -> tuple[_RowPlace, ...]:
    """The parts of the vector: those of the batch, then the schedules field by field, then the slots of states that rows
    write and read, the write index and the page tables of layers with a window, and the tokens' adapters. Each begins at a
    multiple of `ALIGNED`."""
    num_tokens, num_rows, pages_per_row, cut, decode_only, _, has_states, _, num_adapters, window, _ = shape
    shapes = [*((num_tokens,),) * 4, (num_rows + 1,), (num_rows,), (num_rows, pages_per_row), (1,)]
    assert len(shapes) == _BATCH_PARTS
    if cut is not None:
        shapes += chain.from_iterable(cut.shapes(num_tokens, num_rows, decode_only=decode_only))
    shapes += [(num_rows,)] * (2 * has_states)
    shapes += [(num_tokens,), (num_rows, pages_per_row)] * bool(window)
    shapes += [(num_tokens,)] * bool(num_adapters)
    sizes = [prod(dims) for dims in shapes]
    firsts = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes[:-1]), initial=0)
    return tuple(_RowPlace(first, first + size, dims) for first, size, dims in zip(firsts, sizes, shapes, strict=True))


def _parts(vector: Int[Array, "packed"], shape: PackedShape) -> _PackedParts:
    return _split(shape, [VectorPart(vector, place.first, place.shape) for place in _places(shape)])
