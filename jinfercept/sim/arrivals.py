"""Arrival times of requests: a renewal process with a rate and a burstiness, an on-off process, and a self-similar one."""

import heapq
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple, Protocol

from jinfercept.errors import ConfigError
from jinfercept.request import Request
from jinfercept.sim.workload import Script

MOST_ARRIVALS = 1_000_000
"""Limit on the expected arrivals of a run, since all of them are in memory."""


class Arrival(NamedTuple):
    """A request and the second at which it arrives, counted from the start of the run."""

    at_s: float
    script: Script


class RequestArrival(Protocol):
    """An arrival that makes its own request, whose calls are markup in the tokens that it is forced to generate."""

    @property
    def at_s(self) -> float:
        """Its second, counted from the start of the run."""
        ...

    def request(self, number: int) -> Request:
        """The request, whose id is a number."""
        ...


def arrivals(
    draw: Callable[[], Script], rate: float, duration_s: float, rng: Random, burstiness: float = 1.0
) -> list[Arrival]:
    """The arrivals of `duration_s` seconds, in order. There may be none.

    Args:
        draw: makes the next request; called once for each arrival, in order, after its time is drawn.
        rate, duration_s, rng, burstiness: see `arrival_times`.

    Raises:
        ConfigError: an argument is out of its range.
    """
    return [Arrival(at_s, draw()) for at_s in arrival_times(rate, duration_s, rng, burstiness)]


def arrival_times(rate: float, duration_s: float, rng: Random, burstiness: float = 1.0) -> Iterator[float]:
    """The seconds below `duration_s` at which requests arrive, in order, each drawn when it is asked for.

    The times between arrivals are Gamma distributed with mean 1 / rate; the first one begins at 0, where it is as if a request
    had just arrived: bursts bring about `(burstiness² − 1) / 2` requests more than `rate · duration_s`.

    Args:
        rate: requests per second, over 0.
        duration_s: seconds in which requests arrive, over 0; with `rate` they bring at most `MOST_ARRIVALS`.
        rng: its state decides the times.
        burstiness: coefficient of variation of the times between arrivals, from 0.01 to 100: 1 is Poisson, less is more
            even, more comes in bursts.

    Raises:
        ConfigError: an argument is out of its range.
    """
    _check_positive(rate=rate, duration_s=duration_s)
    _check_count(rate, duration_s)
    if not 0.01 <= burstiness <= 100:
        raise ConfigError("burstiness of arrivals is out of range", got=burstiness, fix="0.01 to 100; 1 is Poisson")
    shape = burstiness**-2
    at_s = rng.gammavariate(shape, 1 / (shape * rate))
    while at_s < duration_s:
        yield at_s
        at_s += rng.gammavariate(shape, 1 / (shape * rate))


# -- processes that switch -----------------------------------------------------------------------------------------------


class OnOff(NamedTuple):
    """A source that sends Poisson arrivals in its on periods, and none in its off periods. Exponential periods of either kind.

    Attributes:
        on_s, off_s: mean seconds of a period.
    """

    on_s: float
    off_s: float


def on_off_times(rate: float, duration_s: float, rng: Random, periods: OnOff) -> Iterator[float]:
    """The seconds below `duration_s` at which requests of an on-off source arrive (an interrupted Poisson process).

    In on periods requests arrive at `rate · (on_s + off_s) / on_s` per second. At 0 the process is in equilibrium, so that it
    brings `rate · duration_s` requests on average, however short the run is.

    Args:
        rate, duration_s, rng: see `arrival_times`.
        periods: of the source, over 0.

    Raises:
        ConfigError: an argument is out of its range.
    """
    _check_positive(rate=rate, duration_s=duration_s, **periods._asdict())
    _check_count(rate, duration_s)
    on_s, off_s = periods
    peak = rate * (on_s + off_s) / on_s
    on, ends_s = rng.random() < on_s / (on_s + off_s), 0.0
    while ends_s < duration_s:
        began_s = ends_s
        ends_s += rng.expovariate(1.0 / (on_s if on else off_s))
        if on:
            yield from _poisson(peak, began_s, min(ends_s, duration_s), rng)
        on = not on


class ParetoSources(NamedTuple):
    """On-off sources whose periods are Pareto distributed, all with the same numbers.

    Attributes:
        num_sources: at least 1.
        least_s: the shortest period; the mean is `least_s · shape / (shape - 1)`.
        shape: tail exponent of the periods, over 1 and below 2, where their variance is infinite: the sum of the sources then
            has a Hurst parameter of `(3 - shape) / 2`.
    """

    num_sources: int
    least_s: float
    shape: float


def self_similar_times(rate: float, duration_s: float, rng: Random, sources: ParetoSources) -> Iterator[float]:
    """The seconds below `duration_s` at which requests of superposed Pareto on-off sources arrive, in order.

    Such a sum is self-similar over long windows (Willinger, Taqqu, Sherman, Wilson: "Self-Similarity Through High-Variability",
    SIGCOMM 1995): the variance of the arrivals in a window, over their mean, grows with the window, where it is 1 for Poisson
    arrivals. Sources are on half of the time, and then send Poisson arrivals at `2 · rate / num_sources`. At 0 the process is
    in equilibrium: it brings `rate · duration_s` requests on average, but a run may differ much from the average.

    Args:
        rate, duration_s, rng: see `arrival_times`.
        sources: their number and their periods.

    Raises:
        ConfigError: an argument is out of its range.
    """
    _check_positive(rate=rate, duration_s=duration_s, least_s=sources.least_s)
    _check_count(rate, duration_s)
    if not 1 < sources.shape < 2:
        fix = "between 1 and 2; less is more bursty over long windows"
        raise ConfigError("shape of arrivals is out of range", got=sources.shape, fix=fix)
    if sources.num_sources < 1:
        raise ConfigError("num_sources of arrivals is out of range", got=sources.num_sources, fix="at least 1")
    peak = 2.0 * rate / sources.num_sources
    seeds = [rng.getrandbits(64) for _ in range(sources.num_sources)]
    yield from heapq.merge(*(_pareto_times(peak, duration_s, Random(seed), sources) for seed in seeds))


def _pareto_times(peak: float, duration_s: float, rng: Random, sources: ParetoSources) -> Iterator[float]:
    on, began_s = rng.random() < 0.5, 0.0
    ends_s = _rest_s(rng, sources)
    while began_s < duration_s:
        if on:
            yield from _poisson(peak, began_s, min(ends_s, duration_s), rng)
        on, began_s = not on, ends_s
        ends_s += sources.least_s * rng.paretovariate(sources.shape)


def _rest_s(rng: Random, sources: ParetoSources) -> float:
    """Rest of the period in which 0 lies: its density is the chance that a period is longer, over the mean period."""
    if rng.random() < (sources.shape - 1.0) / sources.shape:
        return sources.least_s * rng.random()
    return sources.least_s * rng.paretovariate(sources.shape - 1.0)


def _poisson(rate: float, from_s: float, until_s: float, rng: Random) -> Iterator[float]:
    at_s = from_s + rng.expovariate(rate)
    while at_s < until_s:
        yield at_s
        at_s += rng.expovariate(rate)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} of arrivals is out of range", got=value, fix="a finite number above 0")


def _check_count(rate: float, duration_s: float) -> None:
    if rate * duration_s > MOST_ARRIVALS:
        got, fix = f"{rate:g} requests/s for {duration_s:g} s", f"at most {MOST_ARRIVALS:,}, rate times duration"
        raise ConfigError("too many requests would arrive", got=got, fix=fix)
