"""Paused sequences, sorted by the seconds of holding that a return of each takes, while the estimates change. Moves nothing."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, final

from jinfercept.sched.estimator import Estimator, seconds_per_return
from jinfercept.sched.sequence import Sequence, State

REFRESHED = 2
"""Estimates that a plan takes anew."""


class _Rank(NamedTuple):
    """Sorts intercepted sequences by minus now and the seconds of holding per return, then the waiting ones, youngest first."""

    waits: bool
    key: float
    serial: int


_FIRST_WAITING = _Rank(True, -math.inf, 0)


@final
class LastExpectedFirst:
    """A set of paused sequences: the one whose return takes the most seconds of holding (`seconds_per_return`) first, those
    that wait to run at the end. For calls that return for certain, that is the one expected back last.

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
        return (sequence for _, sequence in list(self._sorted))

    def expected_s(self, sequence: Sequence) -> float:
        """When the seconds of holding end that a return of a member takes, if it is intercepted."""
        return -self._ranks[sequence.id].key

    def soonest(self, most: int) -> Iterator[tuple[float, Sequence]]:
        """The `most` intercepted members whose returns take the fewest seconds of holding, and the times at which these end;
        the earliest first."""
        end = bisect_left(self._sorted, (_FIRST_WAITING,))
        for rank, sequence in reversed(self._sorted[max(0, end - most) : end]):
            yield -rank.key, sequence

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence, or take its estimate anew."""
        self.discard(sequence)
        if sequence.state is State.INTERCEPTED:
            key = -(now + seconds_per_return(self._estimator, sequence, now - sequence.paused_s))
        else:
            key = -sequence.order
        self._serial += 1
        rank = _Rank(sequence.state is not State.INTERCEPTED, key, self._serial)
        self._ranks[sequence.id] = rank
        insort(self._sorted, (rank, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is a member."""
        rank = self._ranks.pop(sequence.id, None)
        if rank is not None:
            del self._sorted[bisect_left(self._sorted, (rank,))]

    def refresh(self, now: float) -> None:
        """Take the next `REFRESHED` estimates anew."""
        for _ in range(min(REFRESHED, len(self._sorted))):
            if not self._unrefreshed:
                self._unrefreshed = [sequence for _, sequence in self._sorted]
            sequence = self._unrefreshed.pop()
            if sequence.id in self._ranks:
                self.add(sequence, now)
