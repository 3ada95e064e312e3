"""Whose pages give way, and what crosses the link: plans under every shortage."""

import pytest

from jinfercept.kv.page import Residency
from jinfercept.sched.policy import improved_discard, preserve, swap
from jinfercept.sched.sequence import Sequence, State
from tests.support.fake_engine import POLICIES
from tests.support.matrices import sampled_depths
from tests.support.scheduler_bench import SIZE, CopyEverything, SchedulerBench, Scripted, residencies

# -- slots -------------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_when_a_page_is_missing() -> None:
    bench = SchedulerBench(improved_discard(), num_pages=6)
    old = bench.prefilled("old", 8, max_tokens=10)
    young = bench.prefilled("young", 7, max_tokens=10)
    while young.state is State.RUNNING:
        bench.step()
    assert old.preemptions == 0
    assert young.state is State.WAITING
    bench.drain()
    assert (old.generated, young.generated) == (10, 10)
    assert young.usage.recomputed >= 8


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_can_be_forced_under_every_policy(policy: str) -> None:
    bench = SchedulerBench(POLICIES[policy](), num_pages=6, preemption="recompute")
    bench.prefilled("old", 8, max_tokens=10)
    young = bench.prefilled("young", 7, max_tokens=10)
    bench.drain()
    assert young.preemptions
    assert young.usage.copied_in == 0
    assert young.usage.recomputed >= 8

    bench = SchedulerBench(POLICIES[policy](), num_pages=6, preemption="swap", link_tokens_per_s=1.0)
    bench.prefilled("old", 8, max_tokens=10)
    young = bench.prefilled("young", 7, max_tokens=10)
    bench.drain()
    assert young.preemptions
    assert young.usage.recomputed == 0
    assert young.usage.copied_out >= young.usage.copied_in >= 8


@pytest.mark.parametrize(("policy", "depth"), sampled_depths())
def test_preempted_pages_stay_until_needed_and_are_swapped_or_recomputed_as_is_cheaper(policy: str, depth: int) -> None:
    def run(link_tokens_per_s: float) -> Sequence:
        bench = SchedulerBench(
            POLICIES[policy](), num_pages=6, preemption="auto", link_tokens_per_s=link_tokens_per_s, depth=depth
        )
        bench.prefilled("old", 8, max_tokens=10)
        young = bench.prefilled("young", 7, max_tokens=10)
        bench.drain()
        assert young.preemptions
        return young

    swapped, recomputed = run(1e9), run(1.0)
    assert 0 < swapped.usage.copied_in <= swapped.usage.copied_out
    assert swapped.usage.recomputed == 0
    assert recomputed.usage.copied_in == 0
    assert 0 < recomputed.usage.recomputed < 8, "the first pages were never needed"
    assert swapped.tokens == recomputed.tokens


def test_a_finished_prefix_goes_before_a_paused_context_and_that_before_a_running_one() -> None:
    bench = SchedulerBench(CopyEverything(), num_pages=8)
    bench.prefilled("done", 8, max_tokens=1)
    paused = bench.paused("paused", 8)
    runs = bench.prefilled("runs", 3, max_tokens=28)
    assert bench.kv.occupancy().cached
    seen = []
    while runs.state is State.RUNNING:
        seen.append((bench.kv.occupancy().cached > 0, residencies(paused)[0] is Residency.CLEAN))
        bench.step()
    assert (True, False) not in seen
    assert seen[-1] == (False, False)
    assert runs.preemptions == 0


def test_a_paused_context_gives_no_page_under_preserve_while_anybody_older_runs() -> None:
    bench = SchedulerBench(preserve(), num_pages=8)
    old = bench.prefilled("old", 8, max_tokens=8)
    paused = bench.paused("paused", 8)
    young = bench.add("young", 12, max_tokens=2)
    while old.state is State.RUNNING:
        assert residencies(paused) == [Residency.DIRTY] * 2
        assert young.generated == 0
        bench.step()
    bench.drain()
    assert young.state is State.FINISHED


# -- the link ----------------------------------------------------------------------------------------------------------


def test_copies_stay_within_the_links_budget_unless_the_policy_waits_for_them() -> None:
    bench = SchedulerBench(CopyEverything(), link_tokens_per_s=2 * SIZE)
    paused = bench.paused("paused", 20)
    bench.prefilled("runs", 3)
    plans = bench.steps(3)
    assert [len(plan.offload) for plan in plans] == [2, 1, 0]
    assert residencies(paused) == [Residency.CLEAN] * 5
    synchronous = SchedulerBench(swap(), link_tokens_per_s=2 * SIZE)
    synchronous.paused("paused", 20)
    assert len(synchronous.step().offload) == 5


def test_fetches_take_the_link_first_and_copies_what_is_left() -> None:
    bench = SchedulerBench(CopyEverything(), num_pages=30, link_tokens_per_s=3 * SIZE)
    bench.prefilled("runs", 3, max_tokens=30)
    returning = bench.paused("returning", 16)
    bench.steps(2)
    assert residencies(returning) == [Residency.CLEAN] * 4
    assert bench.kv.drop(returning.context, range(4), device=True, host=False) == 4
    bench.paused("other", 16)
    bench.scheduler.resume(returning, [5])
    moved = [(len(plan.fetch), len(plan.offload)) for plan in bench.steps(4)]
    assert moved == [(3, 0), (1, 2), (0, 2), (0, 0)]


def test_when_all_are_paused_a_plan_only_transfers_ten_milliseconds_at_a_time() -> None:
    bench = SchedulerBench(CopyEverything(), link_tokens_per_s=2 * SIZE / 0.010)
    bench.paused("a", 15)
    plans = bench.steps(3)
    assert [(plan.bucket, plan.chunks, len(plan.offload)) for plan in plans] == [(0, (), 2), (0, (), 2), (0, (), 0)]
    assert [bool(plan) for plan in plans] == [True, True, False]


def test_a_page_is_fetched_before_what_follows_it_is_computed() -> None:
    bench = SchedulerBench(swap())
    sequence = bench.paused("a", 8)
    bench.step()
    assert residencies(sequence) == [Residency.HOST] * 2
    bench.scheduler.resume(sequence, [1, 2, 3])
    first, second = bench.steps(2)
    assert (len(first.fetch), first.chunks) == (2, ())
    assert second.chunks[0].start == 8
    assert len(second.chunks[0].tokens) == 4
    assert sequence.usage.recomputed == 0
    assert sequence.usage.residency == (0, 8, 0)


def test_a_hole_in_the_middle_is_recomputed_alone() -> None:
    places = [Residency.DIRTY, Residency.MISSING, Residency.HOST, Residency.CLEAN]
    bench = SchedulerBench(Scripted(lambda sequence, index: places[index]))
    sequence = bench.paused("a", 16)
    bench.step()
    assert residencies(sequence) == places
    bench.scheduler.resume(sequence, [1, 2])
    hole, rest = bench.steps(2)
    assert [(chunk.start, len(chunk.tokens), chunk.sample) for chunk in hole.chunks] == [(4, 4, None)]
    assert [copy.device_slot for copy in hole.fetch] == list(sequence.context.slots(2, 3))
    assert [(chunk.start, len(chunk.tokens)) for chunk in rest.chunks] == [(16, 3)]
    assert (sequence.usage.recomputed, sequence.usage.residency) == (4, (8, 4, 4))
    bench.drain()
