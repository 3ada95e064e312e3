"""A disk in virtual time: which pages it has, and when those that are read and written have passed. Stores no data."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

from jinfercept.kv.context import Context
from jinfercept.kv.disk.record import NO_DATA, Root, Tree
from jinfercept.sched.profile import Profile
from jinfercept.sim.simulator import VirtualClock

_PIECE_BYTES = 64 << 20
_TOKEN_BYTES = 8


class SimulatedPiece(NamedTuple):
    """Pages that were read, see `runner.disk_pages.ReadPiece`, and when."""

    at_s: float
    key: int
    num_pages: int
    is_last: bool


class _Write(NamedTuple):
    """Pages that are written by some time."""

    at_s: float
    key: Context
    root: Root
    tokens: bytes
    first: int
    num_pages: int


@final
class SimulatedDisk:
    """A `PageDisk` (`engine.disk_contexts`) of so many pages. Reads pass one after the other, and writes beside them.

    Args:
        num_pages: that it holds; the least recently used ones give way.
        page_size: tokens per page.
    """

    def __init__(self, profile: Profile, num_pages: int, page_size: int, clock: VirtualClock) -> None:
        self._profile, self._page_size, self._clock = profile, page_size, clock
        self._tree, self._num_free = Tree(), num_pages
        self.piece_pages = max(1, _PIECE_BYTES // (profile.kv_bytes_per_token * page_size))
        self._pieces: deque[SimulatedPiece] = deque()
        self._writes: deque[_Write] = deque()
        self._read_free_s = self._write_free_s = 0.0

    @property
    def num_writes(self) -> int:
        """Writes and counts that `poll_stored` has not returned yet."""
        return len(self._writes)

    def num_stored(self, root: bytes, tokens: Sequence[int]) -> int:
        """Leading pages of these tokens that are stored."""
        return self._tree.match(self._root(root), _token_bytes(tokens)).num_pages

    def read(self, key: int, root: bytes, tokens: Sequence[int], first: int, num_pages: int) -> None:
        match = self._tree.match(self._root(root), _token_bytes(tokens))
        self._tree.use(match)
        self._read_free_s = max(self._read_free_s, self._clock.now()) + self._profile.disk_latency_s
        for start in range(0, num_pages, self.piece_pages):
            size = min(self.piece_pages, num_pages - start)
            self._read_free_s += size * self._page_size / self._profile.disk_read_tokens_per_s
            self._pieces.append(SimulatedPiece(self._read_free_s, key, size, start + size == num_pages))

    def cancel(self, key: int) -> None:
        """What is still to be read is not wanted any more."""
        self._pieces = deque(piece for piece in self._pieces if piece.key != key)

    def poll_read(self) -> list[SimulatedPiece]:
        """The pieces that were read since the last call."""
        now, pieces = self._clock.now(), list[SimulatedPiece]()
        while self._pieces and self._pieces[0].at_s <= now:
            pieces.append(self._pieces.popleft())
        return pieces

    def place(self, piece: SimulatedPiece, slots: Sequence[int | None], dropped: Sequence[int]) -> None:
        """Nothing: there is no data."""

    def count(self, key: Context, root: bytes, tokens: Sequence[int]) -> None:
        """Count the leading pages of these tokens that are stored."""
        self._writes.append(_Write(self._clock.now(), key, self._root(root), _token_bytes(tokens), 0, 0))

    def write(self, key: Context, root: bytes, tokens: Sequence[int], first: int, slots: Sequence[int]) -> None:
        """Begin to store pages of these tokens."""
        seconds = len(slots) * self._page_size / self._profile.disk_write_tokens_per_s
        self._write_free_s = max(self._write_free_s, self._clock.now()) + seconds
        self._writes.append(_Write(self._write_free_s, key, self._root(root), _token_bytes(tokens), first, len(slots)))

    def poll_stored(self) -> list[tuple[Context, int]]:
        """How many leading pages are stored, for every count and write that has ended since the last call."""
        now, stored = self._clock.now(), list[tuple[Context, int]]()
        while self._writes and self._writes[0].at_s <= now:
            stored.append(self._store(self._writes.popleft()))
        return stored

    def next_s(self) -> float | None:
        """When the next pages have been read or written; None: none are on their way."""
        times = [queue[0].at_s for queue in (self._pieces, self._writes) if queue]
        return min(times, default=None)

    def close(self, longest_s: float) -> None:
        """Nothing: what is simulated has ended."""

    def _store(self, write: _Write) -> tuple[Context, int]:
        match = self._tree.match(write.root, write.tokens)
        num_new = write.first + write.num_pages - match.num_pages
        if write.num_pages and match.num_pages >= write.first and num_new > 0:
            while self._num_free < num_new and (record := self._tree.least_used()) is not None:
                self._num_free += sum([gone.num_pages for gone in self._tree.remove(record)])
            match = self._tree.match(write.root, write.tokens)
            num_new = write.first + write.num_pages - match.num_pages
            if match.num_pages >= write.first and num_new <= self._num_free:
                self._tree.insert(match.continued(write.tokens, NO_DATA), match)
                self._num_free -= num_new
                return write.key, write.first + write.num_pages
        return write.key, match.num_pages

    def _root(self, root: bytes) -> Root:
        return Root(root, self._page_size * _TOKEN_BYTES, 1)


def _token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids, which are larger than a model's, eight bytes each."""
    return array("q", tokens).tobytes()
