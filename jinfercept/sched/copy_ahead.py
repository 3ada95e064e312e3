"""The default policy: `lru_host`, with a better choice before each of its own.

`lru_host` copies contexts to the host as the link allows, and takes slots from the context that has been paused longest: pages
with a host copy are free to drop, and those without are lost if the link is busy. This policy makes the same copies, and offers
other slots first:

1. On the device, those of the context that is needed last: its pages with a host copy, then those that can be copied now. While
   the link or the host is full, pages with a copy of contexts that are needed sooner go instead.
2. On the host, copies of pages that are on the device still, of the context that is needed soonest first.

Only when these are used up does `lru_host` choose. So no page is lost while a slot can be had without a loss, and without a host
both policies are the same.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple, final

from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import Estimator, seconds_per_return
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

LOOKS = 2
"""Paused contexts whose estimates a plan takes anew, and running ones whose pages it copies: a plan costs the same however many
there are."""


@final
class CopyAhead(Policy):
    """See the module.

    Args:
        estimator: expected seconds until an interception ends.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._lru_host = LeastRecentlyUsed(writes_through=True, looks=LOOKS)
        self._paused = LastNeededFirst(estimator)

    def pause(self, sequence: Sequence, now: float) -> None:
        self._lru_host.pause(sequence, now)
        self._paused.add(sequence, now)

    def wait(self, sequence: Sequence) -> None:
        if sequence in self._paused:
            self._paused.add(sequence, 0.0)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._lru_host.resume(sequence, now)
        self._paused.discard(sequence)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._paused.refresh(now)
        self._lru_host.moves(budget, now, mover)

    def victims(self, now: float) -> Iterator[Move]:
        """Rule 1."""
        for sequence in self._paused:
            runs = sequence.context.own_evictable[::-1]
            for residency in (Residency.CLEAN, Residency.DIRTY) if runs else ():
                for run in runs:
                    if run.residency is residency:
                        yield Move(sequence, run.pages[::-1], Action.OFFLOAD, "needed last")
        yield from self._lru_host.victims(now)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Rule 2."""
        soonest_first = reversed(list(self._paused))
        for other in takewhile(lambda other: other is not sequence, soonest_first):
            for run in other.context.runs():
                if run.residency is Residency.CLEAN and not run.shared:
                    yield Move(other, run.pages, Action.UNCOPY, "on the device still")
        yield from self._lru_host.host_victims(sequence, now)


class _Rank(NamedTuple):
    """Sorts by minus the time at which a sequence is needed; then come those that are needed now, youngest first."""

    is_next: bool
    key: float
    serial: int


_SEQUENCE = itemgetter(1)


@final
class LastNeededFirst:
    """A set of paused sequences, the one that is needed last first.

    An intercepted one is needed after the seconds of holding that its return takes (`seconds_per_return`), which for calls
    that return for certain are those until then. One that waits to run is needed after the delay that its order expects
    (`Sequence.delay_s`): where others may overtake it since much of it is gone, the rest is of no use for as long. Without a
    delay it is needed now.

    Estimates are taken when a sequence is added, and then in turn, `LOOKS` per plan. Ranks are times, so that estimates of
    different moments compare.

    Args:
        estimator: expected seconds until an interception ends.

    Attributes:
        ranked: the members with their ranks, in order; not to be changed.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self.ranked: list[tuple[_Rank, Sequence]] = []
        self._ranks: dict[str, _Rank] = {}
        self._unrefreshed: list[Sequence] = []
        self._serial = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._ranks

    def __iter__(self) -> Iterator[Sequence]:
        """The members in order, as of now: members may be added and discarded during the iteration."""
        return map(_SEQUENCE, self.ranked.copy())

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
        insort(self.ranked, (rank, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is a member."""
        rank = self._ranks.pop(sequence.id, None)
        if rank is not None:
            del self.ranked[bisect_left(self.ranked, (rank,))]

    def refresh(self, now: float) -> None:
        """Take the next `LOOKS` estimates anew."""
        for _ in range(min(LOOKS, len(self.ranked))):
            if not self._unrefreshed:
                self._unrefreshed = [sequence for _, sequence in self.ranked]
            sequence = self._unrefreshed.pop()
            if sequence in self:
                self.add(sequence, now)
