"""Pages are grouped in extents, which are cut and joined as needed: what is done to a context costs as much as its extents."""

import sys
import tracemalloc
from array import array
from types import FrameType

from jinfercept.kv.context import Context
from jinfercept.kv.extent import PageExtent
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Residency
from jinfercept.kv.store import ExtentQueue

SIZE = 4
DIRTY, CLEAN, HOST, MISSING = Residency.DIRTY, Residency.CLEAN, Residency.HOST, Residency.MISSING


def computed(manager: KVManager, tokens: array[int], chunk: int = 1 << 30) -> Context:
    """A running context whose tokens are all computed and accepted, a chunk in each plan."""
    context = manager.open()
    manager.refresh(context, tokens)
    manager.hold(context)
    while context.ready < len(tokens):
        manager.begin_plan()
        start = context.ready
        end = min(start + chunk, manager.gap_end(context, len(tokens)))
        assert manager.place(context, start, end) == end
        manager.computed(context, start, end)
        manager.commit(context, tokens)
    manager.begin_plan()
    return context


def kinds(context: Context) -> list[tuple[range, Residency]]:
    return [(range(extent.start, extent.end), extent.residency) for extent in context.extents]


def test_what_was_computed_copied_evicted_and_fetched_piece_by_piece_is_one_extent_again() -> None:
    manager = KVManager(100, 100, SIZE)
    tokens = array("i", range(50 * SIZE))
    context = computed(manager, tokens, chunk=7)
    assert kinds(context) == [(range(50), DIRTY)]
    manager.release(context)
    for start in range(0, 50, 5):
        manager.copy_out(context, range(start, start + 5), 9)
        manager.begin_plan()
        assert len(context.extents) <= 2
    assert kinds(context) == [(range(50), CLEAN)]
    for end in range(50, 0, -5):
        assert manager.drop(context, range(end - 1, end - 6, -1), device=True, host=False) == 5
        manager.begin_plan()
        assert len(context.extents) <= 2
    assert kinds(context) == [(range(50), HOST)]
    manager.hold(context)
    while manager.num_fetchable(context):
        manager.fetch(context, 8)
        manager.begin_plan()
    assert kinds(context) == [(range(50), CLEAN)]
    manager.check([context])


def test_a_new_context_gets_the_tail_of_a_prefix_whose_head_is_gone_and_computes_the_head_alone() -> None:
    manager = KVManager(100, 0, SIZE)
    tokens = array("i", range(20 * SIZE))
    paused = computed(manager, tokens)
    manager.release(paused)
    assert manager.drop(paused, range(8), device=True, host=False) == 8
    manager.begin_plan()
    context = manager.open()
    manager.refresh(context, tokens + array("i", [0]))
    manager.hold(context)
    assert (context.ready, manager.gap_end(context, 81)) == (0, 8 * SIZE)
    assert manager.place(context, 0, 8 * SIZE) == 8 * SIZE
    manager.computed(context, 0, 8 * SIZE)
    assert context.ready == 20 * SIZE
    assert [run.residency for run in paused.runs()] == [DIRTY]
    manager.check([context, paused])


def test_an_eviction_of_finished_prefixes_takes_no_more_pages_than_are_needed_and_the_last_ones_first() -> None:
    manager = KVManager(20, 0, SIZE)
    tokens = array("i", range(20 * SIZE))
    manager.close(computed(manager, tokens))
    other = computed(manager, array("i", [7] * 3 * SIZE))
    context = manager.open()
    manager.refresh(context, tokens)
    assert context.num_pages == 17
    manager.check([other, context])


def calls_of_a_pause_and_a_return(num_pages: int) -> int:
    """Python's and C's function calls of them."""
    manager = KVManager(num_pages + 1, 0, SIZE)
    tokens = array("i", range(num_pages * SIZE))
    context = computed(manager, tokens)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    manager.release(context)
    context.residency(len(tokens))
    manager.begin_plan()
    manager.refresh(context, tokens)
    manager.hold(context)
    manager.gap_end(context, len(tokens) + 1)
    context.slots(0, num_pages)
    sys.setprofile(None)
    return calls


def test_a_pause_and_a_return_of_many_pages_take_as_many_calls_as_of_a_few() -> None:
    assert calls_of_a_pause_and_a_return(20_000) == calls_of_a_pause_and_a_return(2)


def test_extents_of_one_use_are_evicted_in_the_order_in_which_they_were_made_wherever_they_lie_in_memory() -> None:
    extents = [PageExtent() for _ in range(40)]
    del extents[1::2]  # others take their memory
    extents += [PageExtent() for _ in range(20)]
    queue = ExtentQueue()
    for extent in reversed(extents):
        queue.sort(extent, is_member=True)
    assert list(queue) == extents


def test_a_page_of_16_tokens_takes_less_than_100_bytes() -> None:
    manager, tokens = KVManager(20_000, 0, 16), array("i", range(20_000 * 16))
    tracemalloc.start()
    context = computed(manager, tokens, chunk=8192)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 100 * context.num_pages
