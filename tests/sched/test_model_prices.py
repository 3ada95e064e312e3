"""Prices of models of other kinds: contexts with states of recurrent layers, and steps that read the experts in use."""

from typing import Any

import numpy as np
import pytest

from jinfercept.kv.page import Residency
from jinfercept.kv.side_pool import SideSizes
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.min_waste import MinWaste
from jinfercept.sched.named_profiles import LLAMA_3_8B, ProfiledExperts, ProfiledModel, experts_in_use, roofline
from jinfercept.sched.policy import Policy, preserve
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sched.waste import chunked_discard_waste, preserve_waste
from tests.support.fake_engine import POLICIES
from tests.support.scheduler_bench import SIZE, SchedulerBench

BUCKET = 16


def bench_of(policy: Policy, num_states: int = 3) -> SchedulerBench:
    """A scheduler of a model with recurrent layers."""
    sizes: dict[str, Any] = {"num_pages": 20, "num_host_pages": 0, "max_num_seqs": 2, "buckets": (BUCKET,)}
    return SchedulerBench(policy, states=SideSizes(num_states, 0, 10), **sizes)


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


QWEN3_30B_A3B = ProfiledModel(
    "qwen3-30b-a3b",
    30.532e9,
    num_layers=48,
    num_kv_heads=4,
    head_dim=128,
    hidden_size=2048,
    experts=ProfiledExperts(48 * 128 * 3 * 2048 * 768, num_experts=128, per_token=8),
)


@pytest.mark.parametrize(("count", "per_token", "num_tokens"), [(8, 2, 1), (8, 2, 3), (128, 8, 16), (32, 4, 64)])
def test_experts_in_use_are_as_many_as_even_draws_use(count: int, per_token: int, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    ranks = rng.random((2000, num_tokens, count)).argsort(axis=-1)[..., :per_token]
    used = [len(np.unique(draw)) for draw in ranks]
    spread = np.std(used) / len(used) ** 0.5
    assert experts_in_use(count, per_token, num_tokens) == pytest.approx(np.mean(used), abs=4 * spread + 1e-9)


def test_a_step_costs_the_experts_that_it_reads_until_it_costs_what_it_computes() -> None:
    profile = roofline(QWEN3_30B_A3B, "H100")
    assert QWEN3_30B_A3B.active_params == pytest.approx(3.35e9, rel=0.01)  # as its card says
    least, few, many = (profile.step_s(tokens, 0) for tokens in (1, 16, 1024))
    assert least == profile.flat_s
    assert few / least == pytest.approx(QWEN3_30B_A3B.read_params(16) / QWEN3_30B_A3B.active_params)
    assert many == pytest.approx(QWEN3_30B_A3B.params / QWEN3_30B_A3B.active_params * least, rel=0.01)
    assert profile.step_s(8192, 0) > 1.5 * many  # more than the largest bucket: several steps
    assert profile.saturation > 5 * roofline(LLAMA_3_8B, "H100").saturation
    assert not roofline(LLAMA_3_8B, "H100").bucket_tokens
