"""Values by size, as Prometheus counts them. Grows in O(log n); knows no names."""

from bisect import bisect_left
from itertools import accumulate
from typing import final


@final
class Histogram:
    """How many values were at most so large.

    Args:
        bounds: ascending; what is larger than the last is counted behind it.

    Attributes:
        total: sum of the values.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """A value, so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Values."""
        return sum(self._counts)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, values that are at most so large), the last bound being infinite."""
        return list(zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True))
