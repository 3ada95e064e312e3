"""The documented behaviour of the door to all pages, case by case."""

from jinfercept.kv.context import Context
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Occupancy, Page, Residency

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
    number = len(context.pages)
    manager.close(context)
    return number


def swap_out(manager: KVManager, pages: list[Page]) -> None:
    for page in pages:
        assert manager._store.offload(page) is not None
        assert manager._store.drop_device(page)
    manager.begin_plan()


def residencies(context: Context) -> list[Residency]:
    return [page.residency for page in context.pages]


def test_full_pages_are_shared_and_the_tail_is_private() -> None:
    manager = make()
    one = run(manager, [1] * 10)
    two = run(manager, [1] * 10)
    assert two.pages[:2] == one.pages[:2]
    assert two.pages[2] is not one.pages[2]
    assert [page.refs for page in one.pages] == [2, 2, 1]
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


def test_two_who_computed_the_same_page_keep_their_own_and_one_is_freed_at_the_end() -> None:
    manager = make()
    one, two = manager.open(), manager.open()
    for context in (one, two):
        manager.hold(context)
    for context in (one, two):
        compute(manager, context, [1] * 4)
    assert one.pages[0] is not two.pages[0]
    manager.check([one, two])
    manager.close(two)
    manager.close(one)
    assert (manager.occupancy().cached, manager._store.num_free) == (1, 9)


def test_residency_follows_the_two_places() -> None:
    manager = make()
    context = run(manager, [1] * 6)
    assert residencies(context) == [DIRTY, DIRTY]
    assert manager._store.offload(context.pages[0]) is None, "a page in use is not copied"
    manager.release(context)
    copies = [manager._store.offload(page) for page in context.pages]
    assert [copy and copy[:2] for copy in copies] == [(page.device, page.host) for page in context.pages]
    assert residencies(context) == [CLEAN, CLEAN]
    assert manager._store.offload(context.pages[0]) is None, "it has a copy"
    assert manager._store.drop_device(context.pages[0])
    manager._store.drop_host(context.pages[1])
    manager._store.drop_device(context.pages[1])
    assert residencies(context) == [HOST, MISSING]
    assert context.residency(6) == (0, 4, 2)
    manager.check([context])


def test_a_host_copy_goes_stale_when_the_tail_grows() -> None:
    manager = make()
    context = run(manager, [1] * 6)
    manager.release(context)
    copy = manager._store.offload(context.pages[1])
    assert copy is not None
    manager.begin_plan()
    run(manager, [1] * 7, context=context)
    assert context.pages[1].residency is DIRTY
    assert manager.occupancy().host == 0
    assert manager.take_dropped() == (copy.host_slot,)
    manager.check([context])


def test_a_copy_that_is_dropped_by_the_plan_that_makes_it_lives_until_the_next_one() -> None:
    manager = make(host_pages=1)
    context = run(manager, [1] * 4)
    manager.release(context)
    copy = manager._store.offload(context.pages[0])
    assert copy is not None
    manager._store.drop_host(context.pages[0])
    assert manager.take_dropped() == ()
    assert manager._store.offload(context.pages[0]) is None, "the host slot is still taken"
    manager.begin_plan()
    assert manager.take_dropped() == (copy.host_slot,)
    assert manager._store.offload(context.pages[0]) is not None


def test_what_is_copied_out_can_be_fetched_from_the_next_plan_on_and_read_from_the_one_after() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    for page in context.pages:
        manager._store.offload(page)
        manager._store.drop_device(page)
    manager.hold(context)
    assert manager.fetch(context, 9) == ([], 0)
    assert manager.gap_end(context, 8) == 0, "it waits for the page"
    manager.begin_plan()
    assert manager.num_fetchable(context) == 2
    copies, num_tokens = manager.fetch(context, 9)
    assert [copy[:2] for copy in copies] == [(page.device, page.host) for page in context.pages]
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
    swap_out(manager, context.pages)
    manager.hold(context)
    manager._store.fetch(context.pages[0])
    manager.release(context)
    assert not manager._store.drop_device(context.pages[0])
    manager.begin_plan()
    assert manager._store.drop_device(context.pages[0])


