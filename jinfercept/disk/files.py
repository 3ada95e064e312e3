"""The data files of a folder, one for each record: pages are written to them once, and read, in several threads.

A file is preallocated, so that a full disk shows then and not in the middle of a write.
"""

import errno
import os
import zlib
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import final

from jinfercept.disk.record import Record, RecordData

_NUM_READERS = 8
_NUM_WRITERS = 2
_GROUP_BYTES = 4 << 20
"""Bytes that a thread reads or writes before the next one has its turn."""
_NO_PREALLOCATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Buffers = Sequence[memoryview]
"""The bytes of one page, in pieces."""


@final
class RecordFiles:
    """The files, and the threads that read and write them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.readers = ThreadPoolExecutor(_NUM_READERS, "kv-disk-read")
        self.writers = ThreadPoolExecutor(_NUM_WRITERS, "kv-disk-write")

    def sizes(self) -> dict[str, int]:
        """The bytes of every file, by name."""
        return {path.name: path.stat().st_size for path in self._folder.glob("data-*")}

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self._folder / name).unlink(missing_ok=True)

    def read(self, spans: Iterable[tuple[Record, range]], into: Sequence[Buffers]) -> list[tuple[int, Record]]:
        """Fill buffers with pages of records.

        Args:
            spans: the records, and the numbers of the pages in them, as many as there are buffers.

        Returns:
            The numbers of buffers whose pages are wrong, one at least if any is, with their records.
        """
        groups, number = list[tuple[int, Record, range]](), 0
        for record, pages in spans:
            size = max(1, _GROUP_BYTES // record.root.kv_bytes)
            groups += [(number + start, record, pages[start : start + size]) for start in range(0, len(pages), size)]
            number += len(pages)

        def read_group(group: tuple[int, Record, range]) -> tuple[int, Record] | None:
            number, record, pages = group
            (file, checksums), size = record.data, record.root.kv_bytes
            with suppress(OSError), open(self._folder / file, "rb", buffering=0) as opened:
                for index in pages:
                    num_bytes = os.preadv(opened.fileno(), into[number], index * size)
                    if num_bytes < size or _checksum(into[number]) != checksums[index]:
                        return number, record
                    number += 1
                return None
            return number, record

        return [wrong for wrong in self.readers.map(read_group, groups) if wrong is not None]

    def write(self, pages: Sequence[Buffers]) -> RecordData | None:
        """Write pages of the same size to a new file; None if there is no room. Raises `OSError`."""
        data = RecordData(f"data-{token_hex(8)}", array("I", bytes(4 * len(pages))))
        size = sum(len(piece) for piece in pages[0])
        group = max(1, _GROUP_BYTES // size)
        path = self._folder / data.file
        try:
            with open(path, "xb", buffering=0, opener=_private) as file:
                if not _allocate(file.fileno(), size * len(pages)):
                    path.unlink()
                    return None

                def write_group(start: int) -> None:
                    for index in range(start, min(start + group, len(pages))):
                        data.checksums[index] = _checksum(pages[index])
                        if os.pwritev(file.fileno(), pages[index], index * size) < size:
                            raise OSError(errno.EIO, "a page was written in part")

                list(self.writers.map(write_group, range(0, len(pages), group)))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return data

    def close(self) -> None:
        """End the threads."""
        self.readers.shutdown()
        self.writers.shutdown()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _allocate(file: int, num_bytes: int) -> bool:
    """Give a file its size; False if the disk has no room."""
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno in _FULL:
            return False
        if error.errno not in _NO_PREALLOCATION:
            raise
    return True


def _checksum(page: Buffers) -> int:
    crc = 0
    for piece in page:
        crc = zlib.crc32(piece, crc)
    return crc
