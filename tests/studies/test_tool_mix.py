"""Requests of agents: durations as published of real agents, and who calls and who leaves."""

import math
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from jinfercept.sim.workload import Script
from studies.questions.tool_mix import (
    DURATION_QUANTILES,
    WINDOW,
    AgentRequests,
    Clients,
    ToolMix,
    duration_quantile_s,
    time_over,
)


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
