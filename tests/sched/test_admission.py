"""Which waiting requests may start, and what the link moves for them beside a step."""

from collections.abc import Iterator

from jinfercept.kv.page import Occupancy
from jinfercept.sched.policy import Budget, Move, Mover, Policy
from jinfercept.sched.scheduler import MOST_TURNED_AWAY_S
from jinfercept.sched.sequence import PendingCall, Sequence, State
from tests.support.scheduler_bench import SIZE, CopyEverything, SchedulerBench

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
