"""Who runs, who waits and what moves, plan by plan, on a runner that checks where every token's KV is."""

from dataclasses import replace

import pytest

from jinfercept.errors import ConfigError
from jinfercept.kv.manager import KVManager
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.plan import FROM_DEVICE, StepPlan
from jinfercept.sched.policy import Policy, discard, improved_discard, preserve, swap
from jinfercept.sched.scheduler import SchedulerLimits, plan_scheduler
from jinfercept.sched.sequence import State
from tests.support.fake_engine import VOCAB
from tests.support.scheduler_bench import CopyEverything, SchedulerBench, names

# -- order -------------------------------------------------------------------------------------------------------------


def test_the_first_come_is_the_first_served() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=2)
    for name in ("a", "b", "c", "d"):
        bench.add(name, 4, max_tokens=2)
    bench.step()
    assert names(bench.scheduler.running) == ["a", "b"]
    assert names(bench.scheduler.waiting) == ["c", "d"]
    bench.drain()
    ends = [chunk.slot for plan in bench.runner.plans for chunk in plan.chunks]
    assert len(ends) == 8


def test_a_return_keeps_its_place_by_original_arrival() -> None:
    bench = SchedulerBench(improved_discard(), max_num_seqs=1)
    first = bench.paused("a", 4)
    for name in ("b", "c"):
        bench.add(name, 4)
    bench.scheduler.resume(first, [1, 2])
    assert names(bench.scheduler.waiting) == ["a", "b", "c"]


def test_discard_sends_a_return_to_the_tail() -> None:
    bench = SchedulerBench(discard(), max_num_seqs=1)
    first = bench.paused("a", 4)
    for name in ("b", "c"):
        bench.add(name, 4)
    bench.scheduler.resume(first, [1, 2])
    assert names(bench.scheduler.waiting) == ["b", "c", "a"]


def test_the_head_of_the_line_is_not_overtaken_by_smaller_ones() -> None:
    bench = SchedulerBench(preserve(), num_pages=10)
    bench.prefilled("runs", 20, max_tokens=12)
    bench.add("large", 36, max_tokens=2)
    small = bench.add("small", 2, max_tokens=2)
    while bench.scheduler.waiting and bench.scheduler.waiting[0].id == "large":
        assert small.generated == 0
        bench.step()
    bench.drain()
    assert small.state is State.FINISHED


# -- the bucket --------------------------------------------------------------------------------------------------------


def test_decoding_comes_first_and_a_chunk_fills_the_bucket() -> None:
    bench = SchedulerBench(preserve())
    for name in ("a", "b"):
        bench.prefilled(name, 3)
    bench.add("long", 40)
    plan = bench.step()
    assert [len(chunk.tokens) for chunk in plan.chunks] == [1, 1, 14]
    assert (plan.num_tokens, plan.bucket) == (16, 16)
    assert [chunk.sample is not None for chunk in plan.chunks] == [True, True, False]


def test_the_smallest_bucket_that_holds_the_tokens_is_used() -> None:
    bench = SchedulerBench(preserve(), buckets=(1, 4, 16))
    bench.add("a", 3)
    assert bench.step().bucket == 4
    assert bench.step().bucket == 1
    bench.add("b", 5)
    assert bench.step().bucket == 16


def test_a_long_context_that_returns_leaves_a_token_to_everybody_younger() -> None:
    bench = SchedulerBench(improved_discard(), buckets=(4,), max_num_seqs=3)
    long = bench.paused("long", 30)
    for name in ("b", "c"):
        bench.prefilled(name, 2, max_tokens=20)
    bench.scheduler.resume(long, [1])
    bench.step()
    assert names(bench.scheduler.running) == ["long", "b", "c"]
    for plan in bench.steps(4):
        assert [len(chunk.tokens) for chunk in plan.chunks] == [1, 1, 2]


# -- depth 1 -----------------------------------------------------------------------------------------------------------


def test_at_depth_one_a_plan_goes_on_from_a_token_that_only_the_device_knows() -> None:
    bench = SchedulerBench(preserve(), depth=1)
    sequence = bench.add("a", 3, max_tokens=4)
    plans = bench.steps(4)
    assert [chunk.tokens for plan in plans for chunk in plan.chunks][1:] == [(FROM_DEVICE,)] * 3
    assert [chunk.start + len(chunk.tokens) for plan in plans for chunk in plan.chunks if chunk.sample] == [3, 4, 5, 6]
    assert sequence.generated == 3
    bench.drain()
    assert bench.num_wasted == 0


