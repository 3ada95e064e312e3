"""When requests arrive: rates, burstiness, determinism."""

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from jinfercept.errors import ConfigError
from jinfercept.sim.arrivals import (
    Arrival,
    arrivals,
)
from jinfercept.sim.workload import Script, Segment, draw

SCRIPT = Script("chat", 1, (Segment(1, None, 0),))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 3.0])
def test_times_between_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """About 20,000 arrivals: the mean within 5 %, the coefficient of variation within 5 %."""
    drawn = arrivals(lambda: SCRIPT, rate=4.0, duration_s=5000.0, rng=Random(1), burstiness=burstiness)
    gaps = [late.at_s - early.at_s for early, late in pairwise(drawn)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness, rel=0.05)


def test_arrivals_come_in_order_and_within_the_duration() -> None:
    drawn = arrivals(lambda: SCRIPT, rate=10.0, duration_s=20.0, rng=Random(0), burstiness=2.0)
    times = [arrival.at_s for arrival in drawn]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 20.0


def test_the_same_seed_gives_the_same_arrivals() -> None:
    def run(seed: int) -> list[Arrival]:
        rng = Random(seed)
        return arrivals(lambda: draw("mixed", rng), rate=2.0, duration_s=30.0, rng=rng)

    assert run(3) == run(3) != run(4)


def test_every_arrival_draws_once() -> None:
    scripts = iter([SCRIPT._replace(prompt=prompt) for prompt in range(1, 1000)])
    drawn = arrivals(lambda: next(scripts), rate=5.0, duration_s=10.0, rng=Random(0))
    assert [arrival.script.prompt for arrival in drawn] == list(range(1, len(drawn) + 1))


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
