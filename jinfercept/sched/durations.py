"""The distribution of a tool's call durations, from its last calls and from the calls in flight.

A censored duration, of which only a lower bound is known, counts by Kaplan and Meier's estimate. Now is the latest time at
which a call began or ended.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple, Self, final

RING = 256
"""Durations kept per tool."""

MOST_IN_FLIGHT = 2048
"""Calls in flight that a history counts. Beyond them it drops the oldest."""


class Seen(NamedTuple):
    """A duration in seconds, or a lower bound of one (`censored`). Of equal times, durations sort before bounds."""

    duration_s: float
    censored: bool


class SurvivalCurve(NamedTuple):
    """A distribution of durations X, as n atoms in ascending order. Every method costs O(log n)."""

    times: tuple[float, ...]  # of the atoms, in seconds
    mass: tuple[float, ...]  # entry k: the probability of the atoms from the k-th on; n + 1 entries
    moment: tuple[float, ...]  # entry k: the sum of probability · time of these atoms; n + 1 entries
    # the longest duration, if a censored one exceeds it, so that the last atom stands for durations beyond it; else None
    outlasted_s: float | None

    @classmethod
    def from_seen(cls, seen: Sequence[tuple[float, bool]]) -> Self:
        """Kaplan and Meier's estimate from the values of each `Seen`, ascending."""
        times, weights, survival = [], [], 1.0
        for index, (duration_s, censored) in enumerate(seen):
            if not censored:
                weight = survival / (len(seen) - index)
                times.append(duration_s)
                weights.append(weight)
                survival -= weight
        outlasted_s = None
        if seen and seen[-1][1]:
            outlasted_s = times[-1] if times else 0.0
            # the mass beyond the longest duration is put at twice the longest censored one
            times.append(2.0 * seen[-1][0])
            weights.append(survival)
        mass = accumulate(reversed(weights), initial=0.0)
        moment = accumulate((w * x for w, x in zip(reversed(weights), reversed(times), strict=True)), initial=0.0)
        return cls(tuple(times), tuple(mass)[::-1], tuple(moment)[::-1], outlasted_s)

    def left(self, age_s: float) -> float:
        """P(X > age)."""
        return self.mass[bisect_right(self.times, age_s)]

    def remaining_s(self, age_s: float) -> float:
        """E[X - age | X > age], for an age with `left(age) > 0`, or for any age if `outlasted_s` is a number."""
        index = bisect_right(self.times, age_s)
        if self.outlasted_s is None:
            return max(0.0, self.moment[index] / self.mass[index] - age_s)
        tail_s = self.times[-1]
        # A call that has outlasted every known duration may never end. Its expected rest is twice the longest known age, and
        # grows with its own age: the longer such a call has run, the later it is expected, and later than calls that have
        # outlasted less.
        if age_s >= self.outlasted_s:
            return tail_s + age_s - self.outlasted_s
        ends, tail = self.moment[index] - self.moment[-2], self.mass[-2] * (self.outlasted_s + tail_s)
        return (ends + tail) / self.mass[index] - age_s


@final
class DurationHistory:
    """The last `RING` durations of one tool, and its calls in flight."""

    def __init__(self) -> None:
        self._ring: deque[Seen] = deque()
        self._sorted: list[Seen] = []
        self._running: dict[Hashable, float] = {}  # by call key: when it began
        self._now_s = 0.0
        self._curve = SurvivalCurve.from_seen([])
        self._num_changes = 0  # since the curve was made

    def start(self, call_key: Hashable, at_s: float) -> None:
        if len(self._running) == MOST_IN_FLIGHT:
            del self._running[next(iter(self._running))]
        self._running[call_key] = at_s
        self._pass(at_s)

    def end(self, call_key: Hashable, seen: Seen) -> None:
        """Count a call that has ended. One that `start` does not know counts with its duration only."""
        began_s = self._running.pop(call_key, None)
        if len(self._ring) == RING:
            del self._sorted[bisect_left(self._sorted, self._ring.popleft())]
        self._ring.append(seen)
        insort(self._sorted, seen)
        self._pass(self._now_s if began_s is None else began_s + seen.duration_s)

    @property
    def has_ended(self) -> bool:
        return bool(self._ring)

    @property
    def curve(self) -> SurvivalCurve:
        """The distribution, which lags behind by at most one change in 32."""
        if 32 * self._num_changes > len(self._ring):
            self._num_changes = 0
            # a call in flight counts with its age when a call of this tool last began or ended
            ages = [(max(0.0, self._now_s - at_s), True) for at_s in reversed(self._running.values())]
            self._curve = SurvivalCurve.from_seen(sorted([*self._sorted, *ages]))
        return self._curve

    def _pass(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._num_changes += 1


def recent[K, V](entries: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The entry of a key, made if there is none and moved to the end. With over `most` entries the first one is dropped."""
    entry = entries.pop(key, None)
    if entry is None:
        entry = make()
        if len(entries) == most:
            del entries[next(iter(entries))]
    entries[key] = entry
    return entry
