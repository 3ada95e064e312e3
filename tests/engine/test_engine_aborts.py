"""Requests that are aborted, and steps that fail: no page lost, nobody else's tokens touched."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from jinfercept.engine.engine import Engine
from jinfercept.events import Finished
from jinfercept.outputs import CompletionOutput
from jinfercept.sched.plan import Masks, StepPlan, StepResult
from jinfercept.sched.policy import Policy, preserve, swap
from jinfercept.sched.sequence import State
from tests.support.engine_requests import DEPTHS, only, request, serve, state_of, steps, until
from tests.support.fake_engine import (
    POLICIES,
    FakeRunner,
    run_all,
    uninterrupted,
)
from tests.support.fake_runner import FakeForward

# -- abort -------------------------------------------------------------------------------------------------------------


def aborted(engine: Engine, name: str) -> CompletionOutput:
    """Abort, and what comes of it in the very next step."""
    engine.abort(name)
    ends = [event for event in engine.step() if isinstance(event, Finished) and event.request_id == name]
    assert state_of(engine, name) is None
    return ends[0].output.outputs[0]


def assert_only_others_own_pages(engine: Engine) -> None:
    occupancy = engine.scheduler.kv.occupancy()
    extents = {extent for sequence in engine.scheduler.unfinished for extent in sequence.context.extents}
    assert occupancy.used + occupancy.paused == sum(len(extent.device or ()) for extent in extents)


@DEPTHS
@pytest.mark.parametrize("policy", [preserve, swap])
@pytest.mark.parametrize("state", ["running", "intercepted", "returned", "preempted", "waiting"])
def test_abort_frees_the_pages_at_once(state: str, policy: Callable[[], Policy], depth: int) -> None:
    latency_s, max_num_seqs = (0.001, 1) if state == "returned" else (1.0, 2)  # it returns while another one runs
    engine = serve(policy(), latency=lambda call: latency_s, num_pages=8, max_num_seqs=max_num_seqs, depth=depth)
    others = [request("other", [1] * 9, 20), request("last", [2] * 5, 15)]
    target = request("a", [3] * 13, 15, {2: [7]} if state in ("intercepted", "returned") else {})
    for each in (others[0], target, others[1]):
        engine.submit(each)
    name = "last" if state == "waiting" else "a"
    for wanted in {
        "running": [State.RUNNING],
        "intercepted": [State.INTERCEPTED],
        "returned": [State.INTERCEPTED, State.WAITING],
        "preempted": [State.RUNNING, State.WAITING],
        "waiting": [State.WAITING],
    }[state]:
        until(engine, lambda wanted=wanted: state_of(engine, name) is wanted)
    assert aborted(engine, name).finish_reason == "abort"
    assert_only_others_own_pages(engine)
    outputs = run_all(engine, [])
    for other in others:
        if other.id in outputs:
            expected = uninterrupted(other.prompt_token_ids, other.params, {}, 32)
            assert outputs[other.id].outputs[0].token_ids == expected
    assert engine.scheduler.kv.check([]) is None


@DEPTHS
def test_random_aborts_leave_the_others_tokens_alone(depth: int) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        policy = rng.choice(list(POLICIES.values()))()
        engine = serve(policy, latency=lambda call: 0.01, num_pages=9, num_host_pages=5, depth=depth)
        script = {2: [4, 5], 6: [6] * 3}
        requests = [request(f"r{i}", [1] * 4 + [i] * (i % 7), 10, script) for i in range(10)]
        for aborted in requests:
            engine.submit(aborted)
        outputs: dict[str, CompletionOutput] = {}
        for _ in range(3000):
            if rng.random() < 0.1:
                engine.abort(f"r{rng.randrange(10)}")
            for event in engine.step():
                if isinstance(event, Finished):
                    outputs[event.request_id] = event.output.outputs[0]
            if not engine.has_work:
                break
        assert len(outputs) == 10
        for aborted in requests:
            expected = uninterrupted(aborted.prompt_token_ids, aborted.params, script, 36)
            got = outputs[aborted.id]
            assert got.token_ids == expected[: len(got.token_ids)]
            assert got.finish_reason == "abort" or got.token_ids == expected
        assert sum(engine.scheduler.kv.occupancy()[1:3]) == 0


def test_closing_gives_everybody_up() -> None:
    engine = serve(preserve(), latency=lambda call: 1.0, num_pages=8, depth=1)
    for name in ("a", "b", "c"):
        engine.submit(request(name, [1, 2], 9, {3: [1]}))
    steps(engine, 3)
    engine.submit(request("still in the inbox", [1]))
    engine.close()
    assert sum(engine.scheduler.kv.occupancy()[1:3]) == 0
    assert not engine.scheduler.unfinished
    assert not engine.has_work


# -- a failed step -----------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 8])
def test_a_failed_step_ends_all_requests_loudly_and_the_next_one_is_served_correctly(depth: int, fail_at: int) -> None:
    runner = FakeRunner(4, (4, 16), fail_at=fail_at)
    engine = serve(swap(), latency=lambda call: 0.01, num_pages=10, num_host_pages=9, depth=depth, runner=runner)
    prompt = [5] * 9
    failed = run_all(engine, [request(f"r{i}", prompt, 9, {2: [1, 2]}) for i in range(3)])
    for done in failed.values():
        assert (done.outputs[0].finish_reason, done.outputs[0].stop_reason) == (
            "error",
            "RuntimeError: the device is gone",
        )
    assert engine.scheduler.kv.occupancy().free == 10
    assert engine.scheduler.kv.occupancy().host == 0
    again = request("r0", prompt, 9, {2: [1, 2]})
    output = only(run_all(engine, [again]))
    assert output.token_ids == uninterrupted(again.prompt_token_ids, again.params, {2: [1, 2]}, 40)


class SamplingFails(FakeRunner):
    """Fails between the phases of the fourth plan: its forward pass was dispatched, its sampling is not."""

    def sample(self, forward: FakeForward, masks: Masks) -> StepResult:
        if len(self.plans) == 4:
            raise RuntimeError("the sampler is gone")
        return super().sample(forward, masks)


class Lost(FakeRunner):
    """Fails when a result is collected, as a real device does."""

    def collect(self, ticket: StepResult) -> StepResult:
        if len(self.plans) == 4:
            self.plans.append(StepPlan(-1, 0))
            raise RuntimeError("the result is lost")
        return ticket


class AnyToken:
    """A grammar that allows every token, as a text that has not begun and as one that has."""

    ended = False

    def constrain(self, end_token_ids: frozenset[int]) -> "AnyToken":
        return self

    def allowed(self) -> list[int]:
        return [0xFFFFFFFF] * 4

    def accept(self, token_id: int) -> None:
        pass


@DEPTHS
@pytest.mark.parametrize("grammar", [None, AnyToken()])
@pytest.mark.parametrize("runner", [SamplingFails, Lost])
def test_a_failure_after_the_forward_pass_is_a_failed_step(
    depth: int, grammar: AnyToken | None, runner: type[FakeRunner]
) -> None:
    engine = serve(preserve(), num_pages=10, depth=depth, runner=runner(4, (4, 16)))
    constrained = replace(request("a", [1] * 9, 9), grammar=grammar)
    outputs = run_all(engine, [constrained, request("b", [2] * 9, 9)])
    reason = "the sampler is gone" if runner is SamplingFails else "the result is lost"
    assert {done.outputs[0].stop_reason for done in outputs.values()} == {f"RuntimeError: {reason}"}
    again = request("a", [1] * 9, 9)
    assert only(run_all(engine, [again])).token_ids == uninterrupted((1,) * 9, again.params, {}, 40)
