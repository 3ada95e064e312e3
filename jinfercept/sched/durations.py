"""How long the calls of one tool last: the last few durations, the calls still in flight, and the distribution they make.

Censored durations, of which only a lower bound is known, enter by Kaplan and Meier's estimate. Knows no costs and no clock:
the present is the latest time at which a call began or ended.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable
from itertools import accumulate, chain
from typing import NamedTuple, Self, final

RING = 256
"""Durations that are remembered per tool."""

SHARE = 8
"""Durations of one tenant in a `SharedHistory`."""

MOST_IN_FLIGHT = 2048
"""Calls in flight that a history counts; beyond them it forgets the oldest."""


class Seen(NamedTuple):
    """A duration, or how long a call lasted at least. At equal times, ends come before what was only seen to last so long."""

    duration_s: float
    censored: bool


class SurvivalCurve(NamedTuple):
    """A distribution of durations X, as atoms in ascending order. Every question costs O(log n).

    Attributes:
        times: where the n atoms are, in seconds.
        mass: entry k is the probability of the atoms from the k-th on; n + 1 entries.
        moment: entry k is the sum of probability · time of the atoms from the k-th on; n + 1 entries.
        outlasted_s: the last end that something has outlasted; then the last atom stands for what did. None if nothing has.
        num_seen: durations behind it, censored ones included.
    """

    times: tuple[float, ...]
    mass: tuple[float, ...]
    moment: tuple[float, ...]
    outlasted_s: float | None
    num_seen: int

    @classmethod
    def from_seen(cls, seen: list[Seen]) -> Self:
        """Kaplan and Meier's estimate. What lasts longer than anything that ended is put at twice its longest age.

        Args:
            seen: ascending.
        """
        times, weights, left = [], [], 1.0
        for index, (duration_s, censored) in enumerate(seen):
            if not censored:
                weight = left / (len(seen) - index)
                times.append(duration_s)
                weights.append(weight)
                left -= weight
        outlasted_s = None
        if seen and seen[-1].censored:
            outlasted_s = times[-1] if times else 0.0
            times.append(2.0 * seen[-1].duration_s)
            weights.append(left)
        mass = accumulate(reversed(weights), initial=0.0)
        moment = accumulate((w * x for w, x in zip(reversed(weights), reversed(times), strict=True)), initial=0.0)
        return cls(tuple(times), tuple(mass)[::-1], tuple(moment)[::-1], outlasted_s, len(seen))

    def left(self, age_s: float) -> float:
        """P(X > age)."""
        return self.mass[bisect_right(self.times, age_s)]

    def held_s(self, until_s: float) -> float:
        """E[min(X, until)]."""
        index = bisect_right(self.times, until_s)
        return self.moment[0] - self.moment[index] + until_s * self.mass[index]

    def remaining_s(self, age_s: float) -> float:
        """E[X - age | X > age], for an age with `left(age) > 0`, or any if `outlasted_s` is there.

        A call that has outlasted every end may never end, as when nobody comes back: its rest begins with twice the longest
        age and grows with its own, so that of such calls the oldest is expected last, and younger ones before all of them.
        """
        index = bisect_right(self.times, age_s)
        if self.outlasted_s is None:
            return max(0.0, self.moment[index] / self.mass[index] - age_s)
        tail_s = self.times[-1]
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
        self._running: dict[Hashable, float] = {}  # when they began
        self._now_s = 0.0
        self._curve = SurvivalCurve.from_seen([])
        self._num_changes = 0  # since the curve was made

    def start(self, call_key: Hashable, at_s: float) -> None:
        """A call began."""
        if len(self._running) == MOST_IN_FLIGHT:
            del self._running[next(iter(self._running))]
        self._running[call_key] = at_s
        self._pass(at_s)

    def end(self, call_key: Hashable, seen: Seen) -> None:
        """A call ended by itself or was aborted; of one whose begin is not known only the duration counts."""
        began_s = self._running.pop(call_key, None)
        if len(self._ring) == RING:
            del self._sorted[bisect_left(self._sorted, self._ring.popleft())]
        self._ring.append(seen)
        insort(self._sorted, seen)
        self._pass(self._now_s if began_s is None else began_s + seen.duration_s)

    @property
    def has_ended(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self._ring)

    @property
    def curve(self) -> SurvivalCurve:
        """The distribution; it lags behind by at most one change in 32.

        A call in flight counts with its age when a call of this tool last began or ended.
        """
        if 32 * self._num_changes > len(self._ring):
            self._num_changes = 0
            ages = [Seen(max(0.0, self._now_s - at_s), True) for at_s in reversed(self._running.values())]
            self._curve = SurvivalCurve.from_seen(sorted(self._sorted + ages))
        return self._curve

    def _pass(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._num_changes += 1


@final
class SharedHistory:
    """What the calls of one tool took, by tenant: the last `SHARE` of each of the last `RING // SHARE` tenants.

    Only calls that have ended count. So none of K tenants that have all made `SHARE` calls weighs more than 1/K, however many
    calls it makes or has in flight.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, deque[Seen]] = {}
        self._curve = SurvivalCurve.from_seen([])
        self._num_changes = 0  # since the curve was made

    def end(self, tenant: str, seen: Seen) -> None:
        """A call of a tenant ended."""
        recent(self._tenants, tenant, lambda: deque(maxlen=SHARE), RING // SHARE).append(seen)
        self._num_changes += 1

    @property
    def curve(self) -> SurvivalCurve:
        """The distribution; it lags behind by at most one change in 32."""
        if 32 * self._num_changes > self._curve.num_seen:
            self._num_changes = 0
            self._curve = SurvivalCurve.from_seen(sorted(chain.from_iterable(self._tenants.values())))
        return self._curve


def recent[K, V](entries: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The entry of a key, made if there is none: the last in the dict from now on. Of more than `most` the first one goes."""
    found = entries.pop(key, None)
    if found is None:
        found = make()
        if len(entries) == most:
            del entries[next(iter(entries))]
    entries[key] = found
    return found
