"""Agents within limits: the search."""

from collections.abc import Sequence

import pytest

from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import INTERRUPTED, Report, SimulatedLoad, SweepRun
from studies.agents.within_limits import KEPT_SHARE, MOST_LIVE, most_kept, most_within_limits, next_live
from tests.sim.test_agent_sessions import session


def run_of(trial: int, live: int) -> SweepRun:
    simulation = Simulation(PROFILES["paper-gptj-6b-a100"], "lru")
    return SweepRun(simulation, SimulatedLoad("agents", 0.0, trial, SessionLoad([session()], trial, live)))


@pytest.mark.parametrize("most", [0, 1, 5, 8, 9, 11, 40])
def test_the_search_ends_at_the_most_sessions_that_keep_the_limits(most: int) -> None:
    steps = list[int]()

    def play(runs: Sequence[SweepRun]) -> list[Report]:
        steps.append(len(runs))
        return [{"within_limits_share": KEPT_SHARE if len(run.load.arrivals) <= most else 0.9} for run in runs]

    tried = most_within_limits([1, 2], run_of, play)
    assert [most_kept(shares) for shares in tried.values()] == [most, most]
    assert set(steps) == {2}
    assert len(steps) <= 10


def test_a_share_above_one_that_failed_counts_and_the_search_is_bounded() -> None:
    assert next_live({8: 0.9, 12: 0.97, 18: 0.5}) == 15
    assert most_kept({8: 0.9, 12: 0.97, 18: 0.5}) == 12
    assert next_live({MOST_LIVE: 1.0}) is None
    assert next_live({1: 0.2}) is None


@pytest.mark.parametrize(("error", "raised"), [("ValueError: no", ConfigError), (INTERRUPTED, KeyboardInterrupt)])
def test_a_run_that_failed_ends_the_search(error: str, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        most_within_limits([1], run_of, lambda runs: [{"error": error} for _ in runs])
