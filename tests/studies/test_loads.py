"""Loads of the studies: as many arrivals in bursts, and rates that fill the machine."""

import math

import pytest

from jinfercept.sched.named_profiles import load_profile
from studies.questions.kind_loads import KINDS, full_rate, kind_load
from studies.questions.variety import ARRIVALS, BURSTS, LEAVING, RATE, VarietyLoad

GPTJ = load_profile("paper-gptj-6b-a100")


@pytest.mark.parametrize("scenario", BURSTS, ids=list(ARRIVALS))
def test_bursts_bring_as_many_requests_and_the_same_ones(scenario: VarietyLoad) -> None:
    load, calm = scenario.load(30.0, 0), VarietyLoad().load(30.0, 0)
    assert len(load.arrivals) == pytest.approx(30 * RATE, rel=0.021)
    both = min(len(load.arrivals), len(calm.arrivals))
    assert [arrival.script for arrival in load.arrivals[:both]] == [arrival.script for arrival in calm.arrivals[:both]]


def test_who_leaves_changes_no_arrival() -> None:
    stays, leaves = (scenario.load(10.0, 3).arrivals for scenario in (LEAVING[0], LEAVING[-1]))
    assert [stay.at_s for stay in stays] == [leave.at_s for leave in leaves]
    lost = [any(segment.call_s == math.inf for segment in arrival.script.segments) for arrival in leaves]
    assert sum(lost) / len(lost) == pytest.approx(LEAVING[-1].clients.leaving, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_machine_is_filled_by_its_compute_or_by_its_memory(kind: str) -> None:
    """A larger pool raises the rate until compute is what fills the machine."""
    small, large, larger = (full_rate(kind, GPTJ, tokens) for tokens in (1000, 10_000_000, 20_000_000))
    assert small < large == larger
    step_s = GPTJ.step_s(GPTJ.saturation, 0)
    assert large * step_s / GPTJ.saturation * 400 < 1.0


def test_a_load_is_a_share_of_the_full_rate() -> None:
    load = kind_load("math", 0.5, GPTJ, 53_000, 200.0, 0)
    assert load.rate == pytest.approx(full_rate("math", GPTJ, 53_000) / 2, abs=0.001)
    assert len(load.arrivals) == pytest.approx(200 * load.rate, rel=0.15)
    assert {arrival.script.kind for arrival in load.arrivals} == {"math"}
