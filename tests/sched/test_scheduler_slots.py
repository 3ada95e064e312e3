"""Whose pages give way, and what crosses the link: plans under every shortage."""

from collections.abc import Iterator

import pytest

from jinfercept.kv.page import Occupancy, Residency
from jinfercept.sched.policy import Budget, Move, Mover, Policy, improved_discard, preserve, swap
from jinfercept.sched.scheduler import MOST_TURNED_AWAY_S
from jinfercept.sched.sequence import PendingCall, Sequence, State
from tests.support.fake_engine import POLICIES, sampled_depths
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


CALL = PendingCall("tool", 0)


def paused(bench: SchedulerBench, num_tokens: int) -> Sequence:
    sequence = bench.prefilled("paused", num_tokens)
    bench.scheduler.intercept(sequence, bench.now_s, (CALL,))
    return sequence


def test_fetches_use_what_the_link_moves_beside_a_step_with_a_chunk() -> None:
    bench = SchedulerBench(
        CopyEverything(), buckets=(4, 64), num_pages=60, link_tokens_per_s=4 * SIZE, per_query_s=1 / 64
    )
    back = bench.paused("back", 38)
    bench.steps(12)
    assert bench.kv.drop(back.context, back.context.tail_first, device=True, host=False) == back.context.num_pages
    bench.scheduler.resume(back, [1])
    bench.add("new", 60)
    assert [len(plan.fetch) for plan in bench.steps(2)] == [8, 2]


class TurnsAway(Policy):
    """Lets no sequence of some names start, and notes the pools of the last plan."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.pools = names, Occupancy(0, 0, 0, 0, 0)

    def pause(self, sequence: Sequence, now: float) -> None: ...

    def resume(self, sequence: Sequence, now: float) -> None: ...

    def victims(self, now: float) -> Iterator[Move]:
        return iter(())

    def admits(self, sequence: Sequence, now: float) -> bool:
        return sequence.id not in self.names

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self.pools = budget.pools


def test_others_pass_a_request_that_the_policy_does_not_let_start_until_nothing_runs_for_long() -> None:
    policy = TurnsAway({"turned_away"})
    bench = SchedulerBench(policy, num_pages=10)
    bench.prefilled("runs", 4, max_tokens=6)
    turned_away, later = bench.add("turned_away", 6, max_tokens=2), bench.add("later", 5, max_tokens=2)
    bench.step()
    assert (turned_away.state, later.state) == (State.WAITING, State.RUNNING)
    assert policy.pools == bench.kv.occupancy()
    bench.steps(8)
    assert (later.state, turned_away.state, bench.scheduler.turns_away) == (State.FINISHED, State.WAITING, True)
    bench.steps(int(MOST_TURNED_AWAY_S))
    bench.drain()
    assert turned_away.state is State.FINISHED
