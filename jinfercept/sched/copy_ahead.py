"""Ours: copy paused contexts to the host while the link is idle, keep the device copy, lose pages only on demand.

A page with a host copy is clean: dropping it is free and instant. So memory that nobody wants is not wasted, and memory that
somebody wants is there at once. What is expected back last is copied first and dropped first.
"""

from collections.abc import Iterable, Iterator
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.expected import LastExpectedFirst
from jinfercept.sched.policy import Action, Budget, Move
from jinfercept.sched.sequence import Sequence, State

REFUSALS = 3
"""Contexts whose copy is refused before a plan stops trying: the link is used up, or the host full of what is wanted sooner."""


@final
class CopyAhead:
    """Spend the free link budget on copies of paused contexts; evict on demand.

    A plan looks at the contexts that it moves and at a few estimates, not at everybody who is paused.

    Args:
        estimator: how long an interception still lasts.
    """

    requeues_at_tail = False
    protects_paused = False
    synchronous = False

    def __init__(self, estimator: Estimator) -> None:
        self._paused = LastExpectedFirst(estimator)
        self._clean = LastExpectedFirst(estimator)  # may have pages on the device that have a host copy
        self._dirty = LastExpectedFirst(estimator)  # may have pages there that have none

    def pause(self, sequence: Sequence, now: float) -> None:
        for group in (self._paused, self._clean, self._dirty):
            group.add(sequence, now)

    def wait(self, sequence: Sequence) -> None:
        for group in (self._paused, self._clean, self._dirty):
            if sequence in group:
                group.add(sequence, 0.0)

    def resume(self, sequence: Sequence, now: float) -> None:
        for group in (self._paused, self._clean, self._dirty):
            group.discard(sequence)

    def moves(self, budget: Budget, now: float) -> Iterable[Move]:
        """Copies, longest expected remaining first."""
        for group in (self._paused, self._clean, self._dirty):
            group.look_again(now)
        if budget.link_tokens <= 0:
            return
        refused = 0
        for sequence in self._dirty:
            if sequence not in self._clean:
                self._clean.add(sequence, now)
            for page in sequence.context.pages:
                if page.residency is Residency.DIRTY:
                    yield Move(sequence, page, Action.COPY, "copy ahead")
                    if page.host is None:
                        refused += 1
                        break
            else:
                self._dirty.discard(sequence)
            if refused == REFUSALS:
                return

    def victims(self, now: float) -> Iterator[Move]:
        """Clean pages of whoever is expected back last, then dirty ones in the same order, tail first."""
        for group, wanted, why in ((self._clean, Residency.CLEAN, "clean"), (self._dirty, Residency.DIRTY, "dirty")):
            for sequence in group:
                for page in reversed(sequence.context.pages):
                    if page.residency is wanted and not page.refs:
                        yield Move(sequence, page, Action.SWAP, why)
                group.discard(sequence)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        """What is expected back later than the sequence, last first."""
        for other in self._paused:
            if other is sequence or other.state is not State.INTERCEPTED:
                return
            for page in reversed(other.context.pages):
                if page.host is not None:
                    yield Move(other, page, Action.LOSE, "the host is full")
