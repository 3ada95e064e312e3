"""When requests arrive: rates, burstiness, determinism."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.errors import ConfigError
from jinfercept.sim.arrivals import (
    Arrival,
    OnOff,
    ParetoSources,
    arrival_times,
    arrivals,
    on_off_times,
    self_similar_times,
)
from jinfercept.sim.workload import Script, Segment, draw

SCRIPT = Script("chat", 1, (Segment(1, None, 0),))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 3.0])
def test_times_between_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """About 20,000 arrivals: the mean within 5 %, the coefficient of variation within 5 %."""
    found = arrivals(lambda: SCRIPT, rate=4.0, duration_s=5000.0, rng=Random(1), burstiness=burstiness)
    gaps = [late.at_s - early.at_s for early, late in pairwise(found)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness, rel=0.05)


def test_arrivals_come_in_order_and_within_the_duration() -> None:
    found = arrivals(lambda: SCRIPT, rate=10.0, duration_s=20.0, rng=Random(0), burstiness=2.0)
    times = [arrival.at_s for arrival in found]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 20.0


def test_the_same_seed_gives_the_same_arrivals() -> None:
    def run(seed: int) -> list[Arrival]:
        rng = Random(seed)
        return arrivals(lambda: draw("mixed", rng), rate=2.0, duration_s=30.0, rng=rng)

    assert run(3) == run(3) != run(4)


def test_every_arrival_draws_once() -> None:
    scripts = iter([SCRIPT._replace(prompt=prompt) for prompt in range(1, 1000)])
    found = arrivals(lambda: next(scripts), rate=5.0, duration_s=10.0, rng=Random(0))
    assert [arrival.script.prompt for arrival in found] == list(range(1, len(found) + 1))


@pytest.mark.parametrize(
    ("rate", "duration_s", "burstiness", "name"),
    [
        (0.0, 1.0, 1.0, "rate"),
        (float("nan"), 1.0, 1.0, "rate"),
        (float("inf"), 1.0, 1.0, "rate"),
        (1.0, -1.0, 1.0, "duration_s"),
        (1.0, float("inf"), 1.0, "duration_s"),
        (1.0, 1.0, 0.0, "burstiness"),
        (1.0, 1.0, 1e9, "burstiness"),
    ],
)
def test_arguments_out_of_range_are_refused(rate: float, duration_s: float, burstiness: float, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of arrivals is out of range"):
        arrivals(lambda: SCRIPT, rate, duration_s, Random(0), burstiness)


def test_more_requests_than_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"too many requests would arrive; got 1e\+06 requests/s for 2 s"):
        arrivals(lambda: SCRIPT, 1e6, 2.0, Random(0))


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
    found = {
        name: [dispersion(times, window_s, duration_s) for window_s in windows_s]
        for name, times in (("self-similar", self_similar), ("on-off", switching), ("poisson", poisson))
    }
    assert all(later > 1.7 * early for early, later in pairwise(found["self-similar"]))
    assert found["on-off"][1] > 3.0
    assert found["on-off"][3] < 1.5 * found["on-off"][2]
    assert found["poisson"] == pytest.approx([1.0] * 4, abs=0.35)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (ParetoSources(0, 1.0, 1.5), "num_sources"),
        (ParetoSources(4, 0.0, 1.5), "least_s"),
        (ParetoSources(4, 1.0, 2.0), "shape"),
    ],
)
def test_sources_out_of_range_are_refused(sources: ParetoSources, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(self_similar_times(1.0, 1.0, Random(0), sources))
    with pytest.raises(ConfigError, match="off_s of arrivals"):
        list(on_off_times(1.0, 1.0, Random(0), OnOff(1.0, -1.0)))
