"""Disk tier: pages of KV on disk, a file each, written once, found by their tokens, and checked as they are read.

A page's name is a digest of its tokens and of all before them, so contexts with a common beginning share its files. Every file
ends with a checksum, and gets its name when it is whole: a damaged page, or one that a killed process was writing, is missing.
Failures are logged; a caller sees fewer pages. Knows no arrays, no contexts and no policy. The folder is its owner's alone, and
used by one server at a time.
"""

import errno
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, final

from jinfercept.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_NAME = "jinfercept-kv.lock"
_OTHERS_ALLOWED = {"lost+found"}


@final
class Folder:
    """A folder that this process has locked, with room for `space_bytes` of files.

    It is created if it does not exist. An existing one is empty, or a disk tier's.

    Raises:
        ConfigError: it cannot be written, is used by another server or for other files, or has less space.
    """

    def __init__(self, path: Path, space_bytes: int) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_use()
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:  # ValueError: a text that can be no path
            if isinstance(error, ConfigError):
                raise
            fix = "give a folder that this user may write"
            raise ConfigError("kv_disk cannot be written", got=f"{str(path)!r}: {error}", fix=fix) from None
        try:
            self._take_lock()
            self._check_space(space_bytes)
        except BaseException:
            self.close()
            raise
        self._make_private()

    @property
    def is_there(self) -> bool:
        """Whether the folder still is at its path: neither moved, removed, nor hidden by a mount."""
        try:
            return os.path.samestat(os.stat(self.path / LOCK_NAME), os.fstat(self._lock))
        except OSError:
            return False

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._lock)

    def _check_use(self) -> None:
        names = {entry.name for entry in os.scandir(self.path)} - _OTHERS_ALLOWED
        if names and LOCK_NAME not in names:
            got, fix = f"{self.path} with {len(names)} entries", "give a new or an empty folder, such as one inside it"
            raise ConfigError("the folder of kv_disk holds files of another program", got=got, fix=fix)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.pread(self._lock, 40, 0).decode(errors="replace") or "unknown"
            raise ConfigError(
                "the folder of kv_disk is used by another server",
                got=f"{self.path}, used by process {process}",
                fix="give each server a folder of its own, or end the other one first",
            ) from None
        except OSError as error:
            log.warning("the file system of %s has no locks (%s): start no second server on it", self.path, error)
            return
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _check_space(self, space_bytes: int) -> None:
        usage = shutil.disk_usage(self.path)
        used = sum(path.stat().st_blocks * 512 for path in self.path.glob("data-*"))
        if space_bytes > usage.free + used:
            got = f"{_gib(space_bytes)} where {_gib(usage.free + used)} are free"
            raise ConfigError("kv_disk_space is more than the disk has free", got=got, fix="ask for less, or free some")

    def _make_private(self) -> None:
        try:
            self.path.chmod(0o700)
        except OSError:  # another user's folder, as volumes of containers are
            log.warning("%s belongs to another user: its files are private, their names and sizes are not", self.path)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


MEASURED_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_SMALL_BYTES = 4096
_NUM_SMALL = 16


class DiskSpeed(NamedTuple):
    """The speed of a disk, by large pieces, several at a time. Written bytes have reached the disk."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float  # until the first bytes of a read


def measure_speed(
    folder: Path,
    threads: Executor,
    num_bytes: int = MEASURED_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> DiskSpeed:
    """Measure a folder's disk with a file that is removed again. Raises `OSError`."""
    piece = secrets.token_bytes(_PIECE_BYTES)  # a file system that compresses must not find it small
    offsets = range(0, num_bytes, _PIECE_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        started_s = clock()
        list(threads.map(lambda offset: os.pwrite(descriptor, piece, offset), offsets))
        os.fsync(descriptor)
        written_s = clock() - started_s

        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        waits_s = []
        for offset in offsets[:: max(1, len(offsets) // _NUM_SMALL)]:
            started_s = clock()
            os.pread(descriptor, _SMALL_BYTES, offset)
            waits_s.append(clock() - started_s)

        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = clock()
        list(threads.map(lambda offset: os.preadv(descriptor, [bytearray(_PIECE_BYTES)], offset), offsets))
        read_s = clock() - started_s
    size = len(offsets) * _PIECE_BYTES
    return DiskSpeed(size / max(read_s, 1e-9), size / max(written_s, 1e-9), sorted(waits_s)[len(waits_s) // 2])


FORMAT = 3
"""Of the files. Pages of other formats are missing."""
_NUM_READERS = 8
_LEAST_BYTES = 4096
_CHECKSUM_BYTES = 4
_DIGEST_BYTES = 32
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEW_NAME = "data-new"
"""File of the page that is being written."""
_SPEED_NAME = "speed.txt"
"""File that remembers the disk's speed between starts."""

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

    Raises:
        ConfigError: the folder cannot be used, see `Folder`.
    """

    def __init__(self, path: Path, space_bytes: int) -> None:
        if space_bytes < _LEAST_BYTES:
            raise ConfigError("kv_disk_space is too small", got=f"{space_bytes} bytes", fix="give at least some GiB")
        self._folder = Folder(path, space_bytes)
        # `problem` is why nothing is written any more; "" while the store works.
        self.counters, self.problem, self._failure = DiskCounters(), "", ""
        self._lock = threading.Lock()  # of the pages and their bytes
        self._writing = threading.Lock()  # of new files
        self._is_full = False  # sooner than was said
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kv-disk-read")
        # Bytes by name, in the order of the last use; of one use the last page of a context first, which is of use to no other.
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self._used_bytes, self._space_bytes = 0, space_bytes
        try:
            self._open()
        except BaseException:
            self._end()
            raise

    def occupancy(self) -> DiskOccupancy:
        with self._lock:
            return DiskOccupancy(self._used_bytes, self._space_bytes, len(self._pages))

    def speed(self) -> DiskSpeed:
        """The speed of the disk, as it was measured when the folder was first used. Raises `OSError`."""
        with self._writing:
            path = self._folder.path / _SPEED_NAME
            try:
                return DiskSpeed(*map(float, path.read_text(encoding="utf-8").split()))
            except (FileNotFoundError, TypeError, ValueError):
                speed = measure_speed(self._folder.path, self._readers, min(MEASURED_BYTES, self._space_bytes))
                new = path.with_suffix(".new")
                new.touch(0o600)
                new.write_text(" ".join(map(str, speed)), encoding="utf-8")
                new.replace(path)
                return speed

    def state(self) -> DiskState:
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
            self._end()

    def _write(self, name: bytes, page: Buffers, own: set[bytes]) -> bool:
        # False: there is no room beside the pages of its own context.
        if name in self._pages:
            return True
        num_bytes, path = sum(map(len, page)), self._folder.path / _NEW_NAME
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

    def _open(self) -> None:
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
        except (OSError, ValueError) as error:
            got, fix = f"{self._folder.path}: {error}", "give a folder on a disk that works and has room"
            raise ConfigError("kv_disk cannot be opened", got=got, fix=fix) from None

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
