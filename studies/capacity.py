"""The load that a policy carries at a given latency, from a curve of latency against load."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
"""(requests per second, latency), by ascending rate."""

LATENCY_FACTOR = 5.0
"""Curves are compared at this multiple of the low-load latency."""


class Capacity(NamedTuple):
    """The load at which a latency is reached.

    Attributes:
        rate: requests per second.
        side: "": between two points of the curve; "<": at most its first point; ">": beyond its last point.
    """

    rate: float
    side: str = ""

    def __str__(self) -> str:
        return f"{self.side}{self.rate:.2f}"


def latency_threshold(curves: Iterable[Points]) -> float:
    """`LATENCY_FACTOR` times the low-load latency, which is the least of all curves; the same for every curve."""
    return LATENCY_FACTOR * min(latency for points in curves for _, latency in points)


def capacity(points: Points, latency: float) -> Capacity | None:
    """The load at which a curve first reaches a latency, interpolated in its logarithm; None for no points."""
    if not points:
        return None
    before = None
    for rate, value in points:
        if value >= latency:
            if before is None:
                return Capacity(rate, "<")
            share = math.log(latency / before[1]) / math.log(value / before[1])
            return Capacity(before[0] + share * (rate - before[0]))
        before = (rate, value)
    return Capacity(points[-1][0], ">")


def capacity_ratio(load: Capacity | None, base: Capacity | None) -> str:
    """A load over that of `base`, as text, with `>` or `<` where one of them is only a bound; `-` if unknown."""
    if load is None or base is None:
        return "-"
    sides = {load.side, {"<": ">", ">": "<", "": ""}[base.side]} - {""}
    if len(sides) > 1:
        return "-"
    return f"{''.join(sides)}{load.rate / base.rate:.2f}"
