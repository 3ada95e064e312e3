"""Whose pages give way, and what crosses the link: plans under every shortage."""

import pytest

from jinfercept.kv.page import Residency
from jinfercept.sched.policy import improved_discard, preserve, scripted, swap
from jinfercept.sched.sequence import State
from tests.support.fakes import POLICIES
from tests.support.scheduling import SIZE, CopyEverything, Desk, residencies

# -- slots -------------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_when_a_page_is_missing() -> None:
    desk = Desk(improved_discard(), num_pages=6)
    old = desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    while young.state is State.RUNNING:
        desk.step()
    assert old.preemptions == 0
    assert young.state is State.WAITING
    desk.drain()
    assert (old.generated, young.generated) == (10, 10)
    assert young.recomputed >= 8


def test_a_preempted_sequence_uses_the_host_tier_too() -> None:
    desk = Desk(swap(), num_pages=6)
    desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    desk.drain()
    assert young.preemptions
    assert young.recomputed == 0
    assert young.copied_out == young.copied_in >= 8


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_can_be_forced_under_every_policy(policy: str) -> None:
    desk = Desk(POLICIES[policy](), num_pages=6, preemption="recompute")
    desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    desk.drain()
    assert young.preemptions
    assert young.copied_in == 0
    assert young.recomputed >= 8

    desk = Desk(POLICIES[policy](), num_pages=6, preemption="swap", link_tokens_per_s=1.0)
    desk.prefilled("old", 8, max_tokens=10)
    young = desk.prefilled("young", 7, max_tokens=10)
    desk.drain()
    assert young.preemptions
    assert young.recomputed == 0
    assert young.copied_out >= young.copied_in >= 8


def test_a_finished_prefix_goes_before_a_paused_context_and_that_before_a_running_one() -> None:
    desk = Desk(CopyEverything(), num_pages=8)
    desk.prefilled("done", 8, max_tokens=1)
    paused = desk.paused("paused", 8)
    runs = desk.prefilled("runs", 3, max_tokens=28)
    assert desk.kv.store.num_cached
    seen = []
    while runs.state is State.RUNNING:
        seen.append((desk.kv.store.num_cached > 0, residencies(paused)[0] is Residency.CLEAN))
        desk.step()
    assert (True, False) not in seen
    assert seen[-1] == (False, False)
    assert runs.preemptions == 0


def test_a_paused_context_gives_no_page_under_preserve_while_anybody_older_runs() -> None:
    desk = Desk(preserve(), num_pages=8)
    old = desk.prefilled("old", 8, max_tokens=8)
    paused = desk.paused("paused", 8)
    young = desk.add("young", 12, max_tokens=2)
    while old.state is State.RUNNING:
        assert residencies(paused) == [Residency.DIRTY] * 2
        assert young.generated == 0
        desk.step()
    desk.drain()
    assert young.state is State.FINISHED


# -- the link ----------------------------------------------------------------------------------------------------------


def test_copies_stay_within_the_links_budget_unless_the_policy_waits_for_them() -> None:
    desk = Desk(CopyEverything(), link_tokens_per_s=2 * SIZE)
    paused = desk.paused("paused", 20)
    desk.prefilled("runs", 3)
    plans = desk.steps(3)
    assert [len(plan.offload) for plan in plans] == [2, 1, 0]
    assert residencies(paused) == [Residency.CLEAN] * 5
    synchronous = Desk(swap(), link_tokens_per_s=2 * SIZE)
    synchronous.paused("paused", 20)
    assert len(synchronous.step().offload) == 5


def test_fetches_take_the_link_first_and_copies_what_is_left() -> None:
    desk = Desk(CopyEverything(), num_pages=30, link_tokens_per_s=3 * SIZE)
    desk.prefilled("runs", 3, max_tokens=30)
    returning = desk.paused("returning", 16)
    desk.steps(2)
    assert residencies(returning) == [Residency.CLEAN] * 4
    for page in returning.context.pages:
        assert desk.kv.store.drop_device(page)
    desk.paused("other", 16)
    desk.scheduler.resume(returning, [5])
    moved = [(len(plan.fetch), len(plan.offload)) for plan in desk.steps(4)]
    assert moved == [(3, 0), (1, 2), (0, 2), (0, 0)]


def test_when_all_are_paused_a_plan_only_transfers_ten_milliseconds_at_a_time() -> None:
    desk = Desk(CopyEverything(), link_tokens_per_s=2 * SIZE / 0.010)
    desk.paused("a", 15)
    plans = desk.steps(3)
    assert [(plan.bucket, plan.chunks, len(plan.offload)) for plan in plans] == [(0, (), 2), (0, (), 2), (0, (), 0)]
    assert [bool(plan) for plan in plans] == [True, True, False]


def test_a_page_is_fetched_before_what_follows_it_is_computed() -> None:
    desk = Desk(swap())
    sequence = desk.paused("a", 8)
    desk.step()
    assert residencies(sequence) == [Residency.HOST] * 2
    desk.scheduler.resume(sequence, [1, 2, 3])
    first, second = desk.steps(2)
    assert (len(first.fetch), first.scatter, first.chunks) == (2, first.fetch, ())
    assert second.chunks[0].start == 8
    assert len(second.chunks[0].tokens) == 4
    assert sequence.recomputed == 0
    assert sequence.found == (0, 8, 0)


def test_a_hole_in_the_middle_is_recomputed_alone() -> None:
    places = [Residency.DIRTY, Residency.MISSING, Residency.HOST, Residency.CLEAN]
    desk = Desk(scripted(lambda sequence, index: places[index]))
    sequence = desk.paused("a", 16)
    desk.step()
    assert residencies(sequence) == places
    desk.scheduler.resume(sequence, [1, 2])
    hole, rest = desk.steps(2)
    assert [(chunk.start, len(chunk.tokens), chunk.sample) for chunk in hole.chunks] == [(4, 4, None)]
    assert [copy.device_slot for copy in hole.fetch] == [sequence.context.pages[2].device]
    assert [(chunk.start, len(chunk.tokens)) for chunk in rest.chunks] == [(16, 3)]
    assert (sequence.recomputed, sequence.found) == (4, (8, 4, 4))
    desk.drain()
