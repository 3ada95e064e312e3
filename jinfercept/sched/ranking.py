"""Ranks of waiting sequences under an `Order`: asks for keys, and bounds how often a sequence is overtaken. Moves nothing."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, final

from jinfercept.sched.order import Order
from jinfercept.sched.sequence import Sequence, State

REFRESHED = 2
"""Keys of waiting sequences that a plan asks for anew."""


class Rank(NamedTuple):
    """Sorts waiting sequences; the least starts next. `order` is that of the arrivals, and makes ranks unique."""

    priority: int
    key: float
    order: int


@final
class Ranking:
    """The ranks of one scheduler's waiting sequences.

    Args:
        order: gives the keys.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self._fresh: list[Sequence] = []
        self._turn: list[Sequence] = []

    def begin(self, sequence: Sequence) -> Rank:
        """The rank of a sequence that begins to wait: the last of its priority, until the next plan asks for its key."""
        self._fresh.append(sequence)
        return self.first(sequence) if self._overdue(sequence) else Rank(sequence.priority, math.inf, sequence.order)

    def due(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """The sequences whose ranks this plan takes: all that have none yet, and the next `REFRESHED` others."""
        fresh, self._fresh = self._fresh, []
        if not self._turn:
            self._turn = waiting.copy()
        again = [self._turn.pop() for _ in range(min(REFRESHED, len(self._turn)))]
        return (sequence for sequence in (*fresh, *again) if sequence.state is State.WAITING)

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """The rank of a sequence at `now`, in seconds."""
        if self._overdue(sequence):
            return self.first(sequence)
        return Rank(sequence.priority, self.order.key(sequence, now), sequence.order)

    @staticmethod
    def delay_s(sequence: Sequence, first: Sequence) -> float:
        """Seconds by which a waiting sequence is expected to start later than the first one, where keys are seconds."""
        key, first_key = sequence.rank[1], first.rank[1]
        return max(0.0, key - first_key) if math.isfinite(first_key) and math.isfinite(key) else 0.0

    def first(self, sequence: Sequence) -> Rank:
        """The rank of a sequence that was overtaken too often: before its priority, by arrival."""
        return Rank(sequence.priority, -math.inf, sequence.order)

    def overtaken(self, started: Sequence, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Count that a sequence starts before others of its tenant; returns those for which this was once too often."""
        overdue = []
        for sequence in waiting:
            if sequence.order < started.order:
                sequence.overtaken += 1
                if sequence.overtaken == self.order.patience:
                    overdue.append(sequence)
        return overdue

    def _overdue(self, sequence: Sequence) -> bool:
        return sequence.overtaken >= self.order.patience
