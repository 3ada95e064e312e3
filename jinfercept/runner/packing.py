"""The one upload of a step: an int32 vector of every number that its executables read, sent before its copies begin.

The batch comes first; its length depends on the bucket. It is packed on the host and unpacked inside the executable. Work
schedules for kernels that need them follow it, and kernels read them where they lie. The common part comes last and has the
same length in all steps: the sampled rows (`packing_samples`) and the device slots of the transfers. The embedding, a step's
first executable, returns the common part for those behind it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.pallas.layouts.pages import OUT_OF_RANGE, Batch, Scalar, StateSlots, VectorPart, WindowBatch
from jinfercept.pallas.work_schedule import Work, WorkCut, schedules
from jinfercept.runner.packing_samples import NUM_FIELDS
from jinfercept.sched.plan import FROM_DEVICE, Chunk, NewPages

Step = tuple[int, bool]
"""The bucket of a step, and whether its executables are those for decode rows only."""


class PackedShape(NamedTuple):
    """The static sizes of one bucket's executable."""

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_row: int  # P
    cut: WorkCut | None = None  # how attention cuts a batch; None: it has no work schedules
    decode_only: bool = False  # for steps of decode rows, without a schedule of chunks
    joined: bool = False  # attention rotates queries and keys itself, and writes keys and values
    has_states: bool = False
    routed_experts: int = 0  # see `RunnerShape`
    num_adapters: int = 0  # that the weights have room for; with any, the vector has every token's adapter
    window: int = 0  # tokens of the longest window in the pool for windows; 0: there is no such pool
    attention: str = "auto"
    window_cut: WorkCut | None = None  # the cut of layers in the pool for windows, where it differs
    has_draft_layer: bool = False  # the vector has the token that follows every token, for the layer that drafts


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
    following: Mapping[int, int] | None = None,
) -> Int32[np.ndarray, "packed"]:
    """The packed batch of a plan.

    Args:
        chunks: at most `num_rows`, of at most `num_tokens` tokens together; chunks of one token come first.
        tables: device slots of the pages, by sequence slot.
        states: slots of the states, by sequence slot; None: the model has none.
        window_tables: as `tables`, in the pool for windows; None: there is no such pool.
        following: see `DraftPlan`.
    """
    num_tokens, num_rows, *_ = shape
    places, tree = _places(shape)
    vector = np.zeros(places[-1].end, np.int32)
    views = [vector[first:end] if len(dims) == 1 else vector[first:end].reshape(dims) for first, end, dims in places]
    parts: _Parts = tree.unflatten(views)
    window = parts.window
    for batch in (parts, window) if window else (parts,):
        batch.write_index[:] = np.arange(OUT_OF_RANGE, OUT_OF_RANGE + num_tokens, dtype=np.int32)
    if not chunks:
        return vector  # no unit of work either
    slots, starts, lists, entries, *_, num_drafts, chunk_adapters = zip(*chunks, strict=True)
    rows = len(chunks)
    assert rows <= num_rows
    slots, starts = np.fromiter(slots, np.int32, rows), np.fromiter(starts, np.int32, rows)
    lengths = np.fromiter(map(len, lists), np.int32, rows)
    query_starts = parts.query_starts
    query_starts[1 : rows + 1] = lengths.cumsum()
    used = int(query_starts[rows])
    assert used <= num_tokens
    query_starts[rows + 1 :] = used
    parts.context_lens[:rows] = starts + lengths
    tables.take(slots, axis=0, out=parts.page_tables[:rows], mode="clip")
    parts.num_decode[0] = num_decode = int(np.count_nonzero(lengths == 1))
    parts.tokens[:used] = np.fromiter(chain.from_iterable(lists), np.int32, used)
    if parts.following is not None:
        parts.following[: used - 1] = parts.tokens[1:used]
        behind = following or {}
        parts.following[query_starts[1 : rows + 1] - 1] = [behind.get(slot, FROM_DEVICE) for slot in slots.tolist()]
    row_of, offsets = slice(rows), 0  # every token's row, and place in that
    if used != rows:
        row_of = np.arange(rows).repeat(lengths)
        offsets = np.arange(used, dtype=np.int32) - query_starts[row_of]
    parts.token_slots[:used] = token_slots = slots[row_of]
    if parts.adapters is not None:
        parts.adapters[:used] = np.fromiter(chunk_adapters, np.int32, rows)[row_of]
    parts.positions[:used] = positions = starts[row_of] + offsets
    page, offset = np.divmod(positions, page_size)
    parts.write_index[:used] = tables[token_slots, page] * page_size + offset
    if states is not None:
        _pack_states(parts.states, states[slots], entries)
        parts.states.num_drafts[:rows] = num_drafts
    if window_tables is not None:
        window.write_index[:used] = window_tables[token_slots, page] * page_size + offset
        seen, ends = np.maximum(starts - shape.window + 1, 0) // page_size, (starts + lengths - 1) // page_size + 1
        _pack_windows(window.page_tables, window_tables, slots, seen, ends)
    if shape.cut is not None:
        _pack_work(parts, (parts.decodes, parts.chunks or ()), shape.cut, num_decode, decode_only=shape.decode_only)
    if shape.window_cut is not None:
        _pack_work(parts, window.work, shape.window_cut, num_decode, decode_only=shape.decode_only)
    return vector


