"""The folder of the disk tier and the disk below it: its owner's alone, used by one server at a time, how fast it is, and how
much may be written to it per day, since drives wear. What a user should know of its file system is logged.
"""

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import psutil

from jinfercept.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_NAME = "jinfercept-kv.lock"
_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
_MEMORY = {"ramfs", "tmpfs"}
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
        self._log_caveats()

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
        self.drive_bytes = usage.total
        used = sum(path.stat().st_blocks * 512 for path in self.path.glob("data-*"))
        if space_bytes > usage.free + used:
            got = f"{_gib(space_bytes)} where {_gib(usage.free + used)} are free"
            raise ConfigError("kv_disk_space is more than the disk has free", got=got, fix="ask for less, or free some")

    def _make_private(self) -> None:
        try:
            self.path.chmod(0o700)
        except OSError:  # another user's folder, as volumes of containers are
            log.warning("%s belongs to another user: its files are private, their names and sizes are not", self.path)

    def _log_caveats(self) -> None:
        kind = file_system(self.path)
        if kind in _NETWORK or kind.startswith("fuse."):
            log.warning(
                "kv_disk is on a network file system (%s): reading from it may take longer than recomputing, which is "
                "measured, and its locks may not hold between machines; a disk of this machine is better",
                kind,
            )
        elif kind in _MEMORY:
            log.warning("kv_disk is in memory (%s): contexts do not survive a restart of the machine", kind)


def file_system(path: Path) -> str:
    """The kind of a path's file system, as Linux names it; "" if that is unknown."""
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    resolved = path.resolve()
    return next((kinds[str(parent)] for parent in (resolved, *resolved.parents) if str(parent) in kinds), "")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


MEASURED_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_SMALL_BYTES = 4096
_NUM_SMALL = 16
DAY_S = 86400.0
DRIVE_WRITES_PER_DAY = 1.0
"""Writes of the whole drive per day for which drives of data centres are specified over five years; those of PCs: 0.3."""


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


@final
@dataclass(slots=True)
class WriteBudget:
    """A bucket that fills evenly, with a day's bytes at most."""

    bytes_per_day: float
    left: float  # bytes that may be written now
    updated_s: float  # Unix time of `left`

    def grant(self, num_bytes: int, now_s: float) -> bool:
        """Count `num_bytes` if they may be written now; False if not."""
        self.advance(now_s)
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True

    def advance(self, now_s: float) -> None:
        """Add the bytes of the time that has passed. A clock that was set back adds none."""
        elapsed_s = max(0.0, now_s - self.updated_s)
        self.left = min(self.bytes_per_day, self.left + self.bytes_per_day * elapsed_s / DAY_S)
        self.updated_s = now_s
