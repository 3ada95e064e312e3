"""Blocks of a folder's data files: which are free, and reading and writing runs of them.

The files are preallocated as their blocks are first taken, so that a full disk shows then and not in the middle of a write.
"""

import errno
import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

BLOCK_BYTES = 4096
FILE_BLOCKS = (4 << 30) // BLOCK_BYTES
"""Blocks of a file, but for the last one."""
_NO_PREALLOCATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class BlockRun(NamedTuple):
    """Consecutive blocks."""

    start: int
    size: int


BlockRuns = tuple[BlockRun, ...]
"""The blocks of a record, in the order of its bytes."""
Buffers = Sequence[memoryview]
"""The bytes of one page, in pieces."""


def cut(runs: BlockRuns, first: int, count: int) -> BlockRuns:
    """The blocks `first … first + count - 1` of these."""
    part: list[BlockRun] = []
    for run in runs:
        if first < run.size and count:
            piece = BlockRun(run.start + first, min(count, run.size - first))
            part.append(piece)
            count -= piece.size
        first = max(0, first - run.size)
    return tuple(part)


def _file_numbers(run: BlockRun) -> range:
    return range(run.start // FILE_BLOCKS, (sum(run) - 1) // FILE_BLOCKS + 1)


@final
class BlockPool:
    """The free blocks of a space, as runs in the order of their numbers."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self._free = [BlockRun(0, num_blocks)] if num_blocks else []

    def take(self, count: int) -> BlockRuns:
        """So many free blocks, of which there are enough: one run if there is such a run, else the first ones."""
        assert count <= self.num_free
        whole = next((run for run in self._free if run.size >= count), None)
        pieces: list[BlockRun] = []
        for run in [whole] if whole is not None else [*self._free]:
            piece = BlockRun(run.start, min(count, run.size))
            pieces.append(piece)
            self._remove(piece)
            count -= piece.size
            if not count:
                break
        return tuple(pieces)

    def give(self, runs: BlockRuns) -> None:
        """Free blocks that were taken."""
        for run in runs:
            start, end = run.start, min(run.start + run.size, self.num_blocks)
            if start >= end:
                continue
            self.num_free += end - start
            index = bisect_left(self._free, BlockRun(start, 0))
            if index < len(self._free) and self._free[index].start == end:
                end += self._free.pop(index).size
            if index and sum(self._free[index - 1]) == start:
                start = self._free.pop(index - 1).start
            insort(self._free, BlockRun(start, end - start))

    def reserve(self, runs: BlockRuns) -> bool:
        """Take these blocks; False if one of them is not free, and then none is taken."""
        taken_runs: list[BlockRun] = []
        for run in runs:
            if not self._remove(run):
                self.give(tuple(taken_runs))
                return False
            taken_runs.append(run)
        return True

    def shrink(self, num_blocks: int) -> None:
        """Do without the blocks from number `num_blocks` on, all of which are free."""
        for run in [run for run in self._free if sum(run) > num_blocks]:
            start = max(run.start, num_blocks)
            self._remove(BlockRun(start, sum(run) - start))
        self.num_blocks = num_blocks

    def _remove(self, run: BlockRun) -> bool:
        """Take one run of free blocks; False if it is not free."""
        index = bisect_left(self._free, BlockRun(run.start + 1, 0)) - 1
        if index < 0 or run.size < 1 or sum(self._free[index]) < sum(run):
            return False
        around = self._free.pop(index)
        for rest in (BlockRun(sum(run), sum(around) - sum(run)), BlockRun(around.start, run.start - around.start)):
            if rest.size:
                self._free.insert(index, rest)
        self.num_free -= run.size
        return True


@final
class BlockFiles:
    """The data files of a folder.

    Args:
        num_blocks: most blocks.
    """

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self._folder, self._num_blocks = folder, num_blocks
        self._files: dict[int, int] = {}

    def open(self) -> None:
        """Open the files that exist, and remove or shorten those that have more than the most blocks."""
        for path in sorted(self._folder.glob("data-*")):
            number = int(path.name.removeprefix("data-"))
            num_bytes = self._bytes(number)
            if num_bytes <= 0:
                path.unlink()
                continue
            self._files[number] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if path.stat().st_size > num_bytes:
                os.ftruncate(self._files[number], num_bytes)

    def have(self, runs: BlockRuns) -> bool:
        """Whether the files have these blocks."""
        for run in runs:
            for number in _file_numbers(run):
                end = min(sum(run), (number + 1) * FILE_BLOCKS) - number * FILE_BLOCKS
                if number not in self._files or os.fstat(self._files[number]).st_size < end * BLOCK_BYTES:
                    return False
        return True

    def prepare(self, runs: BlockRuns) -> int | None:
        """Preallocate the files of these blocks. Returns the first block for which there is no room; None: all have room."""
        for number in sorted({number for run in runs for number in _file_numbers(run)}):
            file = self._files.get(number)
            num_bytes = 0 if file is None else os.fstat(file).st_size
            if num_bytes < self._bytes(number):
                try:
                    self._allocate(number)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise
                    return number * FILE_BLOCKS + num_bytes // BLOCK_BYTES
        return None

    def read(self, runs: BlockRuns, into: Buffers) -> None:
        """Fill the buffers from these blocks. Raises `OSError`, also if a file is shorter than its blocks."""
        for file, offset, view in self._spans(runs, into):
            while view:
                num_bytes = os.preadv(file, [view], offset)
                if not num_bytes:
                    raise OSError(errno.EIO, "a data file is shorter than its blocks")
                view, offset = view[num_bytes:], offset + num_bytes

    def write(self, runs: BlockRuns, data: Buffers) -> None:
        """Write the buffers to these blocks, which are prepared. Raises `OSError`."""
        for file, offset, view in self._spans(runs, data):
            while view:
                num_bytes = os.pwrite(file, view, offset)
                view, offset = view[num_bytes:], offset + num_bytes

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def clear(self) -> None:
        self.close()
        for path in self._folder.glob("data-*"):
            path.unlink()

    def _bytes(self, number: int) -> int:
        return min(FILE_BLOCKS, self._num_blocks - number * FILE_BLOCKS) * BLOCK_BYTES

    def _allocate(self, number: int) -> None:
        path = self._folder / f"data-{number:04}"
        is_new = number not in self._files
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if is_new else self._files[number]
        try:
            os.posix_fallocate(file, 0, self._bytes(number))
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                if is_new:
                    os.close(file)
                    path.unlink()
                raise
            os.ftruncate(file, self._bytes(number))
        self._files[number] = file

    def _spans(self, runs: Iterable[BlockRun], buffers: Buffers) -> Iterator[tuple[int, int, memoryview]]:
        """Pieces of the buffers that are consecutive in a file: the file, the offset in it, and the piece."""
        ranges = iter(runs)
        offset = end = 0
        for view in buffers:
            while view:
                if offset == end:
                    run = next(ranges)
                    offset, end = run.start * BLOCK_BYTES, sum(run) * BLOCK_BYTES
                number, within = divmod(offset, FILE_BLOCKS * BLOCK_BYTES)
                size = min(len(view), end - offset, FILE_BLOCKS * BLOCK_BYTES - within)
                if number not in self._files:
                    raise OSError(errno.ENOENT, "a data file is missing")
                yield self._files[number], within, view[:size]
                view, offset = view[size:], offset + size
