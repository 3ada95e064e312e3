"""The policies of engines with a prefix cache, `lru` and `lru_host`, which keep every paused context and evict the one paused
longest; and the default, `copy_ahead`: `lru_host`, but no page is lost that can be kept.

Like `lru_host`, `copy_ahead` copies contexts to the host as the link allows. Three rules, in its code, differ where memory is
too short for all contexts. Without a host, or with a host that holds all contexts, both policies do the same. It ignores how
long calls are expected to last: taking host slots from the context that is needed last, by the durations of earlier calls,
made turns wait longer in overload.
"""

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy, longest_paused
from jinfercept.sched.sequence import Sequence, State


@final
class LeastRecentlyUsed(Policy):
    """Keep, and evict by recency; recomputation is chunked like any prefill.

    With `writes_through`, full pages and paused contexts are copied to the host as the link allows, so that most evictions
    cost a copy back instead of a recomputation (hierarchical caches, offloading connectors). With `looks`, this is done for so
    many running sequences in turn, and only while a context is paused and more than half of the device is in use.
    """

    def __init__(self, writes_through: bool, looks: int | None = None) -> None:
        self._writes_through, self._looks = writes_through, looks
        self._resident: dict[str, Sequence] = {}  # paused, perhaps with pages on the device; longest paused first
        # only if it writes through: paused, longest paused first; those of them whose pages have no copy yet
        self.hosted: dict[str, Sequence] = {}
        self._dirty: dict[str, Sequence] = {}
        # likewise: running sequences, and their leading pages that need no copy any more; one that has ended leaves when it is
        # its turn
        self.running: dict[str, Sequence] = {}
        self._written: dict[str, int] = {}

    def pause(self, sequence: Sequence, now: float) -> None:
        self._leave(sequence)
        self._resident[sequence.id] = sequence
        if self._writes_through:
            self.hosted[sequence.id] = self._dirty[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self._leave(sequence)
        if self._writes_through:
            self.running[sequence.id] = sequence

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        # paused contexts in the order of pausing, then pages of running ones as they fill
        if not self._writes_through:
            return
        pools = budget.pools
        under_pressure = bool(self.hosted) and 2 * (pools.used + pools.paused) > pools.total
        with_running = self._looks is None or under_pressure
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
        return longest_paused(list(self.hosted.values()), sequence)

    def _leave(self, sequence: Sequence) -> None:
        for group in (self._resident, self.hosted, self._dirty, self.running, self._written):
            group.pop(sequence.id, None)


LOOKS = 2
"""Running contexts whose pages one plan copies. The limit makes a plan cost the same however many contexts run."""


@final
class CopyAhead(Policy):
    def __init__(self) -> None:
        # Running contexts are copied only while another one is paused and half of the device is in use: a batch whose
        # requests neither pause nor wait is not slowed down by copies that are never needed.
        self._lru_host = LeastRecentlyUsed(writes_through=True, looks=LOOKS)
        self._intercepted = set[str]()
        self._displaces = True  # copies may take host slots of others

    def pause(self, sequence: Sequence, now: float) -> None:
        self._lru_host.pause(sequence, now)
        if sequence.state is State.INTERCEPTED:
            self._intercepted.add(sequence.id)

    def wait(self, sequence: Sequence) -> None:
        self._intercepted.discard(sequence.id)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._lru_host.resume(sequence, now)
        self._intercepted.discard(sequence.id)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._displaces = len(self._lru_host.hosted) > len(self._intercepted)
        self._lru_host.moves(budget, now, mover)
        self._displaces = True

    def victims(self, now: float) -> Iterator[Move]:
        # Rule 1: take a device slot where nothing is lost. Pages that have a host copy, or get one now, go first; while the
        # link or the host is full, also such pages of contexts that were paused later.
        for move in self._lru_host.victims(now):
            yield move._replace(action=Action.OFFLOAD)
        yield from self._lru_host.victims(now)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        # Rule 3: while no request waits, a copy that no slot waits for takes no other copy's host slot. All contexts are
        # served soon then, so that none is worth more than another. Under load the contexts that have lost least are served
        # first, and those were paused last.
        if not self._displaces:
            return
        # Rule 2: take a host slot from a page that is also on the device, of the context that was paused last.
        for other in takewhile(lambda other: other is not sequence, reversed(list(self._lru_host.hosted.values()))):
            for run in other.context.runs():
                if run.residency is Residency.CLEAN and not run.shared:
                    yield Move(other, run.pages, Action.UNCOPY, "on the device still")
        yield from self._lru_host.host_victims(sequence, now)
