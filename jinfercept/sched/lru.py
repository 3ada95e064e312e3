"""What engines with a prefix cache do today: keep every paused context, evict the one paused longest when a slot is needed."""

from collections.abc import Iterable, Iterator
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.policy import Action, Budget, Move
from jinfercept.sched.sequence import Sequence


@final
class LeastRecentlyUsed:
    """Keep, and evict by recency; recomputation is chunked like any prefill.

    Args:
        writes_through: copy every paused context to the host as the link allows, so that most evictions cost a copy back
            instead of a recomputation (hierarchical caches, offloading connectors).
    """

    requeues_at_tail = False
    protects_paused = False
    synchronous = False

    def __init__(self, writes_through: bool) -> None:
        self._writes_through = writes_through
        self._resident: dict[str, Sequence] = {}  # paused, and may have pages on the device; longest paused first
        self._dirty: dict[str, Sequence] = {}

    def pause(self, sequence: Sequence, now: float) -> None:
        self._resident.pop(sequence.id, None)
        self._resident[sequence.id] = sequence
        if self._writes_through:
            self._dirty[sequence.id] = sequence

    def wait(self, sequence: Sequence) -> None:
        """It stays where it is in the order."""

    def resume(self, sequence: Sequence, now: float) -> None:
        self._resident.pop(sequence.id, None)
        self._dirty.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float) -> Iterable[Move]:
        """Write through in the order of pausing."""
        for sequence in list(self._dirty.values()):
            for page in sequence.context.pages:
                if page.residency is Residency.DIRTY and not page.refs:
                    yield Move(sequence, page, Action.COPY, "write-through")
                    if page.host is None:
                        return  # the link or the host is full
            del self._dirty[sequence.id]

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in list(self._resident.values()):
            resident = False
            for page in reversed(sequence.context.pages):
                if page.device is not None:
                    yield Move(sequence, page, Action.DROP, "least recently used")
                    resident |= page.device is not None
            if not resident:
                self._resident.pop(sequence.id, None)
