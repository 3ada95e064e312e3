"""Measures how fast a folder's disk is read and written, beside the page cache."""

import os
import secrets
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

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
