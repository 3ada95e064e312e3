"""How much may be written to a drive, which wears with it: bytes per day, across restarts."""

from dataclasses import dataclass
from typing import final

DAY_S = 86400.0
DRIVE_WRITES_PER_DAY = 1.0
"""Writes of the whole drive per day for which drives of data centres are specified over five years; those of PCs: 0.3."""


@final
@dataclass(slots=True)
class WriteBudget:
    """A bucket that fills evenly, with a day's bytes at most.

    Attributes:
        bytes_per_day: that may be written.
        left: bytes that may be written now.
        updated_s: Unix time of `left`.
    """

    bytes_per_day: float
    left: float
    updated_s: float

    def grant(self, num_bytes: int, now_s: float) -> bool:
        """Whether so many bytes may be written now; they are counted if so."""
        self.advance(now_s)
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True

    def advance(self, now_s: float) -> None:
        """Add what time has brought; a clock that was set back brings nothing."""
        elapsed_s = max(0.0, now_s - self.updated_s)
        self.left = min(self.bytes_per_day, self.left + self.bytes_per_day * elapsed_s / DAY_S)
        self.updated_s = now_s
