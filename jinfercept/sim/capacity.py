"""How much load a policy carries at a given latency, from a curve of latency against load. Pure numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
"""(requests per second, latency), by ascending rate."""

LATENCY_FACTOR = 5.0
"""Times the low-load latency: where curves are compared."""


class Capacity(NamedTuple):
    """The load at which a latency is reached.

    Attributes:
        rate: requests per second.
        side: "" if it was found between two points; "<": reached at the first one already; ">": not even at the last.
    """

    rate: float
    side: str = ""

    def __str__(self) -> str:
        return f"{self.side}{self.rate:.2f}"


def latency_threshold(curves: Iterable[Points]) -> float:
    """`LATENCY_FACTOR` the low-load latency, which is the least on any of the curves: one latency for all of them."""
    return LATENCY_FACTOR * min(latency for points in curves for _, latency in points)


def capacity(points: Points, latency: float) -> Capacity | None:
    """Where a curve first reaches a latency, its logarithm taken as straight between points; None if there are none."""
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
    """How many times the load of `base`, with `>` or `<` where one of them is only known to be beyond a point."""
    if load is None or base is None:
        return "-"
    sides = {load.side, {"<": ">", ">": "<", "": ""}[base.side]} - {""}
    if len(sides) > 1:
        return "-"
    return f"{''.join(sides)}{load.rate / base.rate:.2f}"
