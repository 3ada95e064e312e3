"""Ours: copy paused contexts to the host while the link is idle, keep the device copy, evict pages only on demand.

A page with a host copy is clean: dropping it is free and instant. So paused contexts fill memory that would be idle, and give
it up at once when a sequence needs it. The context that takes the most seconds of holding per return is copied and dropped
first: one that is expected back late, or that may never come back.

A new request does not displace a context that is expected back before it could be moved out and in again twice: where memory is
short, it would only make the link move that context while others wait for the link. Host copies that the link would bring
too late are recomputed (`Policy.recomputes_late`).
"""

import math
from collections.abc import Callable, Iterator
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import Estimator, seconds_per_return
from jinfercept.sched.expected import LastExpectedFirst
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State

LATER = 2.0
"""A host copy gives way to another one if its sequence is expected back after so many times the seconds of the other."""
HELD_SWAPS = 4.0
"""A context is held against new requests if it is expected within so many times the seconds of moving it one way. Measured:
from 1 to 8 differ by 3 % in latency, and without it latency is 1.3 times as high (13B at 8 requests per second)."""
LATE = 8.0
"""A context is held for so many times these seconds at most, however soon it is expected: tools hang."""
SOONEST = 64
"""Contexts that a plan looks at to hold them."""
REFUSALS = 3
"""Refused copies after which a plan stops trying: the link is used up, or the host is full of contexts expected sooner."""


@final
class CopyAhead(Policy):
    """Spend the free link budget on copies of paused contexts; evict on demand.

    A plan reads the contexts that it moves and a few estimates, not all paused contexts: its cost does not grow with them.

    Args:
        estimator: expected seconds until an interception ends.
        swap_s: T_swap, seconds to move the KV of so many tokens one way.
    """

    recomputes_late = True

    def __init__(self, estimator: Estimator, swap_s: Callable[[int], float]) -> None:
        self._estimator = estimator
        self._swap_s = swap_s
        self._paused = LastExpectedFirst(estimator)
        self._clean = LastExpectedFirst(estimator)  # may have pages on the device that have a host copy
        self._dirty = LastExpectedFirst(estimator)  # may have pages there that have none
        self._copied = LastExpectedFirst(estimator)  # may have pages with a host copy
        self._groups = (self._paused, self._clean, self._dirty, self._copied)

    def pause(self, sequence: Sequence, now: float) -> None:
        for group in (self._paused, self._clean, self._dirty):
            group.add(sequence, now)
        if any(run.residency.on_host for run in sequence.context.runs()):
            self._copied.add(sequence, now)

    def wait(self, sequence: Sequence) -> None:
        for group in self._groups:
            if sequence in group:
                group.add(sequence, 0.0)

    def resume(self, sequence: Sequence, now: float) -> None:
        for group in self._groups:
            group.discard(sequence)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        """Copies, longest expected remaining first."""
        if not self._paused:  # as mostly: the other groups have no other members
            return
        for group in self._groups:
            group.refresh(now)
        if budget.link_tokens <= 0:
            return
        refused = 0
        for sequence in self._dirty:
            if sequence not in self._clean:
                self._clean.add(sequence, now)
            self._note_copy(sequence, now)
            if mover.copy(sequence, "copy ahead"):
                self._dirty.discard(sequence)
            else:
                refused += 1
            if refused == REFUSALS:
                return

    def victims(self, now: float) -> Iterator[Move]:
        """Clean pages, of the sequence expected back last first, tail first; then dirty ones in the same order."""
        for group, wanted, why in ((self._clean, Residency.CLEAN, "clean"), (self._dirty, Residency.DIRTY, "dirty")):
            for sequence in group:
                for run in reversed(sequence.context.runs()):
                    if run.residency is wanted and run.evictable:
                        self._note_copy(sequence, now)
                        yield Move(sequence, run.pages[::-1], Action.SWAP, why)
                group.discard(sequence)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """Host copies of contexts that are expected back much later than the sequence, last first.

        Contexts expected back at nearly the same time never replace each other's copies, since their estimates often change
        places.
        """
        soon_s = LATER * self._remaining_s(sequence, now)
        for other in self._copied:
            if other is sequence or self._remaining_s(other, now) <= soon_s:
                return
            for run in reversed(other.context.runs()):
                if run.residency.on_host:
                    if run.residency.on_device and other not in self._dirty:
                        self._dirty.add(other, now)
                    yield Move(other, run.pages[::-1], Action.UNCOPY, "the host is full")
            self._copied.discard(other)

    def held_pages(self, most: int, now: float) -> int:
        num_pages = 0
        for expected_s, sequence in self._paused.soonest(SOONEST):
            soon_s = HELD_SWAPS * self._swap_s(sequence.length)
            if soon_s < math.inf and expected_s - now <= soon_s and now - sequence.paused_s <= LATE * soon_s:
                num_pages += sum([run.num_pages for run in sequence.context.runs() if run.evictable])
                if num_pages >= most:
                    return most
        return num_pages

    def _note_copy(self, sequence: Sequence, now: float) -> None:
        if sequence not in self._copied:
            self._copied.add(sequence, now)

    def _remaining_s(self, sequence: Sequence, now: float) -> float:
        """Seconds until the sequence is expected back; 0 if it waits to run."""
        if sequence.state is not State.INTERCEPTED:
            return 0.0
        return seconds_per_return(self._estimator, sequence, now - sequence.paused_s)
