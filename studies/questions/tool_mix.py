"""Requests of agents with many tools, whose calls last from a millisecond to a thousand seconds.

The distribution of all calls is fitted to what is published of real agents (the TraceLab trace of 432,000 tool calls): 61 % of
the calls last under 1 s, and the 4 % over a minute hold 85 % of the time that calls take. It is log-uniform between the points
of `DURATION_QUANTILES`. The point at 10 s is the fit: with it the calls over a minute hold 84.7 %. Numbers of tokens are not
published with it; those here are an assumption: conversations that grow to a window of 2,048 tokens.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random
from statistics import NormalDist
from typing import NamedTuple, final

from jinfercept.sim.workload import LogNormal, Script, Segment

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