def test_a_page_on_its_way_in_is_not_copied_out_of_a_slot_that_does_not_hold_it_yet() -> None:
    manager = make(host_pages=2)
    context = run(manager, [1] * 4)
    manager.release(context)
    swap_out(manager, context.pages)
    manager.hold(context)
    manager._store.fetch(context.pages[0])
    manager._store.drop_host(context.pages[0])  # as copies of others do, once it is spare
    manager.release(context)
    assert manager._store.offload(context.pages[0]) is None
    manager.begin_plan()
    assert manager._store.offload(context.pages[0]) is not None


def test_spare_host_copies_go_before_copy_out_fails() -> None:
    manager = make(host_pages=2)
    done = run(manager, [1] * 8)
    manager.release(done)
    swap_out(manager, done.pages)
    other = run(manager, [2] * 12)
    manager.release(other)
    assert manager.num_host_free == 0
    assert manager._store.offload(other.pages[0]) is None, "a paused context counts on both copies"
    manager.close(done)
    assert manager.num_host_free == 2
    assert manager._store.offload(other.pages[0]) is not None
    assert manager._store.offload(other.pages[1]) is not None
    assert manager._store.offload(other.pages[2]) is None
    manager.check([other])


def test_a_copy_that_is_still_being_made_is_not_spare() -> None:
    manager = make(host_pages=1)
    done, other = run(manager, [1] * 4), run(manager, [2] * 4)
    manager.release(done)
    manager.release(other)
    assert manager._store.offload(done.pages[0]) is not None
    manager.close(done)
    assert manager._store.offload(other.pages[0]) is None
    manager.begin_plan()
    assert manager._store.offload(other.pages[0]) is not None


def test_the_copy_of_a_page_in_use_is_spare() -> None:
    manager = make(host_pages=1)
    context = run(manager, [1] * 5)
    manager.release(context)
    manager._store.offload(context.pages[0])
    manager.begin_plan()
    assert manager.num_host_free == 0
    manager.hold(context)
    assert manager.num_host_free == 1
    assert context.pages[0].residency is CLEAN


def test_finished_prefixes_go_least_recently_used_first_and_children_before_parents() -> None:
    manager = make()
    pages = []
    for tokens in ([1] * 8, [2] * 8):
        context = run(manager, tokens)
        pages += context.pages
        manager.close(context)
    adopted(manager, [1] * 9)  # used again
    lost: list[int] = []
    while manager._store.evict_cached():
        lost += [index for index, page in enumerate(pages) if page.device is None and index not in lost]
    assert lost == [3, 2, 1, 0]


def test_a_finished_prefix_with_a_host_copy_survives_on_the_host() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    for page in context.pages:
        manager._store.offload(page)
    manager.begin_plan()
    manager.close(context)
    while manager._store.evict_cached():
        pass
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
    for page in context.pages:
        manager._store.drop_device(page)
    other = run(manager, [1] * 6)
    manager.refresh(context, [1] * 9)
    assert context.pages[0] is other.pages[0]
    assert residencies(context) == [DIRTY, MISSING]
    manager.check([context, other])


def test_a_hole_is_computed_alone() -> None:
    manager = make()
    context = run(manager, [1] * 12)
    manager.release(context)
    manager._store.drop_device(context.pages[1])
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
    assert not manager._store.drop_device(one.pages[0]), "the other one uses it"
    manager.release(two)
    manager.close(one)
    assert residencies(two) == [DIRTY] * 3
    manager.check([two])


def test_clearing_forgets_finished_prefixes_in_both_places_and_leaves_paused_contexts_alone() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    manager._store.offload(context.pages[0])
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
    assert manager._store.offload(context.pages[0]) is None
    assert (manager.has_host, manager.num_host_free, manager.occupancy().host) == (False, 0, 0)
