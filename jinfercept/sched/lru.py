"""The policy of engines with a prefix cache: keep every paused context, and evict the context paused longest."""

from collections.abc import Iterator
from itertools import islice
from typing import final

from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy, longest_paused
from jinfercept.sched.sequence import Sequence, State


@final
class WriteThrough:
    """Copies full pages and paused contexts to the host, as the link allows: of `looks` running sequences in turn; None: of
    all."""

    def __init__(self, looks: int | None = None) -> None:
        self._looks = looks
        self._dirty: dict[str, Sequence] = {}  # paused, longest paused first
        # running sequences by id; one that has ended leaves when it is its turn
        self.running: dict[str, Sequence] = {}
        self._written: dict[str, int] = {}  # leading pages of a running sequence that need no copy any more

    def pause(self, sequence: Sequence) -> None:
        """Queue the rest of a context that has paused for copying."""
        self._leave(sequence)
        self._dirty[sequence.id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Copy the pages of a running sequence as they fill."""
        self._leave(sequence)
        self.running[sequence.id] = sequence

    def moves(self, mover: Mover, with_running: bool = True) -> None:
        """Copy paused contexts in the order of pausing, then pages of running ones."""
        for sequence in list(self._dirty.values()):
            # running contexts copy what they share, if they are copied
            runs = [run for run in sequence.context.runs() if run.evictable or not with_running]
            if not all(mover.copy(sequence, "write-through", run.pages) for run in runs):
                return  # the link or the host is full
            del self._dirty[sequence.id]
        for sequence in list(islice(self.running.values(), self._looks)) if with_running else ():
            if sequence.state is not State.RUNNING:
                self._leave(sequence)
                continue
            self.running[sequence.id] = self.running.pop(sequence.id)  # the others are next
            pages = range(self._written.get(sequence.id, 0), sequence.context.num_pages - 1)
            if pages:
                mover.copy(sequence, "write-through", pages)  # the last ones may not be full yet
                unwritten = [run.start for run in sequence.context.runs(pages) if not run.residency.on_host]
                self._written[sequence.id] = unwritten[0] if unwritten else pages.stop

    def _leave(self, sequence: Sequence) -> None:
        for group in (self._dirty, self.running, self._written):
            group.pop(sequence.id, None)


@final
class LeastRecentlyUsed(Policy):
    """Keep, and evict by recency; recomputation is chunked like any prefill.

    With `writes_through`, full pages and paused contexts are copied to the host as the link allows, so that most evictions
    cost a copy back instead of a recomputation (hierarchical caches, offloading connectors). With `looks`, this is done only
    while a context is paused and more than half of the device is in use.
    """

    def __init__(self, writes_through: bool, looks: int | None = None) -> None:
        self._write_through = WriteThrough(looks) if writes_through else None
        self._looks = looks
        self._resident: dict[str, Sequence] = {}  # paused, perhaps with pages on the device; longest paused first
        self._hosted: dict[str, Sequence] = {}  # paused, longest paused first

    def pause(self, sequence: Sequence, now: float) -> None:
        self._leave(sequence)
        self._resident[sequence.id] = sequence
        if self._write_through is not None:
            self._write_through.pause(sequence)
            self._hosted[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self._leave(sequence)
        if self._write_through is not None:
            self._write_through.resume(sequence)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        if self._write_through is not None:
            pools = budget.pools
            under_pressure = bool(self._hosted) and 2 * (pools.used + pools.paused) > pools.total
            self._write_through.moves(mover, self._looks is None or under_pressure)

    def victims(self, now: float) -> Iterator[Move]:
        action = Action.SWAP if self._write_through is not None else Action.DROP
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
        self._resident.pop(sequence.id, None)
        self._hosted.pop(sequence.id, None)
