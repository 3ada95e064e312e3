"""A histogram with fixed bounds, cumulative as in Prometheus. Adding takes O(log bounds)."""

from bisect import bisect_left
from itertools import accumulate
from typing import final


@final
class Histogram:
    """Counts values by upper bound.

    Args:
        bounds: upper bounds, ascending; a last one, infinite, is implied.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, number of values up to it) pairs; the last bound is infinite."""
        return list(zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True))
