"""Moves pages between the host copies of a runner and the files of a store, in threads of its own.

JAX's arrays do not change: a copy that is being written stays as it is, whatever becomes of its host slot meanwhile.
"""

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple, final

import numpy as np

from jinfercept.kv.context import Context
from jinfercept.kv.disk.store import DiskStore, Root
from jinfercept.kv.extent import TOKEN_BYTES, token_bytes
from jinfercept.runner.page_transfers import KeptPages
from jinfercept.runner.pools import Pool

PIECE_BYTES = 64 << 20
"""Bytes that are read before the scheduler may use them, and of a write."""
_MOST_PIECES = 2
"""Pieces that have been read and not been taken; reading waits for these."""

log = logging.getLogger(__name__)


class ReadPiece(NamedTuple):
    """Pages that were read.

    Attributes:
        key: of the read.
        num_pages: pages, which follow on those of the piece before.
        is_last: nothing more comes.
        arrays: host copies of so many pages each.
    """

    key: int
    num_pages: int
    is_last: bool
    arrays: tuple[tuple[int, KeptPages], ...]


@final
class DiskPages:
    """A `PageDisk` (`engine.disk_contexts`) of one runner.

    Args:
        store: the files.
        kv: the runner's pages.
        identity: digest of all that KV depends on beside the tokens, their isolation and the page size.
        page_size: tokens per page.
        settings: a context with the settings of JAX for other threads.
        wake: called when something was read or written.

    Attributes:
        piece_pages: pages of a read's piece, and of a write.
    """

    def __init__(
        self,
        store: DiskStore,
        kv: Pool,
        identity: bytes,
        page_size: int,
        settings: Callable[[], AbstractContextManager[None]],
        wake: Callable[[], None],
    ) -> None:
        self._store, self._kv, self._identity, self._page_size = store, kv, identity, page_size
        self._settings, self._wake = settings, wake
        self.piece_pages = max(1, PIECE_BYTES // kv.page_bytes)
        self._reading = ThreadPoolExecutor(2, "disk-pages-read")
        self._writing = ThreadPoolExecutor(1, "disk-pages-write")
        self._pieces: deque[ReadPiece] = deque()
        self._stored: deque[tuple[Context, int]] = deque()
        self._room = threading.Semaphore(_MOST_PIECES)
        self._wanted: set[int] = set()
        self._num_writes = 0

    def num_stored(self, root: bytes, tokens: Sequence[int]) -> int:
        """Leading pages of these tokens that are stored."""
        return len(self._store.find(self._root(root), token_bytes(tokens)))

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, key: int, root: bytes, tokens: Sequence[int], first: int, num_pages: int) -> None:
        """Begin to read pages of these tokens."""
        self._wanted.add(key)
        self._reading.submit(self._read, key, self._root(root), token_bytes(tokens), first, num_pages)

    def cancel(self, key: int) -> None:
        """What is still to be read is not wanted any more."""
        self._wanted.discard(key)

    def poll_read(self) -> list[ReadPiece]:
        """The pieces that were read since the last call."""
        pieces: list[ReadPiece] = []
        while self._pieces:
            piece = self._pieces.popleft()
            self._room.release()
            if piece.key in self._wanted:
                pieces.append(piece)
        return pieces

    def place(self, piece: ReadPiece, slots: Sequence[int | None], dropped: Sequence[int]) -> None:
        """Make the pages of a piece the copies of host slots.

        Args:
            slots: of its leading pages; None: the page is of no use.
            dropped: slots whose copies are to be forgotten before.
        """
        self._kv.host.drop(dropped)
        first = 0
        for count, array in piece.arrays:
            self._kv.adopt(array, slots[first : first + count])
            first += count

    def _read(self, key: int, root: Root, tokens: bytes, first: int, num_pages: int) -> None:
        """Read pieces until one is not whole. Whatever happens, a last piece arrives."""
        names = self._store.find(root, tokens)
        end = min(len(names), first + num_pages)
        try:
            with self._settings():
                while first < end and key in self._wanted:
                    last = min(end, first + self.piece_pages)
                    piece = self._read_piece(key, names[first:last], is_last=last == end)
                    first = end if piece.is_last else first + piece.num_pages
                    self._arrive(piece)
        except Exception:  # such as of memory
            log.exception("pages could not be read from disk")
            first = -1
        finally:
            if first != end:
                self._arrive(ReadPiece(key, 0, True, ()))

    def _read_piece(self, key: int, names: Sequence[bytes], *, is_last: bool) -> ReadPiece:
        self._room.acquire()
        most, copies, buffers = self._kv.staging_pages, list[np.ndarray](), list[list[memoryview]]()
        for start in range(0, len(names), most):
            count = min(most, len(names) - start)
            copies.append(self._kv.blank_copy(count))
            buffers += [[_bytes(page)] for page in copies[-1][:count]]
        num_right = self._store.read(names, buffers)
        right = [min(most, num_right - start) for start in range(0, num_right, most)]
        arrays = tuple((count, self._kv.to_host(array)) for count, array in zip(right, copies, strict=False))
        return ReadPiece(key, num_right, is_last or num_right < len(names), arrays)

    def _arrive(self, piece: ReadPiece) -> None:
        self._pieces.append(piece)
        self._wake()

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def num_writes(self) -> int:
        """Writes and counts that `poll_stored` has not returned yet."""
        return self._num_writes

    def write(self, key: Context, root: bytes, tokens: Sequence[int], first: int, slots: Sequence[int]) -> None:
        """Begin to store the copies of host slots as pages of these tokens.

        Args:
            key: of the answer.
            tokens: of the pages and all before them.
            first: number of the first page; the pages before it are stored.
            slots: of the pages; without any, the pages that are stored are counted.
        """
        self._num_writes += 1
        pages = [(page.array.data, page.position) for page in map(self._kv.host.__getitem__, slots)]
        self._writing.submit(self._write, key, self._root(root), token_bytes(tokens), first, pages)

    def poll_stored(self) -> list[tuple[Context, int]]:
        """How many leading pages are stored, for every count and write that has ended since the last call."""
        stored = [self._stored.popleft() for _ in range(len(self._stored))]
        self._num_writes -= len(stored)
        return stored

    def next_s(self) -> None:
        """When something has been read or written next is not known: `wake` tells."""

    def close(self, longest_s: float) -> None:
        """Wait for the writes, for so long at most, and end."""
        self._wanted.clear()
        self._room.release(1 << 20)
        ended = threading.Event()
        self._writing.submit(ended.set)
        if not ended.wait(longest_s):
            log.warning("contexts are not all on disk: the disk took more than %s s", longest_s)
        self._reading.shutdown(cancel_futures=True)
        self._writing.shutdown(cancel_futures=True)

    def _write(
        self, key: Context, root: Root, tokens: bytes, first: int, pages: Sequence[tuple[KeptPages | None, int]]
    ) -> None:
        num_stored = 0
        try:
            with self._settings():
                if pages:
                    on_host = {id(array): np.asarray(array) for array, _ in pages}
                    data = [[_bytes(on_host[id(array)][position])] for array, position in pages]
                    num_stored = first + self._store.write(root, tokens, first, data)
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


def _bytes(page: np.ndarray) -> memoryview:
    return page.reshape(-1).view(np.uint8).data
