"""Moves pages between buffers and blocks, in several threads, with their checksums."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from jinfercept.disk.blocks import BlockFiles, Buffers, cut
from jinfercept.disk.record import Record, RecordData, Root

_NUM_READERS = 8
_NUM_WRITERS = 2
_GROUP_BYTES = 4 << 20
"""Bytes that a thread reads or writes before the next one has its turn."""


class RecordPages(NamedTuple):
    """Leading pages of one record."""

    record: Record
    extent: RecordData
    num_pages: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """Pages of some tokens that can be read until `DiskStore.release`.

    Attributes:
        num_pages: leading pages.
    """

    num_pages: int
    parts: tuple[RecordPages, ...]

    def locate(self, first: int, count: int) -> Iterator[tuple[RecordPages, int]]:
        """The part of each of so many pages, and the page's number in it."""
        for part in self.parts:
            within = range(first, min(part.num_pages, first + count))
            yield from ((part, index) for index in within)
            count -= len(within)
            first = max(0, first - part.num_pages)


@final
class PageIO:
    """The data files of a folder, and the threads that read and write them.

    Args:
        num_blocks: most blocks of all files.
    """

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.files = BlockFiles(folder, num_blocks)
        self.readers = ThreadPoolExecutor(_NUM_READERS, "kv-disk-read")
        self.writers = ThreadPoolExecutor(_NUM_WRITERS, "kv-disk-write")

    def read(self, pages: Sequence[tuple[RecordPages, int]], into: Sequence[Buffers]) -> list[int]:
        """Fill buffers with these pages; returns the numbers of pages that are wrong, one at least if any is."""

        def read_group(start: int, end: int) -> int | None:
            for number in range(start, min(end, len(pages))):
                part, index = pages[number]
                page_blocks = part.record.root.page_blocks
                with suppress(OSError):
                    self.files.read(cut(part.extent.runs, index * page_blocks, page_blocks), into[number])
                    if part.extent.checksum(index, into[number]) == part.extent.checksums[index]:
                        continue
                return number
            return None

        groups = _groups(len(pages), into)
        return [number for number in self.readers.map(read_group, *zip(*groups, strict=True)) if number is not None]

    def write(self, root: Root, extent: RecordData, pages: Sequence[Buffers]) -> None:
        """Write pages to the blocks of an extent, and note their checksums in it. Raises `OSError`."""

        def write_group(start: int, end: int) -> None:
            for index in range(start, min(end, len(pages))):
                extent.checksums[index] = extent.checksum(index, pages[index])
                self.files.write(cut(extent.runs, index * root.page_blocks, root.page_blocks), pages[index])

        list(self.writers.map(write_group, *zip(*_groups(len(pages), pages), strict=True)))

    def close(self) -> None:
        """End the threads and close the files."""
        self.readers.shutdown()
        self.writers.shutdown()
        self.files.close()


def _groups(count: int, pages: Sequence[Buffers]) -> list[tuple[int, int]]:
    """The pages of every thread's turn: first and end."""
    page_bytes = sum(len(piece) for piece in pages[0]) if pages else 1
    size = max(1, _GROUP_BYTES // page_bytes)
    return [(start, start + size) for start in range(0, count, size)] or [(0, 0)]
