"""The documented behaviour of the door to all pages, case by case."""

from jinfercept.kv.context import Context
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Occupancy, PageCopies, PageCopy, Residency

SIZE = 4
DIRTY, CLEAN, HOST, MISSING = Residency.DIRTY, Residency.CLEAN, Residency.HOST, Residency.MISSING


def make(pages: int = 10, host_pages: int = 10, *, prefix_caching: bool = True) -> KVManager:
    manager = KVManager(pages, host_pages, SIZE, prefix_caching=prefix_caching)
    manager.begin_plan()
    return manager


def run(manager: KVManager, tokens: list[int], salt: str = "", context: Context | None = None) -> Context:
    """A running context whose tokens are all computed and accepted."""
    context = context or manager.open(salt)
    manager.refresh(context, tokens)
    manager.hold(context)
    compute(manager, context, tokens)
    return context


def compute(manager: KVManager, context: Context, tokens: list[int]) -> None:
    start = context.ready
    assert manager.place(context, start, len(tokens)) == len(tokens)
    if start < len(tokens):
        manager.computed(context, start, len(tokens))
    manager.commit(context, tokens)


def finish(manager: KVManager, tokens: list[int], salt: str = "") -> None:
    """A request that came and went: its full pages are finished prefixes."""
    manager.close(run(manager, tokens, salt))


def adopted(manager: KVManager, tokens: list[int], salt: str = "") -> int:
    """Pages that a new context of these tokens would adopt."""
    context = manager.open(salt)
    manager.refresh(context, tokens)
    number = context.num_pages
    manager.close(context)
    return number


def offload(manager: KVManager, context: Context, index: int) -> PageCopy | None:
    """The copy to make of a page; None if it cannot be copied."""
    copies, _ = manager.copies.copy_out(context, range(index, index + 1), 1)
    return copies[0] if copies else None


def drop_device(manager: KVManager, context: Context, index: int) -> int:
    return manager.copies.drop(context, range(index, index + 1), device=True, host=False)


def drop_host(manager: KVManager, context: Context, index: int) -> None:
    manager.copies.drop(context, range(index, index + 1), device=False, host=True)


def swap_out(manager: KVManager, context: Context) -> None:
    copies, _ = manager.copies.copy_out(context, range(context.num_pages), 99)
    assert len(copies) == context.num_pages
    assert manager.copies.drop(context, context.tail_first, device=True, host=False) == context.num_pages
    manager.begin_plan()


def residencies(context: Context) -> list[Residency]:
    return [run.residency for run in context.runs() for _ in run.pages]


def host_slots(context: Context) -> list[int]:
    return [slot for extent in context.extents for slot in extent.host or ()]


def test_full_pages_are_shared_and_the_tail_is_private() -> None:
    manager = make()
    one = run(manager, [1] * 10)
    two = run(manager, [1] * 10)
    assert two.slots(0, 2) == one.slots(0, 2)
    assert two.slots(2, 3) != one.slots(2, 3)
    assert [(run.pages, run.shared) for run in one.runs()] == [(range(2), True), (range(2, 3), False)]
    assert manager.occupancy() == Occupancy(free=6, used=4, paused=0, cached=0, total=10, host_total=10)
    manager.check([one, two])


def test_the_page_of_the_last_token_is_never_adopted() -> None:
    manager = make()
    finish(manager, [1] * 8)
    assert adopted(manager, [1] * 8) == 1
    assert adopted(manager, [1] * 9) == 2
    assert adopted(manager, [1] * 4) == 0


def test_a_prefix_ends_at_the_first_page_that_differs() -> None:
    manager = make()
    finish(manager, [1] * 4 + [2] * 4 + [3] * 4)
    assert adopted(manager, [1] * 4 + [9] * 4 + [3] * 5) == 1
    assert adopted(manager, [9] * 4 + [2] * 4 + [3] * 5) == 0, "a page is named by all tokens before it"


