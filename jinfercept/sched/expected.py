"""Paused sequences in the order in which they are expected back, kept while the estimates change. Moves nothing."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, final

from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.sequence import Sequence, State

LOOKED_AT = 2
"""Estimates that a plan looks at again."""


class _Rank(NamedTuple):
    """Sorts intercepted sequences by when they are expected back, last first, then the waiting ones, youngest first."""

    waits: bool
    key: float
    serial: int


@final
class LastExpectedFirst:
    """A set of paused sequences, whoever is expected back last first, and those that wait to run at the end.

    An estimate is taken when a sequence is added and again whenever its turn comes, `LOOKED_AT` at every plan: so a plan
    costs the same whether ten or ten thousand are paused. Ranks are times of return, not times remaining, which makes
    estimates of different moments comparable.

    Args:
        estimator: how long an interception still lasts.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._sorted: list[tuple[_Rank, Sequence]] = []
        self._ranks: dict[str, _Rank] = {}
        self._turns: list[Sequence] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._ranks

    def __iter__(self) -> Iterator[Sequence]:
        """In order, as it is now: members may be added and discarded meanwhile."""
        return (sequence for _, sequence in list(self._sorted))

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence, or look at it again."""
        self.discard(sequence)
        if sequence.state is State.INTERCEPTED:
            key = -(now + remaining_s(self._estimator, sequence, now - sequence.paused_s))
        else:
            key = -sequence.order
        self._serial += 1
        rank = _Rank(sequence.state is not State.INTERCEPTED, key, self._serial)
        self._ranks[sequence.id] = rank
        insort(self._sorted, (rank, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is in."""
        rank = self._ranks.pop(sequence.id, None)
        if rank is not None:
            del self._sorted[bisect_left(self._sorted, (rank,))]

    def look_again(self, now: float) -> None:
        """Take new estimates of the few whose turn it is."""
        for _ in range(min(LOOKED_AT, len(self._sorted))):
            if not self._turns:
                self._turns = [sequence for _, sequence in self._sorted]
            sequence = self._turns.pop()
            if sequence.id in self._ranks:
                self.add(sequence, now)
