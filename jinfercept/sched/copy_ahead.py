"""The default policy: copy contexts to the host while the link is idle, keep them on the device, and evict on demand.

A page with a host copy is *clean*: dropping it from the device is free and instant. So contexts are copied before their slots
are needed, and fill memory that would otherwise be idle. The rule for every choice is *needed last, gone first*:

1. Copies use what a plan leaves of the link: first pages of paused contexts, of the one needed last first; then, if more than
   half of the device is in use, full pages of running contexts. Copies ahead displace no others.
2. A device slot is taken from the context that is needed last: its clean pages first, then its dirty ones, as far as they can
   be copied now. While the link or the host is full, clean pages of contexts that are needed sooner go instead, and then pages
   that contexts share.
3. A host slot for such a copy is taken from a context that is also on the device, the one needed soonest first; then from one
   that is only on the host and needed later.
4. Only where neither memory has room, pages are lost: those of one context until it has none left, since a context that lacks a
   few tokens waits in the same queue as one that lacks many. Its head goes first, which costs least to compute again.

`lru_host` makes the same moves by another rule: paused longest, gone first.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple, final

from jinfercept.kv.context import PageRun
from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import Estimator, seconds_per_return
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

LOOKS = 2
"""Paused contexts whose estimates a plan takes anew, and running ones whose pages it copies: a plan costs the same however many
there are."""
REFUSALS = 3
"""Refused copies after which a plan stops trying: the link is used up, or the host is full."""


@final
class CopyAhead(Policy):
    """See the module.

    Args:
        estimator: expected seconds until an interception ends.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._paused = LastNeededFirst(estimator)
        self._dirty = LastNeededFirst(estimator)  # those that may have pages without a host copy
        self._running: dict[str, Sequence] = {}  # those that have ended, too, until it is their turn
        self._losing: Sequence | None = None  # whose pages were lost last
        self._is_ahead = False  # copies are made that no slot waits for

    def pause(self, sequence: Sequence, now: float) -> None:
        self._running.pop(sequence.id, None)
        self._paused.add(sequence, now)
        self._dirty.add(sequence, now)

    def wait(self, sequence: Sequence) -> None:
        for group in (self._paused, self._dirty):
            if sequence in group:
                group.add(sequence, 0.0)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._paused.discard(sequence)
        self._dirty.discard(sequence)
        self._running[sequence.id] = sequence

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        """Rule 1."""
        if self._paused.ranked:
            self._paused.refresh(now)
            self._dirty.refresh(now)
        pools = budget.pools
        room = pools.host_total - pools.host
        if budget.link_tokens > 0 and room > 0:
            self._is_ahead = True
            if self._dirty.ranked:
                room = self._copy_paused(mover, room)
            if 2 * (pools.used + pools.paused) > pools.total:
                self._copy_running(mover, room)
            self._is_ahead = False

    def victims(self, now: float) -> Iterator[Move]:
        """Rules 2 and 4."""
        for sequence in self._paused:
            runs = sequence.context.own_evictable[::-1]
            for residency in (Residency.CLEAN, Residency.DIRTY) if runs else ():
                for run in runs:
                    if run.residency is residency:
                        yield Move(sequence, run.pages[::-1], Action.OFFLOAD, "needed last")
        for sequence in self._paused:
            for run in reversed(sequence.context.runs()):
                if run.shared and run.evictable and not run.in_flight:
                    yield Move(sequence, run.pages[::-1], Action.OFFLOAD, "needed last, shared")
        for sequence in self._lost_first(list(self._paused)):
            for run in sequence.context.own_evictable:
                self._losing = sequence
                yield Move(sequence, run.pages, Action.DROP, "lost")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Rules 3 and 4."""
        if self._is_ahead:
            return
        paused = list(self._paused)
        sooner, later = (
            list(takewhile(lambda other: other is not sequence, order)) for order in (paused[::-1], paused)
        )
        for other in sooner:
            for run in other.context.runs():
                if run.residency is Residency.CLEAN and not run.shared:
                    self._dirty.add(other, now)
                    yield Move(other, run.pages, Action.UNCOPY, "on the device still")
        for other in self._lost_first(later):
            for run in other.context.runs():
                if run.residency is Residency.HOST and not run.shared:
                    self._losing = other
                    yield Move(other, run.pages, Action.UNCOPY, "lost")

    def _copy_paused(self, mover: Mover, room: int) -> int:
        """Copy up to `room` pages of paused contexts; returns for how many more there is room, none once copies are refused."""
        refused = 0
        for sequence in self._dirty:
            for run in reversed(sequence.context.runs()):
                if _is_dirty(run):
                    if not mover.copy(sequence, "copy ahead", run.pages[::-1][:room]):
                        refused += 1
                        break
                    room -= run.num_pages
                    if room <= 0:
                        return 0
            else:
                self._dirty.discard(sequence)
            if refused == REFUSALS:
                break
        return 0 if refused else room

    def _copy_running(self, mover: Mover, room: int) -> None:
        """Copy up to `room` full pages of the next running contexts, in turn."""
        for _ in range(min(LOOKS, len(self._running))):
            sequence = self._running.pop(next(iter(self._running)))
            if sequence.state is State.RUNNING:
                self._running[sequence.id] = sequence
                for run in sequence.context.runs(range(sequence.context.num_pages - 1)):
                    if _is_dirty(run) and room > 0:
                        mover.copy(sequence, "copy ahead", run.pages[:room])
                        room -= run.num_pages

    def _lost_first(self, paused: list[Sequence]) -> Iterator[Sequence]:
        """Paused sequences: first the one that has lost pages last, unless its calls have returned."""
        losing = self._losing
        if losing in paused and losing.state is State.INTERCEPTED:
            yield losing
        yield from (sequence for sequence in paused if sequence is not losing)


def _is_dirty(run: PageRun) -> bool:
    return run.residency is Residency.DIRTY and not run.in_flight


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
