"""What contexts lose where the host is full: their heads, and those of contexts that are needed late before others."""

from dataclasses import dataclass

from jinfercept.kv.page import Residency
from jinfercept.sched.copy_ahead import CopyAhead
from jinfercept.sched.expected import LastExpectedFirst
from jinfercept.sched.position_price import PositionPrice
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence
from jinfercept.sim.simulation import OracleEstimator
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SIZE, SchedulerBench, residencies


@dataclass(frozen=True)
class QuadraticCost(AffineCost):
    """Attention makes every token dearer than the one before."""

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        return 1e-3 * num_tokens + 1e-3 * num_tokens**2


def paused(bench: SchedulerBench, estimator: OracleEstimator, name: str, num_tokens: int, call_s: float) -> Sequence:
    sequence = bench.prefilled(name, num_tokens)
    call = PendingCall("tool", name, call_s)
    estimator.started(call, bench.now_s)
    bench.scheduler.intercept(sequence, bench.now_s, (call,))
    return sequence


def missing(sequence: Sequence) -> list[int]:
    return [place for place, residency in enumerate(residencies(sequence)) if residency is Residency.MISSING]


def test_without_room_on_the_host_contexts_lose_their_heads_and_the_later_one_more() -> None:
    estimator = OracleEstimator()
    bench = SchedulerBench(CopyAhead(estimator, QuadraticCost(), SIZE, SIZE), num_pages=40, num_host_pages=0)
    soon = paused(bench, estimator, "soon", 60, 1000.0)
    late = paused(bench, estimator, "late", 60, 100_000.0)
    bench.prefilled("new", 60)
    assert missing(late) == list(range(len(missing(late))))
    assert len(missing(late)) > len(missing(soon))
    bench.scheduler.resume(late, [1], (CallDuration(1.0),))
    bench.drain()


def test_where_tokens_cost_the_same_everywhere_contexts_lose_their_tails() -> None:
    estimator = OracleEstimator()
    bench = SchedulerBench(CopyAhead(estimator, AffineCost(), SIZE, SIZE), num_pages=20, num_host_pages=0)
    context = paused(bench, estimator, "paused", 60, 1000.0)
    bench.prefilled("new", 30)
    lost = missing(context)
    assert lost == list(range(lost[0], context.context.num_pages))


def test_a_full_host_gives_up_what_is_worth_least_for_what_is_worth_more() -> None:
    estimator = OracleEstimator()
    bench = SchedulerBench(CopyAhead(estimator, QuadraticCost(), SIZE, SIZE), num_pages=20, num_host_pages=16)
    never = paused(bench, estimator, "never", 56, 1e9)
    soon = paused(bench, estimator, "soon", 56, 100.0)
    bench.prefilled("new", 60)
    assert missing(never)
    assert not missing(soon)


def test_contexts_lose_what_a_disk_has_before_what_is_to_be_computed_again() -> None:
    estimator = OracleEstimator()
    bench = SchedulerBench(CopyAhead(estimator, QuadraticCost(), SIZE, SIZE), num_pages=40, num_host_pages=0)
    soon = paused(bench, estimator, "soon", 60, 1000.0)
    late = paused(bench, estimator, "late", 60, 2000.0)
    soon.context.num_stored = 15
    bench.prefilled("new", 60)
    assert missing(soon)
    assert not missing(late)


def test_a_request_that_others_may_overtake_for_long_gives_way_before_one_that_returns_soon() -> None:
    estimator = OracleEstimator()
    bench = SchedulerBench(CopyAhead(estimator, AffineCost(), SIZE, SIZE))
    soon, waiting, following = (paused(bench, estimator, name, 20, 10.0) for name in ("soon", "waiting", "following"))
    order = LastExpectedFirst(estimator)
    for sequence in (waiting, following):
        bench.scheduler.resume(sequence, [1], (CallDuration(1.0),))
    waiting.delay_s = 200.0
    for sequence in (following, soon, waiting):
        order.add(sequence, bench.now_s)
    assert list(order) == [waiting, soon, following]
    assert order.expected_s(waiting) == bench.now_s + 200.0
    assert order.expected_s(following) < bench.now_s


def test_the_price_of_parts_of_a_context_adds_up_to_that_of_the_whole() -> None:
    price, cost = PositionPrice(QuadraticCost(), SIZE), QuadraticCost()
    assert abs(sum(price.between_s(start, start + 2) for start in range(0, 40, 2)) - cost.recompute_s(40, SIZE)) < 1e-9
    assert price.token_s(0) < price.token_s(39)


def test_a_context_that_has_run_again_and_ended_is_forgotten_though_no_memory_was_short() -> None:
    estimator = OracleEstimator()
    policy = CopyAhead(estimator, AffineCost(), SIZE, SIZE)
    bench = SchedulerBench(policy, num_pages=40, num_host_pages=0)
    sequence = paused(bench, estimator, "paused", 20, 1.0)
    bench.steps(3)
    bench.scheduler.resume(sequence, [1], (CallDuration(1.0),))
    bench.drain()
    assert not [kept for kept in vars(policy).values() if isinstance(kept, set) and sequence.context in kept]