def test_contexts_of_different_salts_share_nothing() -> None:
    manager = make()
    finish(manager, [1] * 8, salt="one")
    assert adopted(manager, [1] * 9, salt="two") == 0
    assert adopted(manager, [1] * 9, salt="one") == 2


def test_contexts_of_different_identity_share_nothing() -> None:
    assert KVManager(1, 0, 4, identity="a").open().root != KVManager(1, 0, 4, identity="b").open().root


def test_a_page_is_shared_only_once_its_tokens_are_accepted() -> None:
    manager = make()
    context = run(manager, [1] * 7)
    manager.computed(context, 7, 8)  # a token that only the device knows
    assert adopted(manager, [1] * 9) == 1
    manager.commit(context, [1] * 8)
    assert adopted(manager, [1] * 9) == 2


def test_two_who_computed_the_same_page_keep_their_own_while_they_run() -> None:
    manager = make()
    one, two = manager.open(), manager.open()
    for context in (one, two):
        manager.hold(context)
    for context in (one, two):
        compute(manager, context, [1] * 4)
    assert one.slots(0, 1) != two.slots(0, 1)
    manager.check([one, two])
    manager.release(two)
    assert two.slots(0, 1) == one.slots(0, 1)
    assert manager.occupancy().used == 1
    manager.check([one, two])
    manager.close(two)
    manager.close(one)
    assert (manager.occupancy().cached, manager._store.num_free) == (1, 9)


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


def test_a_host_copy_goes_stale_when_the_tail_grows() -> None:
    manager = make()
    context = run(manager, [1] * 6)
    manager.release(context)
    copy = offload(manager, context, 1)
    assert copy is not None
    manager.begin_plan()
    run(manager, [1] * 7, context=context)
    assert residencies(context)[1] is DIRTY
    assert manager.occupancy().host == 0
    assert manager.take_dropped() == (copy.host_slot,)
    manager.check([context])


def test_a_copy_that_is_dropped_by_the_plan_that_makes_it_lives_until_the_next_one() -> None:
    manager = make(host_pages=1)
    context = run(manager, [1] * 4)
    manager.release(context)
    copy = offload(manager, context, 0)
    assert copy is not None
    drop_host(manager, context, 0)
    assert manager.take_dropped() == ()
    assert offload(manager, context, 0) is None, "the host slot is still taken"
    manager.begin_plan()
    assert manager.take_dropped() == (copy.host_slot,)
    assert offload(manager, context, 0) is not None


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


def test_a_page_on_its_way_in_stays() -> None:
    manager = make()
    context = run(manager, [1] * 4)
    manager.release(context)
    swap_out(manager, context)
    manager.hold(context)
    manager.copies.fetch(context, 1)
    manager.release(context)
    assert not drop_device(manager, context, 0)
    manager.begin_plan()
    assert drop_device(manager, context, 0)


def test_a_page_on_its_way_in_is_not_copied_out_of_a_slot_that_does_not_hold_it_yet() -> None:
    manager = make(host_pages=2)
    context = run(manager, [1] * 4)
    manager.release(context)
    swap_out(manager, context)
    manager.hold(context)
    manager.copies.fetch(context, 1)
    manager.release(context)
    drop_host(manager, context, 0)
    assert offload(manager, context, 0) is None
    manager.begin_plan()
    assert offload(manager, context, 0) is not None


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


def test_a_copy_that_is_still_being_made_is_not_spare() -> None:
    manager = make(host_pages=1)
    done, other = run(manager, [1] * 4), run(manager, [2] * 4)
    manager.release(done)
    manager.release(other)
    assert offload(manager, done, 0) is not None
    manager.close(done)
    assert offload(manager, other, 0) is None
    manager.begin_plan()
    assert offload(manager, other, 0) is not None


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


