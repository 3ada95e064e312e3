"""The store: pages of KV on disk, written once, found by their tokens, and checked as they are read.

A page that is damaged, or of which the power took a part, is missing: every page has a checksum. A process that is killed loses
what it was writing. What fails is logged; a caller sees fewer pages.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from jinfercept.errors import ConfigError
from jinfercept.kv.disk.files import Buffers, RecordFiles, new_data
from jinfercept.kv.disk.folder import Folder
from jinfercept.kv.disk.record import Match, Record, Root, Tree
from jinfercept.kv.disk.speed import DRIVE_WRITES_PER_DAY, MEASURED_BYTES, DiskSpeed, WriteBudget, measure_speed

log = logging.getLogger(__name__)

RECORD_BYTES = 256 << 20
"""Most bytes of a record: a kill loses at most the record being written, and an eviction frees whole records."""
_SHARE = 32
"""A record takes at most this part of the space."""
_LEAST_BYTES = 4096
_MEMORY_NAME = "memory.json"
"""File of what is remembered between starts: the disk's speed, and what may be written."""


@dataclass(slots=True)
class DiskCounters:
    """What a store has done since the process started.

    Attributes:
        read_bytes, written_bytes: of pages.
        refused_bytes: that the write budget did not allow.
        evicted_pages: for whose blocks others were written.
        damaged_pages: that did not have their checksum, or could not be read.
        failures: of writes.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    refused_bytes: int = 0
    evicted_pages: int = 0
    damaged_pages: int = 0
    failures: int = 0


class DiskOccupancy(NamedTuple):
    """Space in bytes, and records."""

    used_bytes: int
    total_bytes: int
    num_records: int


class DiskState(NamedTuple):
    """What metrics show of a store.

    Attributes:
        writes_left_bytes: that may be written now.
        works: whether contexts are still stored.
    """

    counters: DiskCounters
    occupancy: DiskOccupancy
    writes_left_bytes: float
    works: bool


@final
class DiskStore:
    """The pages in a folder, of any models. Its methods may be called from any thread.

    Args:
        path: of the folder, which is created if it does not exist.
        space_bytes: that the pages may take.
        daily_bytes: that may be written per day; None: as many as the drive is specified for, `DRIVE_WRITES_PER_DAY`.
        clock: Unix time.

    Attributes:
        problem: why nothing is written any more; "" while it works.

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
        self.counters, self.problem, self._failure = DiskCounters(), "", ""
        self._lock = threading.Lock()  # of the tree, the bytes and the records that are gone
        self._writing = threading.Lock()  # of the files and the budget
        self._gone: list[Record] = []  # whose files are to be deleted
        self._is_full = False  # sooner than was said
        self._files = RecordFiles(self._folder.path)
        self._tree, self._used_bytes, self._space_bytes = Tree(), 0, space_bytes
        try:
            self._open(self._folder.drive_bytes * DRIVE_WRITES_PER_DAY if daily_bytes is None else daily_bytes)
        except BaseException:
            self._end()
            raise

    def occupancy(self) -> DiskOccupancy:
        """How full it is."""
        with self._lock:
            return DiskOccupancy(self._used_bytes, self._space_bytes, len(self._tree.records))

    def speed(self) -> DiskSpeed:
        """Of the disk: as it was measured when the folder was first used. Raises `OSError`."""
        with self._writing:
            try:
                return DiskSpeed(*map(float, self._memory["speed"]))
            except (KeyError, TypeError, ValueError):
                num_bytes, files = min(MEASURED_BYTES, self._space_bytes), self._files
                speed = measure_speed(self._folder.path, files.readers, files.writers, num_bytes)
                self._remember("speed", speed)
                return speed

    def state(self) -> DiskState:
        """What metrics show."""
        self.budget.advance(self._clock())
        return DiskState(replace(self.counters), self.occupancy(), self.budget.left, not self.problem)

    # -- reading ---------------------------------------------------------------------------------------------------

    def num_stored(self, root: Root, tokens: bytes) -> int:
        """Leading pages of these tokens that are stored."""
        with self._lock:
            return self._tree.match(root, tokens).num_pages

    def find(self, root: Root, tokens: bytes) -> Match:
        """The longest stored prefix of these tokens, to be read and then released."""
        with self._lock:
            match = self._tree.match(root, tokens)
            self._tree.use(match)
            match.pin(1)
        for record, _ in match.parts:
            self._files.touch(record.data.file)
        return match

    def read(self, prefix: Match, first: int, into: Sequence[Buffers]) -> int:
        """Fill buffers with the pages of a prefix, in several threads; waits for them.

        Args:
            prefix: not yet released.
            first: number of the first page.

        Returns:
            How many of them are right, up to the first that is not, which is missing from now on.
        """
        wrong = self._files.read(prefix.spans(first, len(into)), into)
        num_right = min([number for number, _ in wrong], default=min(len(into), max(0, prefix.num_pages - first)))
        self.counters.read_bytes += sum(len(piece) for page in into[:num_right] for piece in page)
        if wrong:
            self._discard([record for _, record in wrong])
        return num_right

    def release(self, prefix: Match) -> None:
        """The pages of a prefix are no longer read."""
        with self._lock:
            prefix.pin(-1)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, root: Root, tokens: bytes, first: int, pages: Sequence[Buffers]) -> int:
        """Store pages that continue a stored prefix. Waits for the disk.

        Args:
            tokens: of the pages and all before them.
            first: number of the first page.

        Returns:
            How many of them are stored now, those included that were.
        """
        with self._writing:
            if not self.problem and not self._folder.is_there:
                self._stop(f"the folder {self._folder.path} was moved or removed")
            if self.problem:
                return 0
            try:
                return self._write(root, tokens, first, pages)
            except OSError as error:
                self.counters.failures += 1
                if str(error) != self._failure:
                    self._failure = str(error)
                    log.error("writing to kv_disk %s failed: %s", self._folder.path, error)
                return 0

    def close(self) -> None:
        """End reading and writing. What is stored stays."""
        with self._writing:
            if not self.problem:
                with suppress(OSError):
                    self._delete_gone()
                    self._remember("writes", (self.budget.left, self.budget.updated_s))
            self._end()

    def _write(self, root: Root, tokens: bytes, first: int, pages: Sequence[Buffers]) -> int:
        stored = self.num_stored(root, tokens)
        if stored < first:
            return 0
        num_written = min(stored - first, len(pages))
        most_pages = max(1, min(RECORD_BYTES, self._space_bytes // _SHARE) // root.kv_bytes)
        while num_written < len(pages):
            end = min(num_written + most_pages, len(pages))
            if not self._add(root, tokens[: (first + end) * root.token_bytes], pages[num_written:end]):
                break
            num_written = end
        return num_written

    def _add(self, root: Root, tokens: bytes, pages: Sequence[Buffers]) -> bool:
        """Store a record that continues what is stored; False if there is no room or no budget."""
        num_bytes = len(pages) * root.kv_bytes
        if not self.budget.grant(num_bytes, self._clock()):
            self.counters.refused_bytes += num_bytes
            return False
        self._remember("writes", (self.budget.left, self.budget.updated_s))
        with self._lock:
            match = self._tree.match(root, tokens)
            match.pin(1)
        try:
            while self._make_room(num_bytes):
                record = match.continued(tokens, new_data(len(pages)))
                if self._files.write(record, pages):
                    self.counters.written_bytes += num_bytes
                    return self._enter(record, match)
                with self._lock:
                    self._space_bytes = self._used_bytes
                if not self._is_full:
                    self._is_full, space_gib = True, self._space_bytes / 2**30
                    text = "the disk of kv_disk is full: %s has %.2f GiB, and will not take more before the next start"
                    log.error(text, self._folder.path, space_gib)
            return False
        finally:
            with self._lock:
                match.pin(-1)

    def _make_room(self, num_bytes: int) -> bool:
        """Make sure that so many bytes are free, if need be those of the least used records; False if there are not as many."""
        with self._lock:
            lacking = self._used_bytes + num_bytes - self._space_bytes
            while lacking > 0 and (record := self._tree.least_used()) is not None:
                lacking -= record.num_bytes
                self.counters.evicted_pages += record.num_pages
                self._gone += self._tree.remove(record)
        if lacking > 0:
            return False
        self._delete_gone()
        return self._used_bytes + num_bytes <= self._space_bytes

    def _enter(self, record: Record, match: Match) -> bool:
        """Enter a record that is written; False if what it continues is gone."""
        with self._lock:
            self._used_bytes += record.num_bytes
            record.is_gone = any(ancestor.is_gone for ancestor, _ in match.parts)
            if record.is_gone:
                self._gone.append(record)
            else:
                self._tree.insert(record, match)
            return not record.is_gone

    def _delete_gone(self) -> None:
        """Delete the files of records that are gone and not read."""
        with self._lock:
            unread = [record for record in self._gone if not record.pins]
            self._gone = [record for record in self._gone if record.pins]
            self._used_bytes -= sum([record.num_bytes for record in unread])
        for record in unread:
            self._files.delete(record.data.file)

    def _discard(self, records: Sequence[Record]) -> None:
        """Take damaged records and what continues them out of the tree; their files are deleted by the next write."""
        with self._lock:
            removed = [gone for record in records for gone in self._tree.remove(record)]
            self._gone += removed
        pages = sum(record.num_pages for record in removed)
        self.counters.damaged_pages += pages
        if removed:
            log.warning("kv_disk: %d pages are damaged or cannot be read, and count as missing", pages)

    def check(self) -> None:
        """Assert that every file is of one record, which is in the tree, or gone and still read."""
        with self._lock:
            self._tree.check()
            records = [*self._tree.records, *self._gone]
            assert len({record.data.file for record in records}) == len(records), "a file of two records"
            assert sum([record.num_bytes for record in records]) == self._used_bytes <= self._space_bytes

    # -- beginning and end -----------------------------------------------------------------------------------------

    def _open(self, daily_bytes: float) -> None:
        try:
            stored = [*self._files.records()]
            self._tree.load(stored)
            kept = {record.data.file for record in self._tree.records}
            for record in stored:
                if record.data.file not in kept:
                    self._files.delete(record.data.file)
            self._used_bytes = sum([record.num_bytes for record in self._tree.records])
            self._make_room(0)
            self._memory = self._remembered()
        except OSError as error:
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
        """Keep a JSON value for later starts."""
        self._memory[key] = value
        path, new = self._folder.path / _MEMORY_NAME, self._folder.path / f"new-{_MEMORY_NAME}"
        new.touch(0o600)
        new.write_text(json.dumps(self._memory), encoding="utf-8")
        new.replace(path)

    def _stop(self, problem: str) -> None:
        self.problem = problem
        log.error("kv_disk stores no more contexts before the next start: %s", problem)

    def _end(self) -> None:
        self._files.close()
        self._folder.close()
