"""The policy of engines with a prefix cache: keep every paused context, and evict the one paused longest."""

from collections.abc import Iterator
from typing import final

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
            runs = [run for run in sequence.context.runs() if run.evictable]  # the others' contexts write them
            if not all(mover.copy(sequence, "write-through", run.pages) for run in runs):
                return  # the link or the host is full
            del self._dirty[sequence.id]
        for sequence in list(self._running.values()):
            if sequence.state is not State.RUNNING:
                self._leave(sequence)
                continue
            pages = range(self._written.get(sequence.id, 0), sequence.context.num_pages - 1)
            if pages:
                mover.copy(sequence, "write-through", pages)  # the last ones may not be full yet
                unwritten = [run.start for run in sequence.context.runs(pages) if not run.residency.on_host]
                self._written[sequence.id] = unwritten[0] if unwritten else pages.stop

    def victims(self, now: float) -> Iterator[Move]:
        action = Action.SWAP if self._writes_through else Action.DROP
        for sequence in list(self._resident.values()):
            resident = [run for run in reversed(sequence.context.runs()) if run.residency.on_device]
            if not resident:
                self._resident.pop(sequence.id, None)
            for run in resident:
                if run.evictable:
                    yield Move(sequence, run.pages[::-1], action, "least recently used")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return longest_paused(list(self._hosted.values()), sequence)

    def _leave(self, sequence: Sequence) -> None:
        for group in (self._resident, self._dirty, self._hosted, self._running, self._written):
            group.pop(sequence.id, None)