def test_finished_prefixes_go_least_recently_used_first_and_children_before_parents() -> None:
    manager = make()
    for tokens in ([1] * 8, [2] * 8):
        manager.close(run(manager, tokens))
    adopted(manager, [1] * 9)  # used again
    left = list[tuple[int, int]]()
    while manager._store.evict_cached(1):
        left.append((adopted(manager, [1] * 9), adopted(manager, [2] * 9)))
        adopted(manager, [1] * 9)
    assert left == [(2, 1), (2, 0), (1, 0), (0, 0)]


def test_a_finished_prefix_with_a_host_copy_survives_on_the_host() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    manager.copies.copy_out(context, range(2), 2)
    manager.begin_plan()
    manager.close(context)
    assert manager._store.evict_cached(9) == 2
    assert manager._store.num_free == 10
    assert adopted(manager, [1] * 9) == 2
    assert manager.occupancy().host == 2


def test_without_prefix_caching_nothing_is_kept_but_living_requests_share() -> None:
    manager = make(prefix_caching=False)
    one = run(manager, [1] * 9)
    assert adopted(manager, [1] * 9) == 2
    manager.close(one)
    assert adopted(manager, [1] * 9) == 0
    assert (manager.occupancy().cached, manager._store.num_free) == (0, 10)


def test_a_returning_context_adopts_what_others_have_computed_meanwhile() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    manager.copies.drop(context, range(2), device=True, host=False)
    other = run(manager, [1] * 6)
    manager.refresh(context, [1] * 9)
    assert context.extents[0] is other.extents[0]
    assert residencies(context) == [DIRTY, MISSING]
    manager.check([context, other])


def test_a_hole_is_computed_alone() -> None:
    manager = make()
    context = run(manager, [1] * 12)
    manager.release(context)
    drop_device(manager, context, 1)
    manager.hold(context)
    assert (context.ready, manager.gap_end(context, 12)) == (4, 8)
    manager.place(context, 4, 6)
    manager.computed(context, 4, 6)
    assert (context.ready, manager.gap_end(context, 12)) == (6, 8)
    manager.computed(context, 6, 8)
    assert context.ready == 12, "the pages behind it were there all the time"
    manager.check([context])


def test_pages_are_free_used_claimed_or_cached() -> None:
    manager = make()
    one = run(manager, [1] * 9)
    two = run(manager, [2] * 6)
    assert manager.occupancy()[:5] == (5, 5, 0, 0, 10)
    manager.release(two)
    assert manager.occupancy()[:5] == (5, 3, 2, 0, 10)
    manager.close(one)
    assert manager.occupancy()[:5] == (6, 0, 2, 2, 10)
    manager.close(two)
    assert manager.occupancy()[:5] == (7, 0, 0, 3, 10)


def test_a_page_with_two_claimants_stays_for_the_second() -> None:
    manager = make()
    one = run(manager, [1] * 9)
    two = run(manager, [1] * 9)
    manager.release(one)
    assert not drop_device(manager, one, 0), "the other one uses it"
    manager.release(two)
    manager.close(one)
    assert residencies(two) == [DIRTY] * 3
    manager.check([two])


def test_clearing_forgets_finished_prefixes_in_both_places_and_leaves_paused_contexts_alone() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    offload(manager, context, 0)
    manager.begin_plan()
    manager.close(context)
    paused = run(manager, [2] * 9)
    manager.release(paused)
    manager._store.clear()
    assert (manager.occupancy().cached, manager._store.num_free, manager.occupancy().host) == (0, 7, 0)
    assert adopted(manager, [1] * 9) == 0
    assert residencies(paused) == [DIRTY] * 3
    manager.check([paused])


def test_no_host_pages_turn_the_host_tier_off() -> None:
    manager = make(host_pages=0)
    context = run(manager, [1] * 4)
    manager.release(context)
    assert offload(manager, context, 0) is None
    assert (manager.has_host, manager.num_host_free, manager.occupancy().host) == (False, 0, 0)


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
