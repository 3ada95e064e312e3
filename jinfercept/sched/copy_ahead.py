"""The default policy: `lru_host`, but no page is lost that can be kept, and what is lost is needed last.

`lru_host` copies contexts to the host as the link allows, and takes slots from the context that has been paused longest. This
policy makes the same copies, those of running contexts once half of the device is in use, and evicts contexts in the same
order. It differs where memory is too short for all of them:

1. A device slot is taken where nothing is lost: pages that have a host copy, or get one now, go first. While the link or the
   host is full, such pages of contexts that were paused later go, too.
2. A host slot is taken from a page that is also on the device, of the context that was paused last.
3. Else it is taken from the context that is needed last, as far as durations of calls are known, not from the one that has been
   paused longest.
4. While no request waits, a copy that no slot waits for takes the host slot of no other. All contexts are served soon then, so
   that none is worth more than another. Under load those are served that have lost least, and these were paused last.

Where there is no host, or a host with room for all, both policies do the same.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile
from operator import itemgetter
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import Estimator, seconds_per_return
from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

LOOKS = 2
"""Intercepted contexts whose estimates a plan takes anew, and running ones whose pages it copies: a plan costs the same however
many there are."""


@final
class CopyAhead(Policy):
    """See the module.

    Args:
        estimator: expected seconds until an interception ends.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._lru_host = LeastRecentlyUsed(writes_through=True, looks=LOOKS)
        self._paused: dict[str, Sequence] = {}  # longest paused first
        self._intercepted = LastNeededFirst(estimator)
        self._displaces = True  # copies may take host slots of others

    def pause(self, sequence: Sequence, now: float) -> None:
        self._lru_host.pause(sequence, now)
        self._paused.pop(sequence.id, None)
        self._paused[sequence.id] = sequence
        if sequence.state is State.INTERCEPTED:
            self._intercepted.add(sequence, now)

    def wait(self, sequence: Sequence) -> None:
        self._intercepted.discard(sequence)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._lru_host.resume(sequence, now)
        self._paused.pop(sequence.id, None)
        self._intercepted.discard(sequence)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._intercepted.refresh(now)
        self._displaces = len(self._paused) > len(self._intercepted)
        self._lru_host.moves(budget, now, mover)
        self._displaces = True

    def victims(self, now: float) -> Iterator[Move]:
        """Rule 1, and then pages that are lost."""
        for move in self._lru_host.victims(now):
            yield move._replace(action=Action.OFFLOAD)
        yield from self._lru_host.victims(now)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Rules 2 to 4."""
        if not self._displaces:
            return
        for other in takewhile(lambda other: other is not sequence, reversed(list(self._paused.values()))):
            for run in other.context.runs():
                if run.residency is Residency.CLEAN and not run.shared:
                    yield Move(other, run.pages, Action.UNCOPY, "on the device still")
        for other in self._intercepted:
            for run in reversed(other.context.runs()):
                if run.residency.on_host and other is not sequence:
                    yield Move(other, run.pages[::-1], Action.UNCOPY, "needed last")


@final
class LastNeededFirst:
    """A set of intercepted sequences, the one that is needed last first.

    A sequence is needed after the seconds of holding that its return takes (`seconds_per_return`), which for calls that return
    for certain are those until then. Estimates are taken when a sequence is added, and then in turn, `LOOKS` per plan. Ranks
    are times, so that estimates of different moments compare.

    Args:
        estimator: expected seconds until an interception ends.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._ranked: list[tuple[float, int, Sequence]] = []  # by minus the time of need
        self._ranks: dict[str, tuple[float, int]] = {}
        self._unrefreshed: list[Sequence] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        """The members in order, as of now: members may be added and discarded during the iteration."""
        return map(itemgetter(2), self._ranked.copy())

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence, or take its estimate anew."""
        self.discard(sequence)
        needed_s = now + seconds_per_return(self._estimator, sequence, now - sequence.paused_s)
        self._serial += 1
        rank = self._ranks[sequence.id] = (-needed_s, self._serial)
        insort(self._ranked, (*rank, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is a member."""
        rank = self._ranks.pop(sequence.id, None)
        if rank is not None:
            del self._ranked[bisect_left(self._ranked, rank)]

    def refresh(self, now: float) -> None:
        """Take the next `LOOKS` estimates anew."""
        for _ in range(min(LOOKS, len(self._ranked))):
            if not self._unrefreshed:
                self._unrefreshed = list(self)
            sequence = self._unrefreshed.pop()
            if sequence.id in self._ranks:
                self.add(sequence, now)
