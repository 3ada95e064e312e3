"""Crowds of clients for the map of where deciding matters: tools of different speed, and clients that never come back."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from statistics import NormalDist, fmean
from typing import NamedTuple

from jinfercept.sim.sweep import SimulatedLoad
from jinfercept.sim.workload import Arrival, LogNormal, Script, Segment, arrivals

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
