"""However much a policy wants to move, a plan carries no more pages than there is device memory for on their way."""

import pytest

from jinfercept.calls import Call, Result
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.kv.side_pool import SideSizes
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import StepPlan
from jinfercept.sim.workload import Arrival, Script, Segment
from tests.support.fake_engine import (
    POLICIES,
    FakeRunner,
    InstantDispatcher,
    ManualClock,
    make_engine,
    run_all,
    sampled_depths,
)
from tests.support.scenario_run import SIZE, Scenario, ScenarioRun

MOST = 2
PROMPT, PARAMS = 12, SamplingParams(temperature=0.0, max_tokens=9)


def requests(prompt: int = PROMPT) -> list[Request]:
    script = {3: [Call("tool", "")], 6: [Call("tool", "")]}
    return [
        Request(str(number), tuple(range(number, number + prompt)), PARAMS, detector=ScriptedDetector(script))
        for number in range(5)
    ]


def test_the_pages_that_a_plan_offloads_are_numbered_by_their_contexts() -> None:
    runner, clock = FakeRunner(4, (4, 16)), ManualClock()
    dispatcher = InstantDispatcher(clock, lambda call: 0.05, lambda call: Result("", token_ids=(1, 2)))
    engine = make_engine(
        POLICIES["swap"](), num_pages=40, num_host_pages=40, clock=clock, dispatcher=dispatcher, runner=runner
    )
    run_all(engine, requests(3))  # one step computes all prompts: all pause at once
    offloads = [[copy.context for copy in plan.offload] for plan in runner.plans if plan.offload]
    assert all(contexts == sorted(contexts) and contexts[0] == 1 for contexts in offloads)
    assert max(len(set(contexts)) for contexts in offloads) > 1
    assert max(contexts.count(1) for contexts in offloads) > 1


@pytest.mark.parametrize(("policy", "depth"), sampled_depths())
def test_no_plan_of_any_policy_moves_more_than_it_may(policy: str, depth: int) -> None:
    plans, outputs = [], []
    for most in (MOST, None):
        clock, runner = ManualClock(), FakeRunner(4, (4, 16))
        dispatcher = InstantDispatcher(clock, lambda call: 0.05, lambda call: Result("", token_ids=(1, 2)))
        engine = make_engine(
            POLICIES[policy](),
            num_pages=16,
            num_host_pages=40,
            depth=depth,
            clock=clock,
            dispatcher=dispatcher,
            runner=runner,
        )
        engine.scheduler.kv.most_moved_pages = most
        outputs.append({name: out.outputs[0].token_ids for name, out in run_all(engine, requests()).items()})
        plans.append([len(plan.fetch) + len(plan.offload) for plan in runner.plans])
    assert max(plans[0]) <= MOST
    assert outputs[0] == outputs[1]
    if policy == "swap":
        assert max(plans[1]) > MOST
        assert sum(plans[0]) > MOST, "what one plan could not carry is swapped by later ones"


def test_windows_count_as_what_a_plan_moves() -> None:
    """Contexts pause at once, each with a page and a window as large as all that a plan may move: it moves one."""
    script = Script("chat", 1, (Segment(3, 5.0, 6), Segment(4, None, 0)))
    windows = SideSizes(40, 40, 2.0 * SIZE, window=9, slack=SIZE)
    arrivals = tuple(Arrival(0.0, script) for _ in range(6))
    scenario = Scenario(arrivals, "swap", num_pages=24, num_host_pages=40, link_tokens_per_s=1e9, windows=windows)
    moved = dict[int | None, int]()
    for most in (MOST, None):
        plans = list[StepPlan]()
        run = ScenarioRun(scenario, planned=lambda _, plan, plans=plans: plans.append(plan))
        run.scheduler.kv.most_moved_pages = most
        run.run()
        assert not run.failures
        moved[most] = max(
            len({copy.context for copy in plan.window.offload}) for plan in plans if plan.window is not None
        )
    assert moved[MOST] == 1 < moved[None]
