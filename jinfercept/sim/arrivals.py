"""Arrivals of requests, at a rate: a Poisson process."""

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sim.workload import Script

MOST_ARRIVALS = 1_000_000
"""Limit on the expected arrivals of a run, since all of them are in memory."""


class Arrival(NamedTuple):
    """A request, and the second at which it arrives, counted from the start of the run."""

    at_s: float
    script: Script


def arrivals(draw: Callable[[], Script], rate: float, duration_s: float, rng: Random) -> list[Arrival]:
    """The arrivals of `duration_s` seconds, in order; there may be none. Raises `ConfigError` as `arrival_times`."""
    # each request is drawn after its time
    return [Arrival(at_s, draw()) for at_s in arrival_times(rate, duration_s, rng)]


def arrival_times(rate: float, duration_s: float, rng: Random) -> Iterator[float]:
    """The seconds below `duration_s` at which requests arrive, at a rate per second, in order, each drawn when it is asked
    for.

    Raises `ConfigError` unless both are above 0 and bring at most `MOST_ARRIVALS`.
    """
    for name, value in (("rate", rate), ("duration_s", duration_s)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} of arrivals is out of range", got=value, fix="a finite number above 0")
    if rate * duration_s > MOST_ARRIVALS:
        got, fix = f"{rate:g} requests/s for {duration_s:g} s", f"at most {MOST_ARRIVALS:,}, rate times duration"
        raise ConfigError("too many requests would arrive", got=got, fix=fix)
    at_s = rng.expovariate(rate)
    while at_s < duration_s:
        yield at_s
        at_s += rng.expovariate(rate)