def test_a_call_detected_late_wastes_one_sample_and_keeps_its_own_tokens_kv() -> None:
    bench = SchedulerBench(preserve(), depth=1)
    sequence = bench.prefilled("a", 3)
    bench.scheduler.intercept(sequence, 0.0)
    num_tokens = len(sequence.tokens)
    assert not bench.step()
    assert (bench.num_wasted, len(sequence.tokens), sequence.pending) == (1, num_tokens, 0)
    bench.scheduler.resume(sequence, [1, 2, 3])
    (chunk,) = bench.step().chunks
    assert (chunk.start, chunk.tokens) == (num_tokens, (1, 2, 3))
    bench.drain()
    assert (bench.num_wasted, sequence.usage.recomputed) == (1, 0)


def test_a_preempted_sequence_waits_for_its_sample_in_flight() -> None:
    bench = SchedulerBench(improved_discard(), num_pages=6, depth=1)
    old = bench.add("old", 8, max_tokens=10)
    young = bench.add("young", 7, max_tokens=10)
    bench.drain()
    assert young.preemptions
    assert (old.generated, young.generated, bench.num_wasted) == (10, 10, 0)


# -- plans -------------------------------------------------------------------------------------------------------------


def workload(policy: Policy, depth: int) -> list[StepPlan]:
    bench = SchedulerBench(policy, num_pages=9, num_host_pages=4, max_num_seqs=3, depth=depth, link_tokens_per_s=10.0)
    sequences = [bench.add(f"{index}", 3 + 5 * index % 20, max_tokens=6) for index in range(8)]
    for number in range(60):
        bench.step()
        running = [sequence for sequence in bench.scheduler.running if sequence.generated]
        if number % 3 == 0 and running:
            bench.scheduler.intercept(running[number % len(running)], 0.0)
        if number % 5 == 0 and bench.scheduler.intercepted:
            bench.scheduler.resume(next(iter(bench.scheduler.intercepted.values())), [number % VOCAB, 1])
    for sequence in list(bench.scheduler.intercepted.values()):
        bench.scheduler.resume(sequence, [2])
    bench.drain()
    assert all(sequence.state is State.FINISHED for sequence in sequences)
    return bench.runner.plans


def test_the_same_events_make_the_same_plans() -> None:
    for policy in (preserve, swap, discard, improved_discard, CopyEverything):
        for depth in (0, 1):
            assert workload(policy(), depth) == workload(policy(), depth)


def test_finishing_frees_the_pages_in_every_state_at_once() -> None:
    for state in State:
        bench = SchedulerBench(preserve(), num_pages=8, max_num_seqs=1)
        bench.prefilled("other", 3) if state is State.WAITING else None
        sequence = bench.add("a", 9) if state is State.WAITING else bench.prefilled("a", 9)
        if state is State.INTERCEPTED:
            bench.scheduler.intercept(sequence, 0.0)
        if state is State.FINISHED:
            bench.scheduler.finish(sequence, 0.0)
        assert sequence.state is state
        bench.scheduler.finish(sequence, 0.0)
        assert sequence.state is State.FINISHED
        assert bench.kv.num_paused == 0
        assert bench.kv.occupancy().used == (1 if state is State.WAITING else 0)
        assert len(bench.scheduler.unfinished) == (1 if state is State.WAITING else 0)


PROFILE = replace(PROFILES["paper-gptj-6b-a100"], saturation=32)


@pytest.mark.parametrize(("buckets", "saturation"), [((8, 32, 64), 32), ((8, 24, 64), 24), ((48, 64), 48)])
def test_the_saturation_point_is_the_largest_bucket_up_to_the_profiles_or_the_smallest(
    buckets: tuple[int, ...], saturation: int
) -> None:
    build = plan_scheduler(PROFILE, ElapsedEstimator(), "min_waste", SchedulerLimits(buckets, 4, 64), 4)
    assert build.inputs.saturation == saturation


def test_prefill_is_chunked_as_the_policy_was_published_where_the_largest_step_holds_the_longest_sequence() -> None:
    limits = SchedulerLimits((8, 64), 4, 64)
    assert not limits.chunks("discard")
    assert limits.chunks("copy_ahead")
    assert limits.chunks(preserve())
    assert limits._replace(max_model_len=65).chunks("discard")
    with pytest.raises(ConfigError, match="chunked_prefill"):
        limits._replace(max_model_len=65, chunked_prefill=False).chunks("discard")


def test_a_policy_of_ones_own_is_taken_as_it_is() -> None:
    policy = preserve()
    build = plan_scheduler(PROFILE, ElapsedEstimator(), policy, SchedulerLimits((8, 64), 4, 64), 4)
    assert build.policy is policy
    assert build.build(KVManager(20, 0, 4)).protects_paused == policy.protects_paused
