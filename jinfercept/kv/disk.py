"""Disk tier: pages of KV on disk, a file each, written once, found by their tokens, and checked as they are read.

A page's name is a digest of its tokens and of all before them, so contexts with a common beginning share its files. Every file
ends with a checksum, and gets its name when it is whole: a damaged page, or one that a killed process was writing, is missing.
Failures are logged; a caller sees fewer pages. Knows no arrays, no contexts and no policy.
"""

import errno
import json
import logging
import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, final

from jinfercept.errors import ConfigError
from jinfercept.kv.disk_folder import (
    DRIVE_WRITES_PER_DAY,
    MEASURED_BYTES,
    DiskSpeed,
    Folder,
    WriteBudget,
    measure_speed,
)

log = logging.getLogger(__name__)

FORMAT = 3
"""Of the files. Pages of other formats are missing."""
_NUM_READERS = 8
_LEAST_BYTES = 4096
_CHECKSUM_BYTES = 4
_DIGEST_BYTES = 32
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEW_NAME = "data-new"
"""File of the page that is being written."""
_MEMORY_NAME = "memory.json"
"""File that remembers the disk's speed and the write budget between starts."""

Buffers = Sequence[memoryview]
"""The bytes of one page, in pieces."""


class Root(NamedTuple):
    """The common properties of contexts that may share pages."""

    digest: bytes  # of the model, its weights, the dtype and layout of KV, and the isolation salt
    token_bytes: int  # of one page

    def names(self, tokens: bytes) -> Iterator[bytes]:
        """The names of the full pages of these tokens, in order."""
        name, size = sha256(FORMAT.to_bytes() + self.digest).digest(), self.token_bytes
        for end in range(size, len(tokens) + 1, size):
            name = sha256(name + tokens[end - size : end]).digest()
            yield name


def side_name(name: bytes) -> bytes:
    """The name of the window or state behind the page of this name."""
    return sha256(b"side" + name).digest()


@dataclass(slots=True)
class DiskCounters:
    """Counts of a store since the process started."""

    read_bytes: int = 0
    written_bytes: int = 0
    refused_bytes: int = 0  # by the write budget
    evicted_pages: int = 0
    damaged_pages: int = 0  # with a wrong checksum, or not readable
    failures: int = 0  # of writes


class DiskOccupancy(NamedTuple):
    used_bytes: int
    total_bytes: int
    num_pages: int


class DiskState(NamedTuple):
    counters: DiskCounters
    occupancy: DiskOccupancy
    works: bool  # contexts are still stored


