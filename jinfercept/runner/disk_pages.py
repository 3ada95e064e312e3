"""Moves pages between a runner's host copies and the files of a store, in threads of its own.

A copy may be written to disk while its host slot already has another one, since JAX's arrays do not change.
"""

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, final

import jax
import numpy as np

from jinfercept.kv.context import Context
from jinfercept.kv.disk import DiskStore, Root, side_name
from jinfercept.kv.extent import TOKEN_BYTES, token_bytes
from jinfercept.runner.page_transfers import KeptPages
from jinfercept.runner.pools import Pool

PIECE_BYTES = 64 << 20
"""Bytes that are read before the scheduler may use them, and of a write."""
_MOST_PIECES = 2
"""Pieces that have been read and not been taken; reading waits for these."""

log = logging.getLogger(__name__)


HostCopy = tuple[KeptPages | None, int]
"""An array of host copies, and the place of a slot in it."""


class ReadPiece(NamedTuple):
    """Consecutive pages that were read from disk; they follow the pages of the piece before."""

    key: int  # of the read
    num_pages: int
    is_last: bool  # the read ends with this piece
    arrays: Sequence[KeptPages] = ()
    side: Sequence[KeptPages] = ()  # of a context that ends with the last page: its window pages or states


@final
class DiskPages:
    """A `PageDisk` (`engine.disk_contexts`) of one runner.

    Args:
        sides: the pages of layers with windows, or the states; None: the model has neither.
        identity: digest of everything that KV depends on, except tokens, isolation and page size.
        settings: makes a context with JAX's settings for other threads.
        wake: called by a thread of this object after it has read or written.
    """

    def __init__(
        self,
        store: DiskStore,
        kv: Pool,
        sides: Pool | None,
        identity: bytes,
        page_size: int,
        settings: Callable[[], AbstractContextManager[None]],
        wake: Callable[[], None],
    ) -> None:
        self._store, self._kv, self._sides, self._page_size = store, kv, sides, page_size
        self._identity = identity if sides is None else identity + kv.page_bytes.to_bytes(8)
        self._settings, self._wake = settings, wake
        # most pages of a piece that is read, and of a write
        self.piece_pages = max(1, PIECE_BYTES // kv.page_bytes)
        self._reading = ThreadPoolExecutor(2, "disk-pages-read")
        self._writing = ThreadPoolExecutor(1, "disk-pages-write")
        self._pieces: deque[ReadPiece] = deque()
        self._stored: deque[tuple[Context, int]] = deque()
        self._room = threading.Semaphore(_MOST_PIECES)
        self._wanted: set[int] = set()
        self._num_writes = 0

    def num_stored(self, root: bytes, tokens: Sequence[int], most: int) -> int:
        """Count the leading pages of these tokens that are stored, at most `most`; with sides, up to a stored checkpoint."""
        names = self._store.find(self._root(root), token_bytes(tokens))[:most]
        return len(names) if self._sides is None else self._store.with_side(names)

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(
        self, key: int, root: bytes, tokens: Sequence[int], first: int, num_pages: int, num_side_slots: int
    ) -> None:
        """Begin to read pages of these tokens, and the slots of the checkpoint behind the last one."""
        self._wanted.add(key)
        self._reading.submit(self._read, key, self._root(root), token_bytes(tokens), first, num_pages, num_side_slots)

    def cancel(self, key: int) -> None:
        """Cancel a read. Its remaining pieces are dropped."""
        self._wanted.discard(key)

    def poll_read(self) -> list[ReadPiece]:
        """Return the pieces that were read since the last call."""
        pieces: list[ReadPiece] = []
        while self._pieces:
            piece = self._pieces.popleft()
            self._room.release()
            if piece.key in self._wanted:
                pieces.append(piece)
        return pieces

    def place(
        self,
        piece: ReadPiece,
        slots: Sequence[int | None],
        dropped: Sequence[int],
        side_slots: Sequence[int],
        dropped_sides: Sequence[int],
    ) -> None:
        """Make the pages of a piece, and its side, the copies of host slots.

        Args:
            slots: of the leading pages; None: the page is not used.
            dropped, dropped_sides: slots whose copies are forgotten first.
            side_slots: of the side; empty: the side is not used.
        """
        _adopt(self._kv, piece.arrays, slots, dropped)
        if self._sides is not None:
            _adopt(self._sides, piece.side, side_slots, dropped_sides)

    def _read(self, key: int, root: Root, tokens: bytes, first: int, num_pages: int, num_side_slots: int) -> None:
        names, wanted_end = self._store.find(root, tokens), first + num_pages
        end = min(len(names), wanted_end)
        try:
            with self._settings():
                while first < end and key in self._wanted:
                    last = min(end, first + self.piece_pages)
                    num_slots = num_side_slots if last == wanted_end else 0
                    piece = self._read_piece(key, names[first:last], num_slots, is_last=last == end)
                    first = end if piece.is_last else first + piece.num_pages
                    self._arrive(piece)
        except Exception:  # such as of memory
            log.exception("pages could not be read from disk")
            first = -1
        finally:
            # whatever failed, a last piece arrives
            if first != end:
                self._arrive(ReadPiece(key, 0, True))

    def _read_piece(self, key: int, names: Sequence[bytes], num_side_slots: int, *, is_last: bool) -> ReadPiece:
        self._room.acquire()
        num_pages = len(names)
        copies, buffers = _blank(self._kv, num_pages)
        if not (num_side_slots and self._sides):
            num_right = self._store.read(names, buffers)
            return ReadPiece(key, num_right, is_last or num_right < num_pages, [*map(self._kv.to_host, copies)])
        side, parts = _blank(self._sides, num_side_slots)
        num_right = self._store.read([*names, side_name(names[-1])], [*buffers, [*chain.from_iterable(parts)]])
        side = map(self._sides.to_host, side) if num_right > num_pages else ()
        return ReadPiece(key, min(num_right, num_pages), True, [*map(self._kv.to_host, copies)], [*side])

    def _arrive(self, piece: ReadPiece) -> None:
        self._pieces.append(piece)
        self._wake()

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def num_writes(self) -> int:
        """Writes and counts that `poll_stored` has not returned yet."""
        return self._num_writes

    def write(
        self,
        key: Context,
        root: bytes,
        tokens: Sequence[int],
        first: int,
        slots: Sequence[int],
        side_slots: Sequence[int] = (),
    ) -> None:
        """Begin to store the copies of host slots as pages of these tokens.

        Args:
            key: returned with the result by `poll_stored`.
            tokens: those of the pages and all before them.
            first: index of the first page; the pages before it are stored already.
            slots: of the pages; empty: the stored pages are only counted.
            side_slots: of the checkpoint behind the last token.
        """
        self._num_writes += 1
        pages, side = _copies(self._kv, slots), [] if self._sides is None else _copies(self._sides, side_slots)
        self._writing.submit(self._write, key, self._root(root), token_bytes(tokens), first, pages, side)

    def poll_stored(self) -> list[tuple[Context, int]]:
        """Return the key and the number of leading pages stored, for every write and count that ended since the last call."""
        stored = [self._stored.popleft() for _ in range(len(self._stored))]
        self._num_writes -= len(stored)
        return stored

    def next_s(self) -> None:
        """Return None: the end of the next read or write is not known in advance. `wake` is called then."""

    def close(self, longest_s: float) -> None:
        """Wait for the writes, `longest_s` seconds at most, and end the threads."""
        self._wanted.clear()
        self._room.release(1 << 20)
        ended = threading.Event()
        self._writing.submit(ended.set)
        if not ended.wait(longest_s):
            log.warning("contexts are not all on disk: the disk took more than %s s", longest_s)
        self._reading.shutdown(cancel_futures=True)
        self._writing.shutdown(cancel_futures=True)

    def _write(
        self,
        key: Context,
        root: Root,
        tokens: bytes,
        first: int,
        pages: Sequence[HostCopy],
        side: Sequence[HostCopy],
    ) -> None:
        num_stored = 0
        try:
            with self._settings():
                if pages:
                    on_host = {id(array): jax.tree.map(np.asarray, array) for array, _ in (*pages, *side)}
                    data = [_parts(on_host[id(array)], position) for array, position in pages]
                    if side:
                        parts = (_parts(on_host[id(array)], position) for array, position in side)
                        data.append([*chain.from_iterable(parts)])
                    num_stored = first + min(len(pages), self._store.write(root, tokens, first, data))
                else:
                    num_stored = len(self._store.find(root, tokens))
        except Exception:
            log.exception("pages could not be written to disk")
        finally:
            self._stored.append((key, num_stored))
            self._wake()

    def _root(self, root: bytes) -> Root:
        digest = hashlib.sha256(self._identity + root).digest()
        return Root(digest, self._page_size * TOKEN_BYTES)


def _copies(pool: Pool, slots: Sequence[int]) -> list[HostCopy]:
    return [(page.array.data, page.position) for page in map(pool.host.__getitem__, slots)]


def _blank(pool: Pool, count: int) -> tuple[list[KeptPages], list[list[memoryview]]]:
    sizes = [min(pool.staging_pages, count - start) for start in range(0, count, pool.staging_pages)]
    copies = [pool.blank_copy(size) for size in sizes]
    return copies, [
        _parts(copy, position) for copy, size in zip(copies, sizes, strict=True) for position in range(size)
    ]


def _adopt(pool: Pool, arrays: Sequence[KeptPages], slots: Sequence[int | None], dropped: Sequence[int]) -> None:
    pool.host.drop(dropped)
    for array, start in zip(arrays, range(0, len(slots), pool.staging_pages), strict=False):
        pool.adopt(array, slots[start : start + pool.staging_pages])


def _parts(copy: Any, position: int) -> list[memoryview]:
    # a tuple has the arrays of a state
    return [part.reshape(-1).view(np.uint8).data for part in (copy if isinstance(copy, tuple) else (copy[position],))]
