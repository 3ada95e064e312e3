"""Pages of paused contexts by what they are worth: how soon they are needed, and what it takes to compute them again."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple, final

from jinfercept.sched.expected import LastExpectedFirst
from jinfercept.sched.sequence import Sequence

STALE = 64
"""Entries that the heap may have besides the two per sequence, before those that count for nothing any more go."""


class PageBlock(NamedTuple):
    """Pages of a paused context that go together, in the order in which they go.

    Attributes:
        worth: of a token of theirs, by equation (6).
    """

    worth: float
    sequence: Sequence
    pages: range


class _RankedBlock(NamedTuple):
    """Sorts sequences by what the block of each was worth when it was looked at, then in the order of their return."""

    worth: float
    rank: tuple[bool, float, int]
    number: int
    sequence_id: str


@final
class LeastWorth:
    """The least worthy blocks of paused sequences, one of each, in ascending order of their worth.

    The order is kept from plan to plan. Time only adds to the worth of a block, since its sequence's return comes nearer: what
    it was worth before is a lower bound, and only the first blocks are looked at again. A sequence whose pages or whose
    expected return have changed is to be `put` again.

    Args:
        paused: the sequences that may have blocks, in the order in which those of equal worth go.
        block_of: the block of a sequence that is worth least of those that it has at a time; None if it has none.
    """

    def __init__(self, paused: LastExpectedFirst, block_of: Callable[[Sequence, float], PageBlock | None]) -> None:
        self._paused, self._block_of = paused, block_of
        self._heap: list[_RankedBlock] = []
        self._entries: dict[str, tuple[_RankedBlock, Sequence]] = {}  # those that count, by the sequence's id
        self._skipped: list[tuple[_RankedBlock, Sequence]] = []
        self._changed: set[Sequence] = set()  # to be put when the order is read next
        self._numbers = count()

    def put_later(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences when the order is read next."""
        self._changed.update(sequences)

    def put(self, sequence: Sequence, now: float) -> None:
        """Look at a sequence: its block may be another one now."""
        self._changed.discard(sequence)
        block = self._block_of(sequence, now) if sequence in self._paused else None
        if block is None:
            self._entries.pop(sequence.id, None)
            return
        rank = self._paused.rank(sequence)
        entry, _ = self._entries.get(sequence.id, (None, None))
        if entry is None or entry.rank is not rank or entry.worth > block.worth:
            heapq.heappush(self._heap, self._enter(block, rank))

    def restart(self) -> None:
        """Begin a new order, in which no sequence is left out."""
        for entry, sequence in self._skipped:
            if sequence.id not in self._entries and sequence in self._paused:
                self._entries[sequence.id] = (entry, sequence)
                heapq.heappush(self._heap, entry)
        self._skipped.clear()
        if len(self._heap) > 2 * len(self._entries) + STALE:
            self._heap = [entry for entry, _ in self._entries.values()]
            heapq.heapify(self._heap)

    def first(self, now: float) -> PageBlock | None:
        """The block that is worth least; None if there is none. It stays the first until its pages go or it is skipped."""
        for sequence in list(self._changed):
            self.put(sequence, now)
        while self._heap:
            entry = self._heap[0]
            latest, sequence = self._entries.get(entry.sequence_id, (None, None))
            if latest is not entry or sequence is None:
                heapq.heappop(self._heap)
                continue
            block = self._block_of(sequence, now) if sequence in self._paused else None
            if block is None:
                heapq.heappop(self._heap)
                del self._entries[sequence.id]
            elif block.worth > entry.worth:
                heapq.heapreplace(self._heap, self._enter(block, entry.rank))
            else:
                return block
        return None

    def skip(self, sequence: Sequence, now: float) -> None:
        """Leave out a sequence until the next `restart`, or until it is put again."""
        if sequence in self._changed:
            self.put(sequence, now)
        entry = self._entries.pop(sequence.id, None)
        if entry is not None:
            self._skipped.append(entry)

    def _enter(self, block: PageBlock, rank: tuple[bool, float, int]) -> _RankedBlock:
        entry = _RankedBlock(block.worth, rank, next(self._numbers), block.sequence.id)
        self._entries[block.sequence.id] = (entry, block.sequence)
        return entry
