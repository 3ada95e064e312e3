"""The saturation point S, at which steps begin to take longer, from measured step times. Plain Python."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jinfercept.errors import ConfigError

FLAT = 1.1
"""Step times do not grow if the largest is less than so many times the smallest: the difference is noise."""


class Saturation(NamedTuple):
    """The fit `T_fwd(x) = max(flat_s, per_query_s · x + fixed_s)`, and S: where the two meet, at a measured x."""

    flat_s: float
    per_query_s: float
    fixed_s: float
    query_tokens: int


def saturation(points: Sequence[tuple[int, float]]) -> Saturation:
    """Fit step times over query tokens, and find where steps begin to take longer.

    Tries every break between the measured x: a constant before it, a line after it, each by least squares; the break whose
    `max` of the two fits all points best wins. A line through all of them is tried too: S is the smallest x then. Errors are
    relative, since the noise of a timing grows with the time. S is the measured x (a bucket) nearest to the meeting point;
    the largest one if the times never grow.

    Args:
        points: (query tokens, seconds), several per x allowed.

    Raises:
        ConfigError: no points, or times that are not positive.
    """
    points = sorted(points)
    buckets = sorted({x for x, _ in points})
    times = [seconds for _, seconds in points]
    if not points or not all(0 < seconds < math.inf for seconds in times):
        raise ConfigError("saturation needs positive times", got=points, fix="measure one bucket at least")
    candidates = [Saturation(_line(points, sloped=False)[1], 0.0, 0.0, buckets[-1])]
    if max(times) < FLAT * min(times) or len(buckets) == 1:
        return candidates[0]
    slope, intercept = _line(points, sloped=True)
    first_s = slope * buckets[0] + intercept
    if slope > 0 and first_s > 0:
        candidates.append(Saturation(first_s, slope, intercept, buckets[0]))
    for first in buckets[1:-1]:
        flat_s = _line([point for point in points if point[0] < first], sloped=False)[1]
        slope, intercept = _line([point for point in points if point[0] >= first], sloped=True)
        if slope > 0:
            meeting = (flat_s - intercept) / slope
            nearest = min(buckets, key=lambda x: abs(x - meeting))
            candidates.append(Saturation(flat_s, slope, intercept, nearest))
    return min(candidates, key=lambda fit: _squared_error(fit, points))


def _line(points: list[tuple[int, float]], *, sloped: bool) -> tuple[float, float]:
    """Slope and intercept of least relative error; a constant has slope 0."""
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    if not sloped:
        return 0.0, mean_s
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (seconds - mean_s) for w, (x, seconds) in zip(weights, points, strict=True)) / spread
    return slope, mean_s - slope * mean_x


def _squared_error(fit: Saturation, points: list[tuple[int, float]]) -> float:
    return sum((max(fit.flat_s, fit.per_query_s * x + fit.fixed_s) / seconds - 1.0) ** 2 for x, seconds in points)
