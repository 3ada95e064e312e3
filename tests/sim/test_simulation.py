"""Simulations: what is reported, what a plan costs, what depth, buckets and the engine's own time change, and that the plans
are those of an engine that computes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from jinfercept.engine.meter.ledger import Prices
from jinfercept.errors import ConfigError
from jinfercept.kv.page import PageCopy
from jinfercept.sched.plan import FROM_DEVICE, Chunk, StepPlan
from jinfercept.sched.policies import SETTINGS
from jinfercept.sched.profile import Profile
from jinfercept.sim.simulation import BOUNDS, Simulation
from jinfercept.sim.workload import Arrival, Script, Segment
from tests.support.scenario_run import Scenario, ScenarioRun, scenarios

PROFILE = Profile(
    name="small",
    source="roofline",
    fixed_s=0.010,
    per_query_s=1e-4,
    per_context_s=0.0,
    saturation=32,
    link_out_tokens_per_s=4000.0,
    link_in_tokens_per_s=4000.0,
    link_both_tokens_per_s=4000.0,
    kv_bytes_per_token=1,
)


def arrival(at_s: float, calls: int = 2, call_s: float = 0.3) -> Arrival:
    segments = (*[Segment(5, call_s, 7)] * calls, Segment(5, None, 0))
    return Arrival(at_s, Script("math", 20, segments))


ARRIVALS = [arrival(0.05 * number) for number in range(12)]


def simulation(policy: str = "copy_ahead", **options: object) -> Simulation:
    defaults = {"duration_s": 20.0, "kv_tokens": 160, "host_tokens": 400, "page_size": 4, "max_model_len": 64}
    return Simulation(PROFILE, policy, **(defaults | options))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("policy", [*SETTINGS, *BOUNDS])
@pytest.mark.parametrize("depth", [0, 1])
def test_everybody_is_served_under_every_policy(policy: str, depth: int) -> None:
    report = simulation(policy, depth=depth).run(ARRIVALS)
    assert report["requests"] == 12
    assert report["unfinished"] == 0
    assert report["normalized_latency_ms_per_token"]["mean"] >= 10.0
    assert policy == "bound" or 0.0 <= report["waste_fraction"] <= 1.0


def test_a_lonely_request_takes_its_steps() -> None:
    report = simulation("preserve").run([arrival(1.0, calls=1)])
    steps = 0.012 + 4 * 0.0101 + 0.0108 + 4 * 0.0101  # its prompt, decodes, eight tokens after the call, decodes
    assert report["iterations"] == 10
    assert report["step_s"]["measured"] == pytest.approx(steps)
    assert report["step_s"]["priced"] == pytest.approx(steps)
    assert report["slowness"] == pytest.approx({"1": 1.0, "8": 1.0, "20": 1.0})
    assert report["normalized_latency_paper_ms_per_token"]["mean"] == pytest.approx(1e3 * steps / 17)
    assert report["simulated_s"] == pytest.approx(1.0 + steps + 0.3)


def test_a_step_costs_what_its_bucket_costs() -> None:
    steps = ((8, 0.020), (32, 0.050))
    sizes, seconds = zip(*steps, strict=True)
    machine = replace(PROFILE, bucket_tokens=sizes, bucket_s=seconds)
    report = replace(simulation("preserve"), profile=machine, buckets=sizes).run([arrival(0.0, calls=1)])
    assert report["step_s"]["measured"] == pytest.approx(0.050 + 9 * 0.020)  # the prompt, and all the rest


def test_planning_ahead_costs_a_sample_and_hides_the_engines_own_time() -> None:
    alone = [arrival(0.0, calls=1)]
    steps = [simulation("preserve", depth=depth).run(alone)["iterations"] for depth in (0, 1)]
    assert steps[1] - steps[0] == 1  # the sample behind the call; the last one is never planned
    slow = [simulation("preserve", depth=depth, host_s=0.005).run(alone)["simulated_s"] for depth in (0, 1)]
    quick = [simulation("preserve", depth=depth).run(alone)["simulated_s"] for depth in (0, 1)]
    assert slow[0] - quick[0] == pytest.approx(10 * 0.005)
    assert slow[1] - quick[1] < 4 * 0.005


def test_what_is_unfinished_when_the_time_is_over_is_counted() -> None:
    report = simulation(duration_s=1.0).run([arrival(0.0), arrival(0.0, call_s=10.0)])
    assert report["unfinished"] == 1
    assert report["simulated_s"] >= 2.0


@pytest.mark.parametrize("policy", ["discard", "preserve", "swap", "min_waste", "lru", "lru_host", "copy_ahead"])
def test_a_run_ends_with_those_who_come_back(policy: str) -> None:
    """Clients that never come back are in no latency, and what was generated for them is not useful."""
    lost = [arrival(0.02 * number, calls=1, call_s=math.inf) for number in range(3)]
    report = simulation(policy, kv_tokens=320).run([*lost, *ARRIVALS[:4]])
    assert (report["requests"], report["abandoned"], report["unfinished"]) == (7, 3, 0)
    assert report["useful_tokens"] == 4 * 15
    assert report["simulated_s"] < 5.0
    assert report["latency_s"]["mean"] < 5.0


def test_whole_prompts_need_a_step_that_holds_the_longest_sequence() -> None:
    with pytest.raises(ConfigError, match="chunked_prefill"):
        simulation("discard", buckets=(8, 32), chunked_prefill=False)
    assert simulation("discard", buckets=(8, 32)).chunks()
    assert not simulation("discard", buckets=(8, 64)).chunks()
    assert not simulation("discard").chunks()
    assert simulation("discard", chunked_prefill=True).chunks()
    assert not simulation("copy_ahead", chunked_prefill=False).chunks()


def test_transfers_hide_behind_compute_unless_they_are_synchronous() -> None:
    copies = tuple(PageCopy(slot, slot) for slot in range(20))  # 20 ms of the link
    plan = StepPlan(0, 8, (Chunk(0, 0, (1,) * 8, (), None),), offload=copies)
    assert Prices(PROFILE, 4, synchronous=False)(plan) == pytest.approx((0.0108, 0.0092))
    assert Prices(PROFILE, 4, synchronous=True)(plan) == pytest.approx((0.0108, 0.020))
    assert Prices(PROFILE, 4, synchronous=True, free_transfers=True)(plan) == pytest.approx((0.0108, 0.0))
    assert Prices(PROFILE, 4, synchronous=False)(StepPlan(0, 0, offload=copies)) == pytest.approx((0.0, 0.020))


def without_tokens(run: ScenarioRun) -> list[StepPlan]:
    """The plans of a run, with every token that has a value set to 0."""
    return [
        replace(
            plan,
            chunks=tuple(
                chunk._replace(tokens=tuple(token if token == FROM_DEVICE else 0 for token in chunk.tokens))
                for chunk in plan.chunks
            ),
        )
        for plan in (planned.plan for planned in run.plans)
    ]


def check(scenario: Scenario) -> None:
    computed, simulated = ScenarioRun(scenario).run(), ScenarioRun(scenario, fake=False).run()
    assert without_tokens(simulated) == without_tokens(computed)
    assert simulated.clock.time == computed.clock.time
    assert simulated.scheduler.counters == computed.scheduler.counters
    assert simulated.outputs.keys() == computed.outputs.keys()
    for number, output in computed.outputs.items():
        assert simulated.outputs[number].metrics == output.metrics


@settings(max_examples=25)
@given(scenarios())
def test_a_simulation_makes_the_plans_of_an_engine_that_computes(scenario: Scenario) -> None:
    check(scenario)
