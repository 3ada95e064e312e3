"""Loads of the studies: arrivals in bursts, crowds whose clients leave, tools of many durations, rates that fill a machine."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.arrivals import arrival_times
from jinfercept.sim.workload import Script
from studies.bursty_arrivals import OnOff, ParetoSources, on_off_times, self_similar_times
from studies.questions.crowd import MEAN_CALL_S, MOST_CONTEXT, Crowd
from studies.questions.kind_loads import KINDS, full_rate, kind_load
from studies.questions.tool_mix import (
    DURATION_QUANTILES,
    WINDOW,
    AgentRequests,
    Clients,
    ToolMix,
    duration_quantile_s,
    time_over,
)
from studies.questions.variety import ARRIVALS, BURSTS, LEAVING, RATE, VarietyLoad


def dispersion(times: Iterable[float], window_s: float, duration_s: float) -> float:
    """Variance over mean of the arrivals in windows; 1 for Poisson arrivals, whatever the window."""
    counted = Counter(int(at_s / window_s) for at_s in times)
    counts = [counted[number] for number in range(int(duration_s / window_s))]
    return pvariance(counts) / fmean(counts)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.floats(1.0, 8.0), st.floats(0.5, 5.0), st.floats(0.5, 20.0), st.integers(0, 1000))
def test_on_off_arrivals_have_the_mean_rate(rate: float, on_s: float, off_s: float, seed: int) -> None:
    """In 400 cycles, and in many runs that are shorter than a cycle, since the process begins in equilibrium."""
    rng, cycle_s = Random(seed), on_s + off_s
    times = list(on_off_times(rate, 400 * cycle_s, rng, OnOff(on_s, off_s)))
    assert len(times) == pytest.approx(400 * rate * cycle_s, rel=0.25)
    assert times == sorted(times)
    short = sum(1 for _ in range(800) for _ in on_off_times(rate, cycle_s / 2, rng, OnOff(on_s, off_s)))
    assert short == pytest.approx(400 * rate * cycle_s, rel=0.3)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.floats(2.0, 8.0), st.integers(1, 16), st.floats(1.3, 1.9), st.integers(0, 1000))
def test_self_similar_arrivals_have_the_mean_rate_in_the_mean_of_runs(
    rate: float, count: int, shape: float, seed: int
) -> None:
    rng, sources = Random(seed), ParetoSources(count, 1.0, shape)
    runs = [list(self_similar_times(rate, 10.0, rng, sources)) for _ in range(300)]
    assert fmean(map(len, runs)) == pytest.approx(10.0 * rate, rel=0.2)
    assert all(run == sorted(run) and (not run or run[-1] < 10.0) for run in runs)


def test_the_variance_of_self_similar_arrivals_grows_with_the_window() -> None:
    """Over the mean it grows without bound; that of an on-off process ends at about its periods, that of Poisson stays 1."""
    duration_s, windows_s = 20_000.0, (1.0, 8.0, 64.0, 512.0)
    self_similar = list(self_similar_times(4.0, duration_s, Random(0), ParetoSources(8, 1.0, 1.4)))
    switching = list(on_off_times(4.0, duration_s, Random(0), OnOff(2.0, 2.0)))
    poisson = list(arrival_times(4.0, duration_s, Random(0)))
    dispersions = {
        name: [dispersion(times, window_s, duration_s) for window_s in windows_s]
        for name, times in (("self-similar", self_similar), ("on-off", switching), ("poisson", poisson))
    }
    assert all(later > 1.7 * early for early, later in pairwise(dispersions["self-similar"]))
    assert dispersions["on-off"][1] > 3.0
    assert dispersions["on-off"][3] < 1.5 * dispersions["on-off"][2]
    assert dispersions["poisson"] == pytest.approx([1.0] * 4, abs=0.35)


def drawn(count: int, calls: int = 60_000) -> list[tuple[str, float]]:
    mix, rng = ToolMix(count), Random(0)
    return [mix.call(rng) for _ in range(calls)]


@pytest.mark.parametrize("count", [1, 16, 300])
def test_calls_last_as_long_as_those_of_real_agents(count: int) -> None:
    """TraceLab: 61 % under 1 s; the 4 % over a minute hold 85 % of the time."""
    seconds = [call_s for _, call_s in drawn(count)]
    assert fmean(call_s < 1.0 for call_s in seconds) == pytest.approx(0.61, abs=0.01)
    assert fmean(call_s > 60.0 for call_s in seconds) == pytest.approx(0.04, abs=0.004)
    assert sum(call_s for call_s in seconds if call_s > 60.0) / sum(seconds) == pytest.approx(0.85, abs=0.02)
    assert 1e-3 <= min(seconds) < 2e-3
    assert 900.0 < max(seconds) <= 1e3


def test_the_quantiles_are_those_that_are_stated_and_ascend() -> None:
    assert [duration_quantile_s(share) for share, _ in DURATION_QUANTILES] == pytest.approx(
        [s for _, s in DURATION_QUANTILES]
    )
    spread = [duration_quantile_s(number / 200) for number in range(201)]
    assert all(early < late for early, late in pairwise(spread))
    assert time_over(60.0) == pytest.approx(0.847, abs=0.001)
    assert (time_over(0.0), time_over(1e3)) == (pytest.approx(1.0), 0.0)


def test_a_tool_tells_much_about_its_calls_and_not_all() -> None:
    by_tool: dict[str, list[float]] = {}
    for tool, call_s in drawn(300):
        by_tool.setdefault(tool, []).append(math.log10(call_s))
    assert len(by_tool) == 300
    within = fmean(pstdev(decades) for decades in by_tool.values() if len(decades) > 50)
    total = pstdev([decade for decades in by_tool.values() for decade in decades])
    assert 0.2 < within / total < 0.5


def scripts(calling: float, leaving: float, count: int = 400) -> list[Script]:
    agents, rng = AgentRequests(ToolMix(50), Clients(calling, leaving)), Random(1)
    return [agents.draw(rng) for _ in range(count)]


def leaves(script: Script) -> bool:
    return any(segment.call_s == math.inf for segment in script.segments)


def test_shares_of_those_who_call_and_of_those_who_leave() -> None:
    half = scripts(0.5, 0.3)
    assert fmean(script.calls > 0 for script in half) == pytest.approx(0.5, abs=0.06)
    callers = [script for script in half if script.calls]
    assert fmean(map(leaves, callers)) == pytest.approx(0.3, abs=0.08)
    assert not any(map(leaves, scripts(1.0, 0.0)))
    assert not any(script.calls for script in scripts(0.0, 1.0))


def test_the_same_requests_are_drawn_whatever_the_shares_are() -> None:
    for calling, leaving in zip(scripts(1.0, 0.0), scripts(0.0, 0.0), strict=True):
        assert (calling.prompt, calling.generated) == (leaving.prompt, leaving.generated)
    for kept, left in zip(scripts(1.0, 0.0), scripts(1.0, 0.9), strict=True):
        assert [segment._replace(call_s=None) for segment in kept.segments] == [
            s._replace(call_s=None) for s in left.segments
        ]


def test_requests_fit_their_window_and_every_segment_has_a_token() -> None:
    for script in scripts(1.0, 0.0):
        assert script.context <= WINDOW
        assert all(segment.decode >= 1 for segment in script.segments)
        assert [segment.call_s is None for segment in script.segments] == [False] * script.calls + [True]


DURATION_S = 400.0


def calls_s(crowd: Crowd) -> list[float]:
    """Seconds of the calls that return."""
    scripts = [script for _, script in crowd.load(DURATION_S, 0).arrivals]
    durations_s = [segment.call_s for script in scripts for segment in script.segments if segment.call_s is not None]
    return [seconds for seconds in durations_s if seconds < DURATION_S]


@pytest.mark.parametrize("returning", [1.0, 0.3])
def test_as_many_clients_return_as_asked_for(returning: float) -> None:
    crowd = Crowd(1000.0, returning, 0.0)
    scripts = [script for _, script in crowd.load(DURATION_S, 0).arrivals]
    leave = [max(segment.call_s or 0.0 for segment in script.segments) > 2 * DURATION_S for script in scripts]
    assert fmean(leave) == pytest.approx(1 - returning, abs=0.03)
    assert all(script.context <= MOST_CONTEXT for script in scripts)
    assert all(
        script.segments[-2].call_s == 4 * DURATION_S for script, left in zip(scripts, leave, strict=True) if left
    )


@pytest.mark.parametrize("spread", [0.0, 1.0, 1.5])
def test_calls_last_as_long_on_average_whatever_their_spread(spread: float) -> None:
    assert fmean(calls_s(Crowd(1000.0, 1.0, spread))) == pytest.approx(MEAN_CALL_S, rel=0.1)


def test_a_crowd_that_leaves_asks_for_as_many_tokens_per_second() -> None:
    for returning in (1.0, 0.3):
        load = Crowd(500.0, returning, 0.0).load(DURATION_S, 0)
        tokens_per_s = sum(script.generated for _, script in load.arrivals) / DURATION_S
        assert tokens_per_s == pytest.approx(500.0, rel=0.1)


def test_the_same_seed_is_the_same_crowd_and_another_spread_the_same_lengths() -> None:
    first, again, other = (Crowd(300.0, 0.7, spread).load(30.0, 5).arrivals for spread in (1.0, 1.0, 2.0))
    assert first == again
    assert [script.prompt for _, script in first] == [script.prompt for _, script in other]


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
