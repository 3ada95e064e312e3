"""Loads of the questions: one kind of InferCept's requests, mixes of many tools, bursts of arrivals, and crowds of clients.

Calls of agents with many tools last from a millisecond to a thousand seconds. The distribution of all calls is fitted to what
is published of real agents (the TraceLab trace of 432,000 tool calls): 61 % of the calls last under 1 s, and the 4 % over a
minute hold 85 % of the time that calls take. It is log-uniform between the points of `DURATION_QUANTILES`. The point at 10 s
is the fit: with it the calls over a minute hold 84.7 %. Numbers of tokens are not published with it; those here are an
assumption: conversations that grow to a window of 2,048 tokens.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from random import Random
from statistics import NormalDist, fmean
from typing import NamedTuple, final

from jinfercept.sched.profile import Profile
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.sweep import SimulatedLoad
from jinfercept.sim.workload import MIXED_WEIGHTS, LogNormal, Script, Segment, draw

KINDS: Sequence[str] = tuple(MIXED_WEIGHTS)
MIXED = "mixed"
NUM_DRAWS = 400


def full_rate(kind: str, profile: Profile, kv_tokens: int) -> float:
    """Requests per second that would fill the machine if their calls took no time: its compute or its device pool.

    In saturated steps, each of S query tokens in T_fwd(S): a request computes every token of its context once, and holds its
    context for a step per generated token.

    Args:
        kind: of the requests, or `MIXED`.
        kv_tokens: of the device pool.
    """
    rng, step_s = Random(0), profile.step_s(profile.saturation, 0)
    scripts = [draw(kind, rng) for _ in range(NUM_DRAWS)]
    compute_s = fmean(script.context for script in scripts) / profile.saturation * step_s
    held_s = fmean(map(_held_tokens, scripts)) * step_s / kv_tokens
    return 1.0 / max(compute_s, held_s)


def _held_tokens(script: Script) -> float:
    """Context tokens, summed over the steps that generate."""
    context, held_tokens = script.prompt, 0.0
    for segment in script.segments:
        held_tokens += segment.decode * (context + segment.decode / 2)
        context += segment.decode + segment.returned
    return held_tokens


def kind_load(
    kind: str, share: float, profile: Profile, kv_tokens: int, duration_s: float, seed: int
) -> SimulatedLoad[Sequence[Arrival]]:
    """Poisson arrivals of requests of a kind at a share of `full_rate`."""
    rng, rate = Random(seed), round(share * full_rate(kind, profile, kv_tokens), 3)
    return SimulatedLoad(kind, rate, seed, arrivals(lambda: draw(kind, rng), rate, duration_s, rng))


DURATION_QUANTILES: Sequence[tuple[float, float]] = ((0.0, 1e-3), (0.61, 1.0), (0.92, 10.0), (0.96, 60.0), (1.0, 1e3))
"""(share of the calls, seconds that they last at most)."""

TOOL_CORRELATION = 0.9
"""Correlation of the normal scores of two calls of one tool: its calls differ by a factor, not by decades. An assumption."""

WINDOW = 2048
"""Most tokens of a request."""

_NORMAL = NormalDist()
_PROMPT = LogNormal(250, 0.7, 0, 20, 1024)
_DECODE = LogNormal(35, 0, 0.7, 4, 300)
_RETURNED = LogNormal(40, 0, 1.0, 1, 500)
_CALLS = LogNormal(4.0, 0.7, 0, 1, 20)


def duration_quantile_s(share: float) -> float:
    """Seconds that a share of all calls last at most.

    Args:
        share: from 0 to 1.
    """
    points = DURATION_QUANTILES
    index = min(max(1, bisect_left(points, (share,))), len(points) - 1)
    (low, low_s), (high, high_s) = points[index - 1], points[index]
    return low_s * (high_s / low_s) ** ((share - low) / (high - low))


def time_over(limit_s: float) -> float:
    """Share of the time of all calls that belongs to calls of `limit_s` seconds or more, from 1 ms to 1,000 s."""
    total = over = 0.0
    for (low, low_s), (high, high_s) in pairwise(DURATION_QUANTILES):
        each = (high - low) / math.log(high_s / low_s)
        total += each * (high_s - low_s)
        over += each * max(0.0, high_s - max(low_s, limit_s))
    return over / total


@final
class ToolMix:
    """So many tools, each with its part of `DURATION_QUANTILES`, as wide as its share of the calls.

    Args:
        count: tools, at least 1. The n-th most popular one gets a share of the calls that is proportional to 1 / n.
        seed: decides which tools are slow.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        names = [f"tool{number}" for number in range(count)]
        weights = dict(zip(names, (1.0 / (rank + 1) for rank in range(count)), strict=True))
        Random(seed).shuffle(names)
        self._names, total = names, sum(weights.values())
        self._ends = list(accumulate(weights[name] / total for name in names))

    def call(self, rng: Random) -> tuple[str, float]:
        """A tool, and the seconds of a call of it."""
        place = rng.random()
        score = _NORMAL.inv_cdf(min(max(place, 1e-12), 1.0 - 1e-12))
        score = math.sqrt(TOOL_CORRELATION) * score + math.sqrt(1.0 - TOOL_CORRELATION) * rng.gauss()
        tool = self._names[min(bisect_right(self._ends, place), len(self._names) - 1)]
        return tool, duration_quantile_s(_NORMAL.cdf(score))


class Clients(NamedTuple):
    """Who sends requests.

    Attributes:
        calling: share of the requests that call tools; the others generate as much at once.
        leaving: share of the calling ones whose client never comes back from one of its calls.
    """

    calling: float
    leaving: float


