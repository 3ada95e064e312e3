"""A packed plan says token by token what the plan says."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prepared_batch import prepare
from jinfercept.pallas.layouts.pages import OUT_OF_RANGE, VectorPart, as_array
from jinfercept.pallas.work_schedule import WorkCut
from jinfercept.runner.packing import ALIGNED, PackedShape, enter, in_place, pack, packed_size, unpack
from jinfercept.sched.plan import FROM_DEVICE, Chunk, NewPages, Sample, WindowEntries

PAGE_SIZE, PAGES, SLOTS, WINDOW = 4, 10, 8, 10
SHAPE = PackedShape(num_tokens=40, num_rows=SLOTS, pages_per_row=PAGES)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Chunk, ...]:
    """Chunks of one token first, at most a bucketful, in any slots; every page of theirs is new."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), unique=True))
    lengths = sorted(draw(st.integers(1, SHAPE.num_tokens // SLOTS)) for _ in slots)
    chunks = []
    for slot, length in zip(slots, lengths, strict=True):
        start = draw(st.integers(0, PAGES * PAGE_SIZE - length))
        token_ids = tuple(range(100 * slot, 100 * slot + length))
        tokens = (FROM_DEVICE,) if length == 1 and draw(st.booleans()) else token_ids
        pages = NewPages(0, range(1 + PAGES * slot, 1 + PAGES * slot + -(-(start + length) // PAGE_SIZE)))
        sample = Sample(draw(st.sampled_from([0.0, 0.7])), draw(st.integers(0, 2**64 - 1)))
        chunks.append(Chunk(slot, start, tokens, pages, sample if draw(st.booleans()) else None))
    return tuple(chunks)


@given(plans())
def test_every_token_knows_its_place(chunks: tuple[Chunk, ...]) -> None:
    tables = np.zeros((SLOTS, PAGES), np.int32)
    enter(chunks, tables)
    last_tokens = np.arange(1000, 1000 + SLOTS, dtype=np.int32)
    upload = jnp.asarray(pack(chunks, tables, PAGE_SIZE, SHAPE))
    batch = jax.tree.map(np.asarray, unpack(upload, jnp.asarray(last_tokens), SHAPE))
    assert batch.num_decode == sum(len(chunk.tokens) == 1 for chunk in chunks)
    used = 0
    for row, chunk in enumerate(chunks):
        assert batch.query_starts[row] == used
        assert batch.context_lens[row] == chunk.start + len(chunk.tokens)
        assert chunk.new_pages
        for index, page in enumerate(chunk.new_pages.slots):
            assert batch.page_tables[row, index] == page
        for offset, token in enumerate(chunk.tokens):
            position = chunk.start + offset
            assert batch.tokens[used] == (1000 + chunk.slot if token == FROM_DEVICE else token)
            assert batch.positions[used] == position
            page = chunk.new_pages.slots[position // PAGE_SIZE]
            assert batch.write_index[used] == page * PAGE_SIZE + position % PAGE_SIZE
            used += 1
    assert np.all(batch.query_starts[len(chunks) :] == used)
    assert not np.any(batch.context_lens[len(chunks) :])
    assert not np.any(batch.page_tables[len(chunks) :])
    padding = batch.write_index[used:]
    assert np.all(padding >= OUT_OF_RANGE)
    assert len(set(padding.tolist())) == len(padding), "distinct, as the scatter requires"
    assert not np.any(batch.positions[used:])


@given(plans(), st.booleans())
def test_kernels_read_in_place_what_the_batch_says_and_its_schedules(
    chunks: tuple[Chunk, ...], decode_only: bool
) -> None:
    chunks = tuple(chunk for chunk in chunks if len(chunk.tokens) == 1 or not decode_only)
    if not chunks:
        return  # no step
    tables = np.zeros((SLOTS, PAGES), np.int32)
    enter(chunks, tables)
    shape = SHAPE._replace(cut=WorkCut(2, 8, 4, 3), decode_only=decode_only)
    plain = unpack(jnp.asarray(pack(chunks, tables, PAGE_SIZE, SHAPE)), jnp.arange(SLOTS), SHAPE)
    want = prepare(plain, shape.cut, decode_only=decode_only)
    batch = in_place(jnp.asarray(pack(chunks, tables, PAGE_SIZE, shape)), shape)
    read = jax.tree.map(as_array, batch.work, is_leaf=lambda part: isinstance(part, VectorPart))
    assert (read.chunks is None) == decode_only
    flat = jax.tree.map(np.ravel, (read, batch._replace(work=None, tokens=None)))  # `num_decode` lies as one number
    jax.tree.map(
        np.testing.assert_array_equal, flat, jax.tree.map(np.ravel, (want.work, want._replace(work=None, tokens=None)))
    )


@settings(max_examples=30)
@given(plans(), st.booleans())
def test_layers_with_a_window_have_tables_of_their_own_from_the_window_on(
    chunks: tuple[Chunk, ...], in_kernels: bool
) -> None:
    shape = SHAPE._replace(window=WINDOW, num_adapters=2, cut=WorkCut(2, 8, 4, 3) if in_kernels else None)
    tables, stale = np.zeros((SLOTS, PAGES), np.int32), np.full((SLOTS, PAGES), 999, np.int32)
    alone = tuple(chunk._replace(new_pages=NewPages(0, (), 0, _from_window(chunk))) for chunk in chunks)
    enter(alone, tables, None, stale)
    assert not tables.any()
    enter(chunks, tables, None, stale)
    upload = jnp.asarray(pack(chunks, tables, PAGE_SIZE, shape, None, stale))
    batch = in_place(upload, shape) if in_kernels else unpack(upload, jnp.arange(SLOTS), shape)
    ours = batch.of_windows
    want, wrote = np.zeros((SLOTS, PAGES), np.int32), list[int]()
    for row, chunk in enumerate(chunks):
        first, pages = _from_window(chunk)
        want[row, first : first + len(pages)] = pages
        positions = range(chunk.start, chunk.start + len(chunk.tokens))
        wrote += [pages[position // PAGE_SIZE - first] * PAGE_SIZE + position % PAGE_SIZE for position in positions]
    np.testing.assert_array_equal(ours.page_tables, want)
    assert ours.write_index[: len(wrote)].tolist() == wrote
    np.testing.assert_array_equal(ours.write_index[len(wrote) :], batch.write_index[len(wrote) :])
    if in_kernels:
        np.testing.assert_array_equal(as_array(ours.work.page_tables), want)
        assert ours.work._replace(page_tables=None) == batch.work._replace(page_tables=None)
    plain = unpack(jnp.asarray(pack(chunks, tables, PAGE_SIZE, SHAPE)), jnp.arange(SLOTS), SHAPE)
    read = batch._replace(window=None, work=None, adapters=None, tokens=plain.tokens)
    jax.tree.map(np.testing.assert_array_equal, read, plain)


def _from_window(chunk: Chunk) -> WindowEntries:
    """Entries from the first page on that the chunk's first token sees."""
    first = max(0, chunk.start - WINDOW + 1) // PAGE_SIZE
    num_pages = -(-(chunk.start + len(chunk.tokens)) // PAGE_SIZE) - first
    return WindowEntries(first, range(500 + PAGES * chunk.slot, 500 + PAGES * chunk.slot + num_pages))


def test_without_adapters_windows_and_states_a_step_uploads_nothing_for_them() -> None:
    shape = PackedShape(8, 4, 3)
    few = packed_size(shape)
    assert few < 8 * ALIGNED
    assert packed_size(shape._replace(num_adapters=2)) - few < 2 * ALIGNED
    for further in ({"has_states": True}, {"window": 10}):
        assert 0 < packed_size(shape._replace(**further)) - few < 4 * ALIGNED


def test_every_part_begins_where_a_kernel_may_read_it_in_place() -> None:
    cut = WorkCut(num_kv_heads=2, programs=8, context_tokens=16, chunk_queries=4)
    shape = PackedShape(37, 7, 131, cut, has_states=True, num_adapters=2, window=10)
    batch = in_place(jnp.zeros(packed_size(shape), jnp.int32), shape)
    places = [batch.work, batch.window.work]
    parts = jax.tree.leaves(places, is_leaf=lambda leaf: isinstance(leaf, VectorPart))
    assert len(parts) == 2 * 12
    assert not any(part.first % ALIGNED for part in parts), "256 bytes"
