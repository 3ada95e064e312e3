"""Fits the terms of a step's price to measured steps. Plain Python; measures nothing itself.

The price is a base per bucket, and a slope in the context tokens that the rows read. Slopes compare steps of the same bucket
only, and are medians, so that neither the buckets' own times nor a disturbed measurement moves them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations, groupby
from statistics import median_low
from typing import NamedTuple

from jinfercept.errors import ConfigError

LEAST_SHARE = 0.1
"""The base of a bucket is at least this share of its fastest step."""


FLAT = 1.1
"""Step times do not grow if the largest is less than this many times the smallest: the difference is noise."""


class Saturation(NamedTuple):
    """The fit `T_fwd(x) = max(flat_s, per_query_s · x + fixed_s)`, and S, the measured x where the two meet."""

    flat_s: float
    per_query_s: float
    fixed_s: float
    query_tokens: int


def saturation(points: Sequence[tuple[int, float]]) -> Saturation:
    """Fit step times over query tokens, given as (query tokens, seconds), and find where steps begin to take longer.

    Tries every break between the measured x: a constant before it, a line after it, each by least squares. The break whose
    `max` of the two fits all points best wins. A line through all points is tried too: S is the smallest x then. S is the
    measured x (a bucket) nearest to the meeting point, or the largest one if the times never grow. Raises `ConfigError`
    without points, or for times that are not positive.
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
    # the least relative error, since the noise of a timing grows with the time
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


class MeasuredStep(NamedTuple):
    """One kind of step, and its measured seconds."""

    bucket: int  # query tokens of the executable, all of them used
    context_tokens: int  # that its rows read
    # tokens before its one chunk; None: a step of decoding rows, filled up by a prompt's first chunk
    depth: int | None
    seconds: float


class StepFit(NamedTuple):
    """`bucket_s[bucket] + per_context_s · context tokens + per_pair_s · (query tokens · depth)`, and the line through the
    buckets."""

    bucket_tokens: tuple[int, ...]
    bucket_s: tuple[float, ...]
    per_context_s: float
    per_pair_s: float
    line: Saturation


def fit_steps(steps: Iterable[MeasuredStep]) -> StepFit:
    """Fit the terms of the price. Raises `ConfigError` if no step decodes."""
    steps = sorted(steps, key=lambda step: (step.bucket, step.context_tokens))
    decoding = [step for step in steps if step.depth is None]
    if not decoding:
        raise ConfigError("fitting needs decode steps", got=f"{len(steps)} steps", fix="measure some")
    context_s = _median_slope(
        (second.context_tokens - first.context_tokens, second.seconds - first.seconds, first.seconds + second.seconds)
        for first, second in _pairs(decoding)
    )
    pair_s = _median_slope(
        (
            second.bucket * ((second.depth or 0) - (first.depth or 0)),
            second.seconds - first.seconds - context_s * (second.context_tokens - first.context_tokens),
            first.seconds + second.seconds,
        )
        for first, second in _pairs([step for step in steps if step.depth is not None])
    )
    bases = {bucket: _base_s(list(group), context_s) for bucket, group in groupby(decoding, lambda step: step.bucket)}
    bucket_s = tuple(accumulate(bases.values(), max))
    line = saturation(list(zip(bases, bucket_s, strict=True)))
    return StepFit(tuple(bases), bucket_s, context_s, pair_s, line)


class LinkFit(NamedTuple):
    """The seconds of a transfer one way: `copy_s + tokens / tokens_per_s`."""

    tokens_per_s: float
    copy_s: float


def fit_link(transfers: Sequence[tuple[int, float]]) -> LinkFit:
    """The median slope between transfers, given as (tokens, seconds) above 0. With one size, all seconds are the rate's."""
    slope = _median_slope(
        (second[0] - first[0], second[1] - first[1], first[1] + second[1])
        for first, second in combinations(sorted(transfers), 2)
    )
    best = min(seconds / tokens for tokens, seconds in transfers)
    slope = min(slope, best) or best
    return LinkFit(1.0 / slope, median_low([max(0.0, seconds - tokens * slope) for tokens, seconds in transfers]))


def _base_s(steps: Sequence[MeasuredStep], context_s: float) -> float:
    rest = sorted(step.seconds - context_s * step.context_tokens for step in steps)
    return max(rest[(len(rest) - 1) // 2], LEAST_SHARE * min(step.seconds for step in steps))


def _pairs(steps: Sequence[MeasuredStep]) -> Iterator[tuple[MeasuredStep, MeasuredStep]]:
    for _, group in groupby(steps, lambda step: step.bucket):
        yield from combinations(group, 2)


def _median_slope(pairs: Iterable[tuple[int, float, float]]) -> float:
    # noise grows with the level, so that a pair's weight is its distance over its level
    slopes = sorted((growth / distance, distance / level) for distance, growth, level in pairs if distance > 0)
    half = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        half -= weight
        if half <= 0:
            return max(0.0, slope)
    return 0.0
