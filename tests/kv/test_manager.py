"""The documented behaviour of contexts and their references, case by case."""

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Occupancy
from tests.support.kv_contexts import (
    DIRTY,
    MISSING,
    adopted,
    evict_prefixes,
    make,
    offload,
    residencies,
    run,
)


def test_full_pages_are_shared_and_the_tail_is_private() -> None:
    manager = make()
    first = run(manager, [1] * 10)
    second = run(manager, [1] * 10)
    assert second.slots(0, 2) == first.slots(0, 2)
    assert second.slots(2, 3) != first.slots(2, 3)
    assert [(run.pages, run.shared) for run in first.runs()] == [(range(2), True), (range(2, 3), False)]
    assert manager.occupancy() == Occupancy(free=6, used=4, paused=0, cached=0, total=10, host_total=10)
    manager.check([first, second])


def test_contexts_of_different_identity_share_nothing() -> None:
    assert KVManager(1, 0, 4, identity="a").open().root != KVManager(1, 0, 4, identity="b").open().root


def test_finished_prefixes_go_least_recently_used_first_and_children_before_parents() -> None:
    manager = make()
    for tokens in ([1] * 8, [2] * 8):
        manager.close(run(manager, tokens))
    adopted(manager, [1] * 9)  # used again
    left = list[tuple[int, int]]()
    while evict_prefixes(manager, 1):
        left.append((adopted(manager, [1] * 9), adopted(manager, [2] * 9)))
        adopted(manager, [1] * 9)
    assert left == [(2, 1), (2, 0), (1, 0), (0, 0)]


def test_a_finished_prefix_with_a_host_copy_survives_on_the_host() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    manager.copy_out(context, range(2), 2)
    manager.begin_plan()
    manager.close(context)
    assert evict_prefixes(manager, 9) == 2
    assert manager.occupancy().free == 10
    assert adopted(manager, [1] * 9) == 2
    assert manager.occupancy().host == 2


def test_without_prefix_caching_nothing_is_kept_but_living_requests_share() -> None:
    manager = make(prefix_caching=False)
    first = run(manager, [1] * 9)
    assert adopted(manager, [1] * 9) == 2
    manager.close(first)
    assert adopted(manager, [1] * 9) == 0
    assert (manager.occupancy().cached, manager.occupancy().free) == (0, 10)


def test_a_returning_context_adopts_what_others_have_computed_meanwhile() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    manager.drop(context, range(2), device=True, host=False)
    other = run(manager, [1] * 6)
    manager.refresh(context, [1] * 9)
    assert context.extents[0] is other.extents[0]
    assert residencies(context) == [DIRTY, MISSING]
    manager.check([context, other])


def test_clearing_forgets_finished_prefixes_in_both_places_and_leaves_paused_contexts_alone() -> None:
    manager = make()
    context = run(manager, [1] * 8)
    manager.release(context)
    offload(manager, context, 0)
    manager.begin_plan()
    manager.close(context)
    paused = run(manager, [2] * 9)
    manager.release(paused)
    manager.drop_prefixes()
    assert (manager.occupancy().cached, manager.occupancy().free, manager.occupancy().host) == (0, 7, 0)
    assert adopted(manager, [1] * 9) == 0
    assert residencies(paused) == [DIRTY] * 3
    manager.check([paused])
