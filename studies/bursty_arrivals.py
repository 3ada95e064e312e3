"""Arrivals that come in bursts: an on-off process, and a self-similar one."""

import heapq
from collections.abc import Iterator
from random import Random
from typing import NamedTuple


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
        rate, duration_s, rng: see `sim.arrivals.arrival_times`.
        periods: of the source, over 0.
    """
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
        rate, duration_s, rng: see `sim.arrivals.arrival_times`.
        sources: their number and their periods.
    """
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