@final
class DiskStore:
    """The pages in a folder, of any models. Its methods may be called from any thread.

    Args:
        space_bytes: that the pages may take.
        daily_bytes: that may be written per day; None: as many as the drive is specified for, `DRIVE_WRITES_PER_DAY`.
        clock: Unix time.

    Raises:
        ConfigError: the folder cannot be used, see `Folder`.
    """

    def __init__(
        self, path: Path, space_bytes: int, *, daily_bytes: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        if space_bytes < _LEAST_BYTES:
            raise ConfigError("kv_disk_space is too small", got=f"{space_bytes} bytes", fix="give at least some GiB")
        self._clock = clock
        self._folder = Folder(path, space_bytes)
        # `problem` is why nothing is written any more; "" while the store works.
        self.counters, self.problem, self._failure = DiskCounters(), "", ""
        self._lock = threading.Lock()  # of the pages and their bytes
        self._writing = threading.Lock()  # of new files and the budget
        self._is_full = False  # sooner than was said
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kv-disk-read")
        # Bytes by name, in the order of the last use; of one use the last page of a context first, which is of use to no other.
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self._used_bytes, self._space_bytes = 0, space_bytes
        try:
            self._open(self._folder.drive_bytes * DRIVE_WRITES_PER_DAY if daily_bytes is None else daily_bytes)
        except BaseException:
            self._end()
            raise

    def occupancy(self) -> DiskOccupancy:
        with self._lock:
            return DiskOccupancy(self._used_bytes, self._space_bytes, len(self._pages))

    def speed(self) -> DiskSpeed:
        """The speed of the disk, as it was measured when the folder was first used. Raises `OSError`."""
        with self._writing:
            try:
                return DiskSpeed(*map(float, self._memory["speed"]))
            except (KeyError, TypeError, ValueError):
                speed = measure_speed(self._folder.path, self._readers, min(MEASURED_BYTES, self._space_bytes))
                self._remember("speed", speed)
                return speed

    def state(self) -> DiskState:
        self.budget.advance(self._clock())
        return DiskState(replace(self.counters), self.occupancy(), not self.problem)

    def find(self, root: Root, tokens: bytes) -> list[bytes]:
        """The names of the leading pages of these tokens that are stored."""
        return list(takewhile(self._pages.__contains__, root.names(tokens)))

    def with_side(self, names: Sequence[bytes]) -> int:
        """Number of leading pages up to the last one behind which a window or state is stored, see `side_name`."""
        return next((end for end in range(len(names), 0, -1) if side_name(names[end - 1]) in self._pages), 0)

    def read(self, names: Sequence[bytes], into: Sequence[Buffers]) -> int:
        """Fill buffers with consecutive pages of a context, in several threads, and wait for them.

        Returns the number of right pages, up to the first that is not, which is missing from now on.
        """
        are_right = [*self._readers.map(self._read, names, into), False]
        num_right = are_right.index(False)
        self.counters.read_bytes += sum(len(piece) for page in into[:num_right] for piece in page)
        self._use(names[:num_right])
        return num_right

    def _read(self, name: bytes, page: Buffers) -> bool:
        checksum, num_bytes = bytearray(_CHECKSUM_BYTES), sum(map(len, page))
        with suppress(OSError), open(self._path(name), "rb", buffering=0) as file:
            num_read = os.preadv(file.fileno(), [*page, checksum], 0)
            if num_read == num_bytes + _CHECKSUM_BYTES and checksum == _checksum(page):
                return True
        if self._forget(name):
            self.counters.damaged_pages += 1
            log.warning("kv_disk: a page is damaged or cannot be read, and counts as missing")
        return False

    def write(self, root: Root, tokens: bytes, first: int, pages: Sequence[Buffers]) -> int:
        """Store pages that continue a stored prefix, and wait for the disk. Returns how many are stored now, old or new.

        Args:
            tokens: of the pages and all before them.
            first: number of the first page.
            pages: of the tokens, and perhaps the window or state behind the last one, see `side_name`.
        """
        with self._writing:
            if not self.problem and not self._folder.is_there:
                self._stop(f"the folder {self._folder.path} was moved or removed")
            stored, names = self.find(root, tokens), [*root.names(tokens)]
            if self.problem or len(stored) < first:
                return 0
            if len(pages) > len(names) - first:
                names.append(side_name(names[-1]))
            self._use(stored, lasts=False)
            own, num_written = set(names), 0
            try:
                for name, page in zip(names[first:], pages, strict=True):
                    if not self._write(name, page, own):
                        break
                    num_written += 1
                self._remember("writes", (self.budget.left, self.budget.updated_s))
            except OSError as error:
                self.counters.failures += 1
                if str(error) != self._failure:
                    self._failure = str(error)
                    log.error("writing to kv_disk %s failed: %s", self._folder.path, error)
            self._use(names[: first + num_written])
            return num_written

    def close(self) -> None:
        """End reading and writing. Stored pages stay."""
        with self._writing:
            if not self.problem:
                with suppress(OSError):
                    self._remember("writes", (self.budget.left, self.budget.updated_s))
            self._end()

    def _write(self, name: bytes, page: Buffers, own: set[bytes]) -> bool:
        # False: there is no room beside the pages of its own context, or no budget.
        if name in self._pages:
            return True
        num_bytes, path = sum(map(len, page)), self._folder.path / _NEW_NAME
        if not self.budget.grant(num_bytes, self._clock()):
            self.counters.refused_bytes += num_bytes
            return False
        while self._make_room(num_bytes, own):
            try:
                with open(path, "wb", buffering=0, opener=_private) as file:
                    if os.pwritev(file.fileno(), [*page, _checksum(page)], 0) < num_bytes + _CHECKSUM_BYTES:
                        raise OSError(errno.ENOSPC, "a page was written in part")
                path.rename(self._path(name))
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno not in _FULL:
                    raise
                with self._lock:
                    self._space_bytes = self._used_bytes
                if not self._is_full:
                    self._is_full, space_gib = True, self._space_bytes / 2**30
                    text = "the disk of kv_disk is full: %s has %.2f GiB, and will not take more before the next start"
                    log.error(text, self._folder.path, space_gib)
                continue
            with self._lock:
                self._pages[name] = num_bytes
                self._used_bytes += num_bytes
            self.counters.written_bytes += num_bytes
            return True
        return False

    def _make_room(self, num_bytes: int, own: set[bytes]) -> bool:
        while self._used_bytes + num_bytes > self._space_bytes:
            least_used = next(iter(self._pages), None)
            if least_used is None or least_used in own:
                return False
            self.counters.evicted_pages += self._forget(least_used)
        return True

    def _use(self, names: Sequence[bytes], *, lasts: bool = True) -> None:
        now_ns = time.time_ns()
        for index in range(len(names) - 1, -1, -1):
            with suppress(KeyError), self._lock:
                self._pages.move_to_end(names[index])
            if lasts:  # for later starts too
                with suppress(OSError):
                    os.utime(self._path(names[index]), ns=(now_ns - index, now_ns - index))

    def _forget(self, name: bytes) -> bool:
        with self._lock:
            num_bytes = self._pages.pop(name, None)
            self._used_bytes -= num_bytes or 0
        if num_bytes is not None:
            self._path(name).unlink(missing_ok=True)
        return num_bytes is not None

    def _path(self, name: bytes) -> Path:
        return self._folder.path / f"data-{name.hex()}"

    def check(self) -> None:
        """Assert that every page has a file, and every file a page."""
        with self._lock:
            assert sum(self._pages.values()) == self._used_bytes <= self._space_bytes
            assert {self._path(name) for name in self._pages} == {*self._folder.path.glob("data-*")}

    # -- beginning and end -----------------------------------------------------------------------------------------

    def _open(self, daily_bytes: float) -> None:
        try:
            used = list[tuple[int, bytes, int]]()
            for path in self._folder.path.glob("data-*"):
                if len(text := path.name.removeprefix("data-")) == 2 * _DIGEST_BYTES:
                    status = path.stat()
                    used.append((status.st_mtime_ns, bytes.fromhex(text), max(0, status.st_size - _CHECKSUM_BYTES)))
                else:
                    path.unlink()  # not whole, or of another format
            self._pages.update((name, num_bytes) for _, name, num_bytes in sorted(used))
            self._used_bytes = sum(self._pages.values())
            self._make_room(0, set())
            self._memory = self._remembered()
        except (OSError, ValueError) as error:
            got, fix = f"{self._folder.path}: {error}", "give a folder on a disk that works and has room"
            raise ConfigError("kv_disk cannot be opened", got=got, fix=fix) from None
        try:
            left_bytes, updated_s = map(float, self._memory["writes"])
        except (KeyError, TypeError, ValueError):
            left_bytes, updated_s = daily_bytes, self._clock()
        self.budget = WriteBudget(daily_bytes, min(max(0.0, left_bytes), daily_bytes), updated_s)

    def _remembered(self) -> dict[str, Any]:
        try:
            memory = json.loads((self._folder.path / _MEMORY_NAME).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return memory if isinstance(memory, dict) else {}

    def _remember(self, key: str, value: Any) -> None:
        self._memory[key] = value
        path, new = self._folder.path / _MEMORY_NAME, self._folder.path / f"new-{_MEMORY_NAME}"
        new.touch(0o600)
        new.write_text(json.dumps(self._memory), encoding="utf-8")
        new.replace(path)

    def _stop(self, problem: str) -> None:
        self.problem = problem
        log.error("kv_disk stores no more contexts before the next start: %s", problem)

    def _end(self) -> None:
        self._readers.shutdown()
        self._folder.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _checksum(page: Buffers) -> bytes:
    crc = 0
    for piece in page:
        crc = zlib.crc32(piece, crc)
    return crc.to_bytes(_CHECKSUM_BYTES)
