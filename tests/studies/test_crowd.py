"""The crowd of the map of where deciding matters: who leaves, how long calls take, and what the rate is."""

from statistics import fmean

import pytest

from studies.questions.crowd import MEAN_CALL_S, MOST_CONTEXT, Crowd

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
