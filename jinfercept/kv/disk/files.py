"""The data files of a folder, one for each record: written once, and read, in several threads.

A file has the pages, and behind them what the record is: JSON, its SHA-256, and its length in 8 bytes. That is written last, so
that a process that is killed leaves a file that is no record's. A file is preallocated, so that a full disk shows then and not
in the middle of a write.
"""

import errno
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import final

from jinfercept.kv.disk.record import Record, RecordData, Root, StoredRecord

FORMAT = 2
"""Of the files. What another one wrote is deleted."""
_SEAL_BYTES = 40
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

    def records(self) -> Iterator[StoredRecord]:
        """What the files say; those that are damaged, of another format or not complete are deleted."""
        paths = [*self._folder.glob("data-*")]
        for path, stored in zip(paths, self.readers.map(_stored, paths), strict=True):
            if stored is None:
                path.unlink()
            else:
                yield stored

    def touch(self, name: str) -> None:
        """Note that a file is used now, for later starts."""
        with suppress(OSError):
            os.utime(self._folder / name)

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

    def write(self, record: Record, pages: Sequence[Buffers]) -> bool:
        """Write a record's pages, and note their checksums in it; False if there is no room. Raises `OSError`."""
        size, checksums = record.root.kv_bytes, record.data.checksums
        group = max(1, _GROUP_BYTES // size)
        path = self._folder / record.data.file
        try:
            with open(path, "xb", buffering=0, opener=_private) as file:
                if not _allocate(file.fileno(), record.num_bytes + len(_description(record))):
                    path.unlink()
                    return False

                def write_group(start: int) -> None:
                    for index in range(start, min(start + group, len(pages))):
                        checksums[index] = _checksum(pages[index])
                        if os.pwritev(file.fileno(), pages[index], index * size) < size:
                            raise OSError(errno.EIO, "a page was written in part")

                list(self.writers.map(write_group, range(0, len(pages), group)))
                os.pwrite(file.fileno(), _description(record), record.num_bytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return True

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


def new_data(num_pages: int) -> RecordData:
    """A new file's name, and room for the checksums of its pages."""
    return RecordData(f"data-{token_hex(8)}", array("I", bytes(4 * num_pages)))


def _description(record: Record) -> bytes:
    """What stands behind the pages; as long before their checksums are noted as afterwards."""
    root, parent = record.root, record.parent
    facts = {
        "format": FORMAT,
        "root": [root.digest.hex(), root.token_bytes, root.kv_bytes],
        "parent": "" if parent is None or parent.parent is None else parent.name.hex(),
        "start": record.start,
        "tokens": record.tokens.hex(),
        "checksums": record.data.checksums.tobytes().hex(),
    }
    text = json.dumps(facts).encode()
    return text + hashlib.sha256(text).digest() + len(text).to_bytes(8)


def _stored(path: Path) -> StoredRecord | None:
    """The record of a file; None if it has none."""
    with suppress(OSError, ValueError, KeyError), open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        seal = os.pread(file.fileno(), _SEAL_BYTES, max(0, status.st_size - _SEAL_BYTES))
        num_bytes = status.st_size - _SEAL_BYTES - int.from_bytes(seal[32:])
        text = os.pread(file.fileno(), int.from_bytes(seal[32:]), num_bytes) if num_bytes >= 0 else b""
        if hashlib.sha256(text).digest() != seal[:32] or (facts := json.loads(text))["format"] != FORMAT:
            return None
        (digest, token_bytes, kv_bytes), tokens = facts["root"], bytes.fromhex(facts["tokens"])
        root = Root(bytes.fromhex(digest), token_bytes, kv_bytes)
        data = RecordData(path.name, array("I", bytes.fromhex(facts["checksums"])))
        if num_bytes != len(data.checksums) * kv_bytes:
            return None
        return StoredRecord(root, bytes.fromhex(facts["parent"]), facts["start"], tokens, data, status.st_mtime)
    return None
