"""A simulation makes the plans of an engine that computes: same arrivals, calls and clock; only the tokens differ."""

from dataclasses import replace

from hypothesis import given, settings

from jinfercept.sched.plan import FROM_DEVICE, StepPlan
from tests.support.scheduler_scenarios import Scenario, ScenarioRun, scenarios


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
