"""The policy of engines with a prefix cache: keep every paused context, and evict the one paused longest."""

from collections.abc import Iterator
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy, longest_paused
from jinfercept.sched.sequence import Sequence, State


@final
class LeastRecentlyUsed(Policy):
    """Keep, and evict by recency; recomputation is chunked like any prefill.

    Args:
        writes_through: copy every full page and every paused context to the host as the link allows, so that most evictions
            cost a copy back instead of a recomputation (hierarchical caches, offloading connectors).
    """

    def __init__(self, writes_through: bool) -> None:
        self._writes_through = writes_through
        self._resident: dict[str, Sequence] = {}  # paused, perhaps with pages on the device; longest paused first
        self._dirty: dict[str, Sequence] = {}
        self._hosted: dict[str, Sequence] = {}  # paused, longest paused first
        self._running: dict[str, Sequence] = {}
        self._written: dict[str, int] = {}  # leading pages of a running sequence that need no copy any more

    def pause(self, sequence: Sequence, now: float) -> None:
        self._leave(sequence)
        self._resident[sequence.id] = sequence
        if self._writes_through:
            self._dirty[sequence.id] = self._hosted[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self._leave(sequence)
        if self._writes_through:
            self._running[sequence.id] = sequence

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        """Write through: paused contexts in the order of pausing, then the pages of running ones as they fill."""
        for sequence in list(self._dirty.values()):
            dirty = (page for page in sequence.context.pages if page.residency is Residency.DIRTY and not page.refs)
            if not mover.copy(sequence, "write-through", dirty):
                return  # the link or the host is full
            del self._dirty[sequence.id]
        for sequence in list(self._running.values()):
            if sequence.state is not State.RUNNING:
                self._leave(sequence)
                continue
            pages = sequence.context.pages
            for index in range(self._written.get(sequence.id, 0), len(pages) - 1):
                if not mover.copy(sequence, "write-through", [pages[index]]):
                    break  # it is not full yet, or the link or the host is
                self._written[sequence.id] = index + 1

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in list(self._resident.values()):
            resident = False
            for page in reversed(sequence.context.pages):
                if page.device is not None:
                    action = Action.SWAP if self._writes_through else Action.DROP
                    yield Move(sequence, page, action, "least recently used")
                    resident |= page.device is not None
            if not resident:
                self._resident.pop(sequence.id, None)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return longest_paused(list(self._hosted.values()), sequence)

    def _leave(self, sequence: Sequence) -> None:
        for group in (self._resident, self._dirty, self._hosted, self._running, self._written):
            group.pop(sequence.id, None)
