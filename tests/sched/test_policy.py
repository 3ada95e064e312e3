"""Where each simple policy puts a paused context, and what it gives when somebody needs a page."""

import pytest

from jinfercept.kv.page import Residency
from jinfercept.sched.policy import Policy, discard, improved_discard, preserve, swap
from jinfercept.sched.sequence import Sequence, State
from tests.support.scheduler_bench import SchedulerBench, residencies

DIRTY, HOST, MISSING = Residency.DIRTY, Residency.HOST, Residency.MISSING


def bench_of(policy: Policy, num_pages: int = 20, num_host_pages: int = 20, max_num_seqs: int = 4) -> SchedulerBench:
    return SchedulerBench(
        policy, num_pages=num_pages, num_host_pages=num_host_pages, buckets=(16,), max_num_seqs=max_num_seqs
    )


def paused(bench: SchedulerBench, name: str, num_tokens: int) -> Sequence:
    """A sequence that was intercepted after its first token, one plan ago."""
    sequence = bench.paused(name, num_tokens)
    bench.step()
    return sequence


@pytest.mark.parametrize(
    ("policy", "expected"), [(discard, MISSING), (improved_discard, MISSING), (preserve, DIRTY), (swap, HOST)]
)
def test_every_policy_has_its_place_for_a_paused_context(policy: type[Policy], expected: Residency) -> None:
    bench = bench_of(policy())
    assert residencies(paused(bench, "a", 10)) == [expected] * 3
    assert bench.kv.occupancy().free == (17 if expected is DIRTY else 20)
    assert bench.kv.occupancy().host == (3 if expected is HOST else 0)


def test_a_page_that_somebody_else_uses_stays_where_it_is() -> None:
    for policy in (discard, swap):
        bench = bench_of(policy())
        other = bench.prefilled("a1", 10, max_tokens=9)
        sequence = paused(bench, "a2", 10)
        assert sequence.tokens[:10] == other.tokens[:10]
        assert residencies(sequence)[:2] == [DIRTY] * 2
        assert residencies(sequence)[2] is not DIRTY


def test_a_full_host_makes_swap_discard() -> None:
    bench = bench_of(swap(), num_host_pages=2)
    sequence = paused(bench, "a", 14)
    assert residencies(sequence) == [HOST, HOST, MISSING, MISSING]
    assert bench.kv.occupancy().free == 20
    bench.scheduler.resume(sequence, [1, 2])
    bench.drain()
    assert (sequence.usage.copied_in, sequence.usage.recomputed) == (8, 6)


def test_preserve_loses_the_youngest_context_tail_first_and_only_when_nobody_else_could_run() -> None:
    bench = bench_of(preserve(), num_pages=8)
    old, young = paused(bench, "old", 8), paused(bench, "young", 12)
    bench.add("new", 16, max_tokens=2)
    bench.step()
    assert residencies(old) == [DIRTY] * 2
    assert residencies(young) == [DIRTY, DIRTY, MISSING]


def test_preserve_keeps_what_the_others_do_not_need() -> None:
    bench = bench_of(preserve(), num_pages=8)
    sequence = paused(bench, "a", 8)
    other = bench.add("other", 4, max_tokens=10)
    while other.state is not State.FINISHED:
        assert residencies(sequence) == [DIRTY] * 2
        bench.step()
    bench.scheduler.resume(sequence, [1])
    bench.step()
    assert sequence.usage.residency == (8, 0, 0)


def test_preserve_keeps_a_context_whose_call_returned_before_the_next_plan() -> None:
    bench = bench_of(preserve(), max_num_seqs=1)
    old, young = paused(bench, "old", 4), bench.paused("young", 8)
    bench.scheduler.resume(young, [1])
    bench.scheduler.resume(old, [1])
    bench.step()
    assert (old.state, young.state) == (State.RUNNING, State.WAITING)
    assert residencies(young) == [DIRTY] * 2


def test_a_context_is_placed_once_and_stays_there_while_it_waits() -> None:
    for policy, expected in ((preserve, DIRTY), (swap, HOST)):
        bench = bench_of(policy(), max_num_seqs=1)
        sequence = paused(bench, "a", 8)
        bench.add("other", 4, max_tokens=3)
        bench.step()
        bench.scheduler.resume(sequence, [1])
        bench.step()
        assert sequence.state is State.WAITING
        assert residencies(sequence) == [expected] * 2
