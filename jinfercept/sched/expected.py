"""Paused sequences, sorted by the seconds of holding until each is needed, while the estimates change. Moves nothing."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple, final

from jinfercept.sched.estimator import Estimator, seconds_per_return
from jinfercept.sched.sequence import Sequence, State

REFRESHED = 2
"""Estimates that a plan takes anew."""


class _Rank(NamedTuple):
    """Sorts by minus the time at which a sequence is needed; then come those that are needed now, youngest first."""

    is_next: bool
    key: float
    serial: int


_SEQUENCE = itemgetter(1)
_FIRST_NEXT = _Rank(True, -math.inf, 0)


@final
class LastExpectedFirst:
    """A set of paused sequences: the one whose return takes the most seconds of holding (`seconds_per_return`) first, those
    that are to run next at the end. For calls that return for certain, that is the one expected back last.

    A sequence that waits to run is needed after the delay that its order expects (`Sequence.delay_s`): where that lets others
    overtake it since most of its pages are gone, the rest of them are of no use for as long. Without a delay it is to run next.

    A sequence's estimate is taken when it is added, and then in turn, `REFRESHED` estimates per plan: a plan costs the same
    whether ten or ten thousand sequences are paused. Ranks are times, the moment of the estimate and its seconds, so that
    estimates of different moments compare.

    Args:
        estimator: expected seconds until an interception ends.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._sorted: list[tuple[_Rank, Sequence]] = []
        self._ranks: dict[str, _Rank] = {}
        self._unrefreshed: list[Sequence] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._ranks

    def __iter__(self) -> Iterator[Sequence]:
        """The members in order, as of now: members may be added and discarded during the iteration."""
        return map(_SEQUENCE, self._sorted.copy())

    def expected_s(self, sequence: Sequence) -> float:
        """When the seconds of holding end that a return of a member takes; minus infinity if it is to run next."""
        rank = self._ranks[sequence.id]
        return -math.inf if rank.is_next else -rank.key

    def rank(self, sequence: Sequence) -> tuple[bool, float, int]:
        """The place of a member in the order: members sort by it."""
        return self._ranks[sequence.id]

    def soonest(self, most: int) -> Iterator[tuple[float, Sequence]]:
        """The `most` members whose returns take the fewest seconds of holding, of those that are not to run next, and the times
        at which these end; the earliest first."""
        end = bisect_left(self._sorted, (_FIRST_NEXT,))
        for rank, sequence in reversed(self._sorted[max(0, end - most) : end]):
            yield -rank.key, sequence

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence, or take its estimate anew."""
        self.discard(sequence)
        if sequence.state is State.INTERCEPTED:
            delay_s = seconds_per_return(self._estimator, sequence, now - sequence.paused_s)
        else:
            delay_s = sequence.delay_s
        is_next = sequence.state is not State.INTERCEPTED and not delay_s
        self._serial += 1
        rank = _Rank(is_next, -sequence.order if is_next else -(now + delay_s), self._serial)
        self._ranks[sequence.id] = rank
        insort(self._sorted, (rank, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is a member."""
        rank = self._ranks.pop(sequence.id, None)
        if rank is not None:
            del self._sorted[bisect_left(self._sorted, (rank,))]

    def refresh(self, now: float) -> list[Sequence]:
        """Take the next `REFRESHED` estimates anew; returns whose."""
        refreshed = list[Sequence]()
        for _ in range(min(REFRESHED, len(self._sorted))):
            if not self._unrefreshed:
                self._unrefreshed = [sequence for _, sequence in self._sorted]
            sequence = self._unrefreshed.pop()
            if sequence.id in self._ranks:
                self.add(sequence, now)
                refreshed.append(sequence)
        return refreshed