def _pack_states(parts: StateSlots, own: Int32[np.ndarray, "rows"], entries: Sequence[NewPages | tuple[()]]) -> None:
    slots, sources, _ = parts
    slots[: len(own)] = sources[: len(own)] = own
    for row, new_pages in enumerate(entries):
        if new_pages and new_pages.state_from:
            sources[row] = new_pages.state_from


def _pack_windows(
    page_tables: Int32[np.ndarray, "S P"],
    tables: Int32[np.ndarray, "slots P"],
    slots: Int32[np.ndarray, "rows"],
    firsts: Int32[np.ndarray, "rows"],
    ends: Int32[np.ndarray, "rows"],
) -> None:
    for row, slot, first, end in zip(range(len(slots)), slots.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        page_tables[row, first:end] = tables[slot, first:end]


def _pack_work(
    parts: "_Parts", into: Iterable[Iterable[Any]], cut: WorkCut, num_decode: int, *, decode_only: bool
) -> None:
    starts, num_tokens = parts.query_starts, len(parts.tokens)
    work = schedules(cut, starts, parts.context_lens, num_decode, num_tokens, decode_only=decode_only)
    for place, numbers in zip(chain.from_iterable(into), chain.from_iterable(work), strict=True):
        place[:] = numbers


def packed_size(shape: PackedShape) -> int:
    """Length of the packed batch."""
    return _places(shape)[0][-1].end


def unpack(packed: Int[Array, "packed"], last_tokens: Int[Array, "slots"], shape: PackedShape) -> Batch:
    """The batch on the device, with `FROM_DEVICE` replaced by the slots' last tokens."""
    parts = _parts(packed, shape)
    batch = _batch(parts)
    drawn = last_tokens[parts.token_slots.array()]
    return batch._replace(tokens=jnp.where(batch.tokens == FROM_DEVICE, drawn, batch.tokens))


def in_place(packed: Batch | Int[Array, "packed"], shape: PackedShape) -> Batch:
    """The batch inside an executable of layers. Where there are work schedules, kernels read the packed vector itself."""
    if isinstance(packed, Batch):
        return packed
    parts = _parts(packed, shape)
    batch = _batch(parts)  # its tokens may still be `FROM_DEVICE`: layers do not read them
    if parts.decodes is None:
        return batch
    work = Work(*(getattr(parts, name) for name in Work._fields))
    window = batch.window
    if window is not None:
        decodes, chunks, *_ = *(parts.window.work or (work.decodes, work.chunks)), None
        own = {"page_tables": parts.window.page_tables, "decodes": decodes, "chunks": chunks}
        window = window._replace(work=work._replace(**own))
    return batch._replace(work=work, window=window)


MOST_TRANSFERS = 32
"""Gathers and scatters of a step whose slots are in its common part. What moves more has further uploads."""


class CommonShape(NamedTuple):
    """The sizes of the common part: at most `num_rows` sampled rows, and at most `num_pages` pages for each transfer."""

    num_rows: int
    num_pages: int

    @property
    def size(self) -> int:
        return NUM_FIELDS * self.num_rows + MOST_TRANSFERS * self.num_pages

    def pack(
        self, samples: Int32[np.ndarray, "fields R"], transfers: Sequence[Int32[np.ndarray, "_"]]
    ) -> Int32[np.ndarray, "common"]:
        """The common part of sampled rows, and of the device slots of at most `MOST_TRANSFERS` gathers and scatters."""
        vector = np.zeros(self.size, np.int32)
        vector[: NUM_FIELDS * self.num_rows].reshape(NUM_FIELDS, -1)[:, : samples.shape[1]] = samples
        if transfers:
            slots = self.transfers(vector)
            for row, numbers in enumerate(transfers):
                slots[row, : len(numbers)] = numbers
        return vector

    def samples(self, common: Int[Array, "common"], num_rows: int) -> Int[Array, "fields R"]:
        """The first `num_rows` sampled rows, laid out as by `pack_samples`."""
        return common[: NUM_FIELDS * self.num_rows].reshape(NUM_FIELDS, self.num_rows)[:, :num_rows]

    def slots(self, common: Int[Array, "common"], transfer: Scalar, num_pages: int) -> Int[Array, "k"]:
        return jax.lax.dynamic_index_in_dim(self.transfers(common), transfer, keepdims=False)[:num_pages]

    def transfers[A: Array | np.ndarray](self, common: A) -> A:
        """The device slots of all transfers, a row for each."""
        return cast(A, common[NUM_FIELDS * self.num_rows :].reshape(MOST_TRANSFERS, self.num_pages))


ALIGNED = 64
"""Numbers, 256 bytes: XLA hands a part to a Mosaic kernel where it lies, which refuses arrays at other addresses."""


class _Parts(NamedTuple):
    """The parts of the vector in their order, or what belongs to each of them. None: the model has no such part."""

    tokens: Any
    positions: Any
    write_index: Any
    token_slots: Any
    query_starts: Any
    context_lens: Any
    page_tables: Any
    num_decode: Any
    decodes: Any
    chunks: Any
    states: Any
    window: Any
    adapters: Any
    following: Any


class _RowPlace(NamedTuple):
    first: int
    end: int
    shape: tuple[int, ...]


@lru_cache
def _places(shape: PackedShape) -> tuple[list[_RowPlace], Any]:
    tokens: Any = (shape.num_tokens,)
    rows: Any = (shape.num_rows,)
    tables: Any = (shape.num_rows, shape.pages_per_row)
    work, of_windows = (
        [] if cut is None else cut.shapes(shape.num_tokens, shape.num_rows, decode_only=shape.decode_only)
        for cut in (shape.cut, shape.window_cut)
    )
    decodes, chunks, *_ = *work, None, None
    table = _Parts(
        tokens=tokens,
        positions=tokens,
        write_index=tokens,
        token_slots=tokens,
        query_starts=(shape.num_rows + 1,),
        context_lens=rows,
        page_tables=tables,
        num_decode=(1,),
        decodes=decodes,
        chunks=chunks,
        states=StateSlots(rows, rows, rows) if shape.has_states else None,
        window=WindowBatch(tokens, tables, of_windows or None) if shape.window else None,
        adapters=tokens if shape.num_adapters else None,
        following=tokens if shape.has_draft_layer else None,
    )
    shapes, tree = jax.tree.flatten(table, is_leaf=lambda part: type(part) is tuple)
    sizes = [prod(dims) for dims in shapes]
    firsts = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes[:-1]), initial=0)
    places = [_RowPlace(first, first + size, dims) for first, size, dims in zip(firsts, sizes, shapes, strict=True)]
    return places, tree


def _parts(vector: Int[Array, "packed"], shape: PackedShape) -> _Parts:
    places, tree = _places(shape)
    return tree.unflatten([VectorPart(vector, place.first, place.shape) for place in places])


def _batch(parts: _Parts) -> Batch:
    read = parts._replace(decodes=None, chunks=None, window=parts.window and parts.window._replace(work=None))
    arrays = jax.tree.map(VectorPart.array, read, is_leaf=lambda part: isinstance(part, VectorPart))._asdict()
    fields = {name: arrays[name] for name in Batch._fields if name in arrays}
    return Batch(**fields | {"num_decode": arrays["num_decode"][0]})
