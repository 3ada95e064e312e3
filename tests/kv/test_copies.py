"""The documented behaviour of copies between the memories, case by case, and of copies in columns."""

from array import array

from jinfercept.kv.page import PageCopies, PageCopy
from tests.support.kv_contexts import (
    CLEAN,
    DIRTY,
    HOST,
    MISSING,
    drop_device,
    drop_host,
    finish,
    host_slots,
    make,
    offload,
    residencies,
    run,
    swap_out,
)


def test_residency_follows_the_two_places() -> None:
    manager = make()
    context = run(manager, [1] * 6)
    assert residencies(context) == [DIRTY, DIRTY]
    assert offload(manager, context, 0) is None, "a page in use is not copied"
    manager.release(context)
    copies, num_tokens = manager.copies.copy_out(context, range(2), 99)
    assert copies == list(map(PageCopy, context.slots(0, 2), host_slots(context)))
    assert num_tokens == 6
    assert residencies(context) == [CLEAN, CLEAN]
    assert offload(manager, context, 0) is None, "it has a copy"
    assert drop_device(manager, context, 0)
    drop_host(manager, context, 1)
    drop_device(manager, context, 1)
    assert residencies(context) == [HOST, MISSING]
    assert context.residency(6) == (0, 4, 2)
    manager.check([context])


def test_what_is_copied_out_can_be_fetched_from_the_next_plan_on_and_read_from_the_one_after() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    manager.copies.copy_out(context, range(2), 2)
    manager.copies.drop(context, range(2), device=True, host=False)
    manager.hold(context)
    assert manager.copies.fetch(context, 9) == (PageCopies(), 0)
    assert manager.gap_end(context, 8) == 0, "it waits for the page"
    manager.begin_plan()
    assert manager.copies.num_fetchable(context) == 2
    copies, num_tokens = manager.copies.fetch(context, 9)
    assert copies == list(map(PageCopy, context.slots(0, 2), host_slots(context)))
    assert num_tokens == 8
    manager.advance(context)
    assert context.ready == 0
    assert manager.gap_end(context, 8) == 0
    manager.begin_plan()
    manager.advance(context)
    assert context.ready == 8
    manager.check([context])


def test_spare_host_copies_go_before_copy_out_fails() -> None:
    manager = make(host_pages=2)
    done = run(manager, [1] * 8)
    manager.release(done)
    swap_out(manager, done)
    other = run(manager, [2] * 12)
    manager.release(other)
    assert manager.num_host_free == 0
    assert offload(manager, other, 0) is None, "a paused context counts on both copies"
    manager.close(done)
    assert manager.num_host_free == 2
    assert offload(manager, other, 0) is not None
    assert offload(manager, other, 1) is not None
    assert offload(manager, other, 2) is None
    manager.check([other])


def test_the_copy_of_a_page_in_use_is_spare() -> None:
    manager = make(host_pages=1)
    context = run(manager, [1] * 5)
    manager.release(context)
    offload(manager, context, 0)
    manager.begin_plan()
    assert manager.num_host_free == 0
    manager.hold(context)
    assert manager.num_host_free == 1
    assert residencies(context)[0] is CLEAN


def test_pages_that_come_to_the_host_from_elsewhere_are_shared_and_fetched() -> None:
    manager, tokens = make(host_pages=4), list(range(22))
    finish(manager, tokens[:9])
    context = manager.open()
    slots = manager.copies.adopt(context, tokens, 5)
    assert slots[:2] == [None, None]
    assert manager.copies.host_slots(context, 2, 9) == slots[2:]
    assert [(run.num_pages, run.residency) for run in context.runs()] == [(2, DIRTY), (3, HOST)]
    follower = manager.open()
    manager.refresh(follower, tokens)
    assert follower.num_pages == 5
    manager.hold(follower)
    assert [copy.host_slot for copy in manager.copies.fetch(follower, 9)[0]] == slots[2:]
    manager.check([context, follower])


def test_pages_from_elsewhere_are_as_many_as_the_host_has_room_for() -> None:
    manager = make(host_pages=4)
    contexts = [manager.open() for _ in range(2)]
    assert len(manager.copies.adopt(contexts[0], list(range(20)), 3)) == 3
    assert len(manager.copies.adopt(contexts[1], list(range(50, 70)), 3)) == 1
    manager.close(contexts[0])
    assert len(manager.copies.adopt(contexts[1], list(range(50, 70)), 3)) == 3
    assert len(manager.take_dropped()) == 3
    manager.check(contexts[1:])


def test_columns_read_as_the_copies_that_they_were_made_of() -> None:
    copies = PageCopies()
    copies.add(array("i", [5, 6]), array("i", [1, 2]), context=3)
    copies.add(array("i", [7]), array("i", [0]))
    expected = (PageCopy(5, 1, 3), PageCopy(6, 2, 3), PageCopy(7, 0))
    assert copies == expected == tuple(copies)
    assert (copies[-1], copies[:2], len(copies), repr(copies)) == (expected[-1], expected[:2], 3, repr(expected))
    assert PageCopies.of(copies) is copies
    assert PageCopies.of(expected) == copies
    assert hash(PageCopies(expected)) == hash(copies)
