"""What policies see of contexts with states of recurrent layers: whole contexts, with the memory of their states."""

from typing import Any

import pytest

from jinfercept.kv.page import Residency
from jinfercept.kv.states import StateSizes
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.min_waste import MinWaste
from jinfercept.sched.policy import Policy, preserve
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.waste import chunked_discard_waste, preserve_waste
from tests.support.fake_engine import POLICIES
from tests.support.scheduler_bench import SIZE, SchedulerBench

BUCKET = 16


def bench_of(policy: Policy, num_states: int = 3) -> SchedulerBench:
    """A scheduler of a model with recurrent layers."""
    sizes: dict[str, Any] = {"num_pages": 20, "num_host_pages": 0, "max_num_seqs": 2, "buckets": (BUCKET,)}
    return SchedulerBench(policy, states=StateSizes(num_states, 0, 10), **sizes)


def paused(bench: SchedulerBench, name: str) -> Sequence:
    sequence = bench.prefilled(name, 9, max_tokens=30)
    bench.scheduler.intercept(sequence, bench.now_s)
    return sequence


def has_state(sequence: Sequence) -> bool:
    return sequence.context.state_tokens > 0


def test_a_state_is_held_and_is_there_while_a_context_is_recomputed() -> None:
    assert chunked_discard_waste(40, 0, 10, lambda tokens: 0.5 * tokens, state=10) == pytest.approx(20 * (20 + 10))
    policy = MinWaste(ElapsedEstimator(), lambda tokens: 0.1 * tokens, BUCKET, SIZE, 0.0)
    bench = bench_of(policy)
    sequence = paused(bench, "a")
    [verdict] = policy._verdicts(bench.now_s + 2.0)
    assert verdict.tokens == 9 + 10
    assert verdict.preserve == preserve_waste(2.0, 19)
    assert sequence.state is State.INTERCEPTED


@pytest.mark.parametrize("name", POLICIES)
def test_a_sequence_that_starts_takes_the_state_of_a_paused_one_where_none_is_free(name: str) -> None:
    bench = bench_of(POLICIES[name]())
    contexts = [paused(bench, name) for name in "abc"]
    started = bench.add("new", 9)
    for _ in range(3):
        bench.step()
    assert has_state(started)
    lost = [sequence for sequence in contexts if not has_state(sequence)]
    assert lost or name == "preserve"
    for sequence in lost:
        assert {run.residency for run in sequence.context.runs()} <= {Residency.MISSING}


def test_paused_states_are_protected_while_a_sequence_runs() -> None:
    bench = bench_of(preserve(), num_states=2)
    bench.add("runs", 9, max_tokens=30)
    bench.step()
    context = paused(bench, "paused")
    waits = bench.add("waits", 9)
    bench.step()
    assert waits.state is State.WAITING
    assert has_state(context)
