"""What a new request may take from paused contexts, and what the link moves beside a step."""

from collections.abc import Iterator

import pytest

from jinfercept.kv.page import Occupancy
from jinfercept.sched.admission import MOST_HELD_BACK_S
from jinfercept.sched.copy_ahead import HELD_SWAPS, LATE, CopyAhead
from jinfercept.sched.estimator import HistoryEstimator
from jinfercept.sched.policy import Budget, Move, Mover, Policy
from jinfercept.sched.scheduler import MOST_TURNED_AWAY_S
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence, State
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SIZE, CopyEverything, SchedulerBench

CALL = PendingCall("tool", 0)


class EqualSwaps(AffineCost):
    """Moving any context takes as long as moving a token."""

    def swap_s(self, num_tokens: int) -> float:
        return 1 / self.link_tokens_per_s


def holding(swap_s: float, call_s: float = 2.0) -> CopyAhead:
    """Calls are expected to last `call_s`, and moving any context takes `swap_s`."""
    estimator = HistoryEstimator()
    for _ in range(20):
        estimator.observe(CALL, call_s)
    return CopyAhead(estimator, EqualSwaps(link_tokens_per_s=1 / swap_s), 16, SIZE)


def paused(bench: SchedulerBench, num_tokens: int) -> Sequence:
    sequence = bench.prefilled("paused", num_tokens)
    bench.scheduler.intercept(sequence, bench.now_s, (CALL,))
    return sequence


@pytest.mark.parametrize("swap_s", [0.1, 2.0])
def test_a_new_request_waits_rather_than_displace_a_context_that_returns_soon(swap_s: float) -> None:
    bench = SchedulerBench(holding(swap_s), num_pages=10)
    bench.prefilled("runs", 4, max_tokens=20)
    context = paused(bench, 16)
    new = bench.add("new", 14)
    bench.step()
    assert new.state is (State.WAITING if HELD_SWAPS * swap_s > 2.0 else State.RUNNING)
    bench.scheduler.resume(context, [1], (CallDuration(2.0),))
    bench.drain()
    assert new.state is State.FINISHED
    assert context.usage.copied_in == 0 or swap_s == 0.1


def test_a_context_is_held_no_longer_than_its_swaps_allow_and_never_from_an_empty_device() -> None:
    policy = holding(1.0, call_s=1.0)
    bench = SchedulerBench(policy, num_pages=10)
    runs = bench.prefilled("runs", 4, max_tokens=36)
    context = paused(bench, 16)
    assert [policy.held_pages(most, context.paused_s) for most in (2, 100)] == [2, 4]
    new = bench.add("new", 12, max_tokens=2)
    waited = 0
    while new.state is State.WAITING:
        waited += 1
        bench.step()
    assert 1 < waited <= HELD_SWAPS * LATE + 2
    bench.scheduler.finish(runs, bench.now_s)
    bench.drain()
    alone = bench.add("alone", 30, max_tokens=2)
    bench.drain()
    assert alone.state is State.FINISHED


def test_a_request_that_ran_before_may_take_held_slots() -> None:
    bench = SchedulerBench(holding(2.0), num_pages=10)
    back = bench.paused("back", 6)
    bench.prefilled("runs", 4, max_tokens=20)
    context = paused(bench, 16)
    bench.scheduler.resume(back, [1] * 8)
    bench.step()
    assert (back.state, context.state) == (State.RUNNING, State.INTERCEPTED)


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


@pytest.mark.parametrize(
    ("link_tokens_per_s", "attention_s"),
    [(SIZE, 0.0), (100 * SIZE, 0.0), (SIZE, 100.0)],
    ids=["slow link", "fast link", "slow link, dear attention"],
)
def test_host_pages_that_the_link_would_bring_too_late_are_recomputed(
    link_tokens_per_s: float, attention_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced = AffineCost.recompute_s
    monkeypatch.setattr(
        AffineCost,
        "recompute_s",
        lambda cost, num_tokens, chunk: priced(cost, num_tokens, chunk) + attention_s * num_tokens,
    )
    bench = SchedulerBench(holding(0.1), num_pages=30, link_tokens_per_s=link_tokens_per_s)
    bench.prefilled("runs", 4, max_tokens=60)
    back = paused(bench, 38)
    bench.steps(12)
    assert bench.kv.drop(back.context, back.context.tail_first, device=True, host=False) == back.context.num_pages
    tokens = back.tokens[:]
    bench.scheduler.resume(back, [1], (CallDuration(12.0),))
    bench.steps(12)
    assert (back.usage.recomputed > 0, back.usage.copied_in > 0) == (
        (True, False) if link_tokens_per_s == SIZE and not attention_s else (False, True)
    )
    assert back.tokens[: len(tokens)] == tokens
    assert back.generated > 1


def test_paused_contexts_hold_back_a_new_request_for_a_bounded_time() -> None:
    bench = SchedulerBench(holding(1000.0, call_s=2000.0), num_pages=10)
    bench.prefilled("runs", 4, max_tokens=36)
    paused(bench, 16)
    new = bench.add("new", 12, max_tokens=2)
    plans = 0
    while new.state is State.WAITING:
        plans += 1
        bench.step()
    assert MOST_HELD_BACK_S <= plans <= MOST_HELD_BACK_S + 2


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
