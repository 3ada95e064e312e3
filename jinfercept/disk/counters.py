"""What a disk tier has done, and how full it is."""

from dataclasses import dataclass
from typing import NamedTuple


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
