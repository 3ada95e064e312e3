"""Pages of paused contexts by what they are worth: how soon they are needed, and what it takes to compute them again."""

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple, final

from jinfercept.sched.sequence import Sequence


class PageBlock(NamedTuple):
    """Pages of a paused context that go together, in the order in which they go.

    Attributes:
        worth: of a token of theirs, by equation (6).
    """

    worth: float
    sequence: Sequence
    pages: range


@final
class LeastWorth:
    """Blocks of pages in ascending order of their worth, while they go.

    Args:
        sequences: paused ones.
        block_of: the block of a sequence that is worth least of those that it has now; None if it has none.
    """

    def __init__(self, sequences: Iterable[Sequence], block_of: Callable[[Sequence], PageBlock | None]) -> None:
        self._sequences, self._block_of = list(sequences), block_of
        blocks = map(block_of, self._sequences)
        self._heap = [(block.worth, number) for number, block in enumerate(blocks) if block is not None]
        heapq.heapify(self._heap)

    def first(self) -> PageBlock | None:
        """The block that is worth least; None if there is none. It stays the first until its pages go or it is skipped."""
        while self._heap:
            worth, number = self._heap[0]
            block = self._block_of(self._sequences[number])
            if block is None:
                heapq.heappop(self._heap)
            elif block.worth > worth:
                heapq.heapreplace(self._heap, (block.worth, number))
            else:
                return block
        return None

    def skip(self) -> None:
        """Leave out the sequence of the first block."""
        heapq.heappop(self._heap)
