"""Fits the terms of a step's price to measured steps. Plain Python; measures nothing itself.

The price is a base per bucket, and a slope in the context tokens that the rows read. Slopes come from steps of the same bucket
only, and are medians, so that neither the buckets' own times nor a disturbed measurement moves them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations, groupby
from statistics import median_low
from typing import NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sched.saturation import Saturation, saturation

LEAST_SHARE = 0.1
"""Share of a bucket's fastest step that its base has at least."""


class MeasuredStep(NamedTuple):
    """One kind of step, and its measured seconds.

    Attributes:
        bucket: query tokens of the executable, all of them used.
        context_tokens: tokens that its rows read.
        depth: tokens before its one chunk; None: a step of decoding rows, and of a prompt's first chunk if they do not fill it.
    """

    bucket: int
    context_tokens: int
    depth: int | None
    seconds: float


class StepFit(NamedTuple):
    """`bucket_s[bucket] + per_context_s · context tokens + per_pair_s · (query tokens · depth)`, and the line
    through the buckets, with the saturation point S."""

    bucket_tokens: tuple[int, ...]
    bucket_s: tuple[float, ...]
    per_context_s: float
    per_pair_s: float
    line: Saturation


def fit_steps(steps: Iterable[MeasuredStep]) -> StepFit:
    """Fit the terms. Raises `ConfigError` if no step decodes."""
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
    """`copy_s + tokens / tokens_per_s`, the seconds of a transfer one way."""

    tokens_per_s: float
    copy_s: float


def fit_link(transfers: Sequence[tuple[int, float]]) -> LinkFit:
    """Fit transfers of several sizes: the median slope between them. With one size, all of its seconds are the rate's.

    Args:
        transfers: (tokens, seconds), one at least, all above 0.
    """
    slope = _median_slope(
        (second[0] - first[0], second[1] - first[1], first[1] + second[1])
        for first, second in combinations(sorted(transfers), 2)
    )
    best = min(seconds / tokens for tokens, seconds in transfers)
    slope = min(slope, best) or best
    return LinkFit(1.0 / slope, median_low([max(0.0, seconds - tokens * slope) for tokens, seconds in transfers]))


def _base_s(steps: Sequence[MeasuredStep], context_s: float) -> float:
    """Seconds of a bucket without its contexts: the median, at least `LEAST_SHARE` of its fastest step."""
    rest = sorted(step.seconds - context_s * step.context_tokens for step in steps)
    return max(rest[(len(rest) - 1) // 2], LEAST_SHARE * min(step.seconds for step in steps))


def _pairs(steps: Sequence[MeasuredStep]) -> Iterator[tuple[MeasuredStep, MeasuredStep]]:
    """Every two steps of the same bucket, in order."""
    for _, group in groupby(steps, lambda step: step.bucket):
        yield from combinations(group, 2)


def _median_slope(pairs: Iterable[tuple[int, float, float]]) -> float:
    """The weighted median of growth over distance; 0 if there are no pairs, or if it is negative.

    A pair's weight is distance over level: noise grows with the level.

    Args:
        pairs: (distance, growth, level).
    """
    slopes = sorted((growth / distance, distance / level) for distance, growth, level in pairs if distance > 0)
    half = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        half -= weight
        if half <= 0:
            return max(0.0, slope)
    return 0.0
