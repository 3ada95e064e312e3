"""What the default policy keeps that `lru_host` would lose, and that it is the same where there is nothing to keep."""

from jinfercept.kv.page import Residency
from jinfercept.sched.lru import CopyAhead, LeastRecentlyUsed
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence
from jinfercept.sim.simulation import OracleEstimator
from tests.support.scheduler_bench import SchedulerBench, residencies


def bench_of(
    num_pages: int, num_host_pages: int, link_tokens_per_s: float = 1e9
) -> tuple[SchedulerBench, OracleEstimator]:
    estimator = OracleEstimator()
    bench = SchedulerBench(
        CopyAhead(), num_pages=num_pages, num_host_pages=num_host_pages, link_tokens_per_s=link_tokens_per_s
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


def test_without_a_host_the_same_pages_are_lost_as_under_lru_host() -> None:
    lost = list[list[list[int]]]()
    for policy in (CopyAhead(), LeastRecentlyUsed(writes_through=True)):
        estimator = OracleEstimator()
        bench = SchedulerBench(policy, num_pages=40, num_host_pages=0)
        contexts = [paused(bench, estimator, name, 60, call_s) for name, call_s in (("soon", 1000.0), ("late", 2000.0))]
        bench.prefilled("new", 60)
        lost.append([missing(sequence) for sequence in contexts])
    assert lost[0] == lost[1]
    assert lost[0][0]


def test_a_full_host_loses_the_context_that_is_paused_longest_however_long_calls_are_expected_to_last() -> None:
    bench, estimator = bench_of(num_pages=20, num_host_pages=16)
    first = paused(bench, estimator, "first", 56, 100.0)
    second = paused(bench, estimator, "second", 56, 1e9)
    bench.prefilled("new", 60)
    assert missing(first)
    assert not missing(second)


def test_full_pages_of_requests_that_run_are_copied_once_another_one_has_paused() -> None:
    bench, estimator = bench_of(num_pages=40, num_host_pages=60)
    sequences = [bench.prefilled(name, 24, max_tokens=30) for name in ("first", "second", "third")]
    bench.steps(4)
    for sequence in sequences:
        assert Residency.CLEAN not in residencies(sequence), "no other context wants its slots"
    paused(bench, estimator, "paused", 24, 1e9)
    bench.steps(4)
    for sequence in sequences:
        assert set(residencies(sequence)[:6]) == {Residency.CLEAN}


def test_a_copy_takes_the_host_slot_of_one_that_is_on_the_device_still_before_a_page_is_lost() -> None:
    bench, estimator = bench_of(num_pages=32, num_host_pages=15)
    first = paused(bench, estimator, "first", 56, 100.0)
    second = paused(bench, estimator, "second", 56, 1e9)
    bench.steps(4)
    bench.prefilled("new", 40)
    for sequence in (first, second):
        assert not missing(sequence)
    assert Residency.HOST in residencies(first)
    assert Residency.HOST not in residencies(second)


def test_a_copy_ahead_takes_the_host_slot_of_another_context_only_while_a_request_waits() -> None:
    bench, estimator = bench_of(num_pages=40, num_host_pages=14)
    first = paused(bench, estimator, "first", 56, 1e9)
    bench.steps(4)
    second = paused(bench, estimator, "second", 56, 100.0)
    bench.steps(4)
    assert residencies(first).count(Residency.CLEAN) == 14
    assert Residency.CLEAN not in residencies(second)
    waits = paused(bench, estimator, "waits", 8, 1.0)
    for number in range(4):
        bench.prefilled(f"runs {number}", 4, max_tokens=50)
    bench.scheduler.resume(waits, [1], (CallDuration(1.0),))
    bench.steps(4)
    assert Residency.CLEAN in residencies(second)
    assert Residency.CLEAN not in residencies(first)


def test_clean_pages_of_a_context_that_is_needed_sooner_go_before_any_page_is_lost() -> None:
    bench, estimator = bench_of(num_pages=32, num_host_pages=40, link_tokens_per_s=4.0)
    soon = paused(bench, estimator, "soon", 56, 1000.0)
    bench.steps(40)
    assert Residency.DIRTY not in residencies(soon)
    late = paused(bench, estimator, "late", 56, 2000.0)
    bench.prefilled("new", 40)
    assert not missing(soon)
    assert not missing(late)
