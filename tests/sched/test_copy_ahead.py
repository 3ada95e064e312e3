"""What the default policy keeps: copies before slots are needed, and losses of few contexts, those that are needed last."""

from jinfercept.kv.page import Residency
from jinfercept.sched.copy_ahead import CopyAhead, LastNeededFirst
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence
from jinfercept.sim.simulation import OracleEstimator
from tests.support.scheduler_bench import SchedulerBench, residencies


def bench_of(
    num_pages: int, num_host_pages: int, link_tokens_per_s: float = 1e9
) -> tuple[SchedulerBench, OracleEstimator]:
    estimator = OracleEstimator()
    bench = SchedulerBench(
        CopyAhead(estimator), num_pages=num_pages, num_host_pages=num_host_pages, link_tokens_per_s=link_tokens_per_s
    )
    return bench, estimator


def pause(bench: SchedulerBench, estimator: OracleEstimator, sequence: Sequence, call_s: float) -> Sequence:
    call = PendingCall("tool", sequence.id, call_s)
    estimator.started(call, bench.now_s)
    bench.scheduler.intercept(sequence, bench.now_s, (call,))
    return sequence


def paused(bench: SchedulerBench, estimator: OracleEstimator, name: str, num_tokens: int, call_s: float) -> Sequence:
    return pause(bench, estimator, bench.prefilled(name, num_tokens), call_s)


def missing(sequence: Sequence) -> list[int]:
    return [place for place, residency in enumerate(residencies(sequence)) if residency is Residency.MISSING]


def test_without_a_host_the_context_that_is_needed_last_is_lost_whole_before_any_other_loses_a_page() -> None:
    bench, estimator = bench_of(num_pages=40, num_host_pages=0)
    soon = paused(bench, estimator, "soon", 60, 1000.0)
    late = paused(bench, estimator, "late", 60, 2000.0)
    bench.prefilled("new", 60)
    assert missing(late) == list(range(len(missing(late))))
    assert missing(late)
    assert not missing(soon)
    bench.scheduler.resume(late, [1], (CallDuration(1.0),))
    bench.drain()


def test_a_context_that_has_begun_to_lose_pages_loses_the_rest_though_another_one_is_needed_later_by_then() -> None:
    bench, estimator = bench_of(num_pages=44, num_host_pages=0)
    first = paused(bench, estimator, "first", 60, 2000.0)
    bench.prefilled("runs", 60)
    second = paused(bench, estimator, "second", 40, 1000.0)
    bench.prefilled("more", 20)
    assert missing(first)
    later = paused(bench, estimator, "later", 8, 90_000.0)
    bench.prefilled("most", 8)
    assert not missing(later)
    assert not missing(second)


def test_a_full_host_loses_what_is_needed_last_for_what_is_needed_sooner() -> None:
    bench, estimator = bench_of(num_pages=20, num_host_pages=16)
    never = paused(bench, estimator, "never", 56, 1e9)
    soon = paused(bench, estimator, "soon", 56, 100.0)
    bench.prefilled("new", 60)
    assert missing(never)
    assert not missing(soon)


def test_full_pages_are_copied_while_their_request_runs_once_half_of_the_device_is_in_use() -> None:
    bench, _ = bench_of(num_pages=20, num_host_pages=40)
    first = bench.prefilled("first", 36, max_tokens=30)
    bench.steps(2)
    assert Residency.CLEAN not in residencies(first)
    second = bench.prefilled("second", 24, max_tokens=30)
    bench.steps(4)
    for sequence in (first, second):
        assert set(residencies(sequence)[:6]) == {Residency.CLEAN}


def test_clean_pages_of_a_context_that_is_needed_sooner_go_before_any_page_is_lost() -> None:
    bench, estimator = bench_of(num_pages=32, num_host_pages=40, link_tokens_per_s=4.0)
    soon = paused(bench, estimator, "soon", 56, 1000.0)
    bench.steps(40)
    assert Residency.DIRTY not in residencies(soon)
    late = paused(bench, estimator, "late", 56, 2000.0)
    bench.prefilled("new", 40)
    assert not missing(soon)
    assert not missing(late)


def test_a_request_that_others_may_overtake_for_long_gives_way_before_one_that_returns_soon() -> None:
    bench, estimator = bench_of(num_pages=40, num_host_pages=0)
    soon, waiting, following = (paused(bench, estimator, name, 20, 10.0) for name in ("soon", "waiting", "following"))
    order = LastNeededFirst(estimator)
    for sequence in (waiting, following):
        bench.scheduler.resume(sequence, [1], (CallDuration(1.0),))
    waiting.delay_s = 200.0
    for sequence in (following, soon, waiting):
        order.add(sequence, bench.now_s)
    assert list(order) == [waiting, soon, following]