@dataclass(frozen=True)
class AgentRequests:
    """Draws requests of agents.

    Attributes:
        tools: that they call.
        clients: who they are. A seed draws the same requests whatever the shares are; they decide which calls remain.
    """

    tools: ToolMix
    clients: Clients

    def draw(self, rng: Random) -> Script:
        """The next request, of kind "agent"."""
        calls_tools, leaves, where = (rng.random() for _ in range(3))
        prompt = round(_PROMPT.at(rng.gauss(), 0.0))
        room, segments = WINDOW - prompt, list[Segment]()
        for _ in range(round(_CALLS.at(rng.gauss(), 0.0))):
            decode, returned = (round(lengths.at(0.0, rng.gauss())) for lengths in (_DECODE, _RETURNED))
            tool, call_s = self.tools.call(rng)
            if decode + returned < room - 1:
                segments.append(Segment(decode, call_s, returned, tool))
                room -= decode + returned
        segments.append(Segment(min(round(_DECODE.at(0.0, rng.gauss())), room), None, 0))
        if calls_tools >= self.clients.calling:
            return Script("agent", prompt, (Segment(sum(segment.decode for segment in segments), None, 0),))
        if leaves < self.clients.leaving and len(segments) > 1:
            index = int(where * (len(segments) - 1))
            segments[index] = segments[index]._replace(call_s=math.inf)
        return Script("agent", prompt, tuple(segments))


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


NUM_TOOLS = 8
MEAN_CALL_S = 8.0
MOST_CONTEXT = 2048
PROMPT = LogNormal(400.0, 0.6, 0.0, 40, 1200)
CALLS = LogNormal(3.0, 0.6, 0.0, 1, 8)
DECODE = LogNormal(40.0, 0.3, 0.5, 4, 200)
RETURNED = LogNormal(80.0, 0.3, 0.7, 4, 400)
LAST_DECODE = LogNormal(100.0, 0.6, 0.0, 10, 300)


class Crowd(NamedTuple):
    """Who comes.

    Attributes:
        decoded_per_s: tokens per second that the requests of clients who return ask for, to set the rate of arrivals.
        returning: share of the clients that stay to the end; the others leave in one of their calls, which never returns.
        spread: standard deviation of the logarithm of the seconds of calls, half of its square between tools and half within.
    """

    decoded_per_s: float
    returning: float
    spread: float

    def load(self, duration_s: float, seed: int) -> SimulatedLoad[Sequence[Arrival]]:
        """The arrivals of `duration_s` seconds; the same ones for the same seed."""
        rng = Random(seed)
        rate = self.decoded_per_s / _mean_decoded(self.returning)
        name = f"{self.returning:.0%} return, spread {self.spread:g}"
        requests = arrivals(lambda: self._script(rng, 4.0 * duration_s), rate, duration_s, rng)
        return SimulatedLoad(name, rate, seed, requests)

    def _script(self, rng: Random, never_s: float) -> Script:
        """A request. A call that never returns lasts `never_s`; what would have come after it is left out but for a token."""
        tool = rng.randrange(NUM_TOOLS)
        prompt, turns, last = _lengths(rng)
        segments = [Segment(decode, self._call_s(tool, rng), returned) for decode, returned in turns]
        if (leaves := _leaves_at(rng, len(turns), self.returning)) is not None:
            segments, last = [*segments[:leaves], segments[leaves]._replace(call_s=never_s)], 1
        return Script(f"tool {tool}", prompt, (*segments, Segment(last, None, 0)))

    def _call_s(self, tool: int, rng: Random) -> float:
        """Log-normal seconds whose mean over tools and calls is `MEAN_CALL_S`, whatever the spread."""
        half = self.spread / math.sqrt(2)
        paces = [math.exp(half * pace) for pace in _paces()]
        return MEAN_CALL_S * paces[tool] / fmean(paces) * math.exp(half * rng.gauss() - half * half / 2)


def _leaves_at(rng: Random, num_calls: int, returning: float) -> int | None:
    """The call in which the client leaves; None if it stays."""
    leaves, at = rng.random() >= returning, rng.randrange(num_calls)
    return at if leaves else None


def _lengths(rng: Random) -> tuple[int, list[tuple[int, int]], int]:
    """Tokens of the prompt, decoded and returned ones of each turn, and those decoded at the end, within the window."""
    wordy = rng.gauss()
    prompt = round(PROMPT.at(rng.gauss(), 0.0))
    calls = [(round(DECODE.at(wordy, rng.gauss())), round(RETURNED.at(wordy, rng.gauss()))) for _ in range(_calls(rng))]
    last = round(LAST_DECODE.at(wordy, 0.0))
    room = MOST_CONTEXT - prompt - last
    turns = list(_within(calls, room)) or [(1, 1)]
    return prompt, turns, last


def _calls(rng: Random) -> int:
    return round(CALLS.at(rng.gauss(), 0.0))


def _within(turns: list[tuple[int, int]], room: int) -> Iterator[tuple[int, int]]:
    """The turns that fit into so many tokens."""
    for decode, returned in turns:
        room -= decode + returned
        if room < 0:
            return
        yield decode, returned


def _paces() -> list[float]:
    """A normal number for each tool: the middles of equally likely parts."""
    return [NormalDist().inv_cdf((tool + 0.5) / NUM_TOOLS) for tool in range(NUM_TOOLS)]


@cache
def _mean_decoded(returning: float) -> float:
    """Mean tokens that a request generates, from 2,000 draws."""
    rng = Random(0)
    crowd = Crowd(1.0, returning, 0.0)
    return fmean(crowd._script(rng, 1.0).generated for _ in range(2000))
