"""Processes whose arrivals come in bursts."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from statistics import fmean, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.sim.arrivals import arrival_times
from studies.bursty_arrivals import OnOff, ParetoSources, on_off_times, self_similar_times


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
