"""A file system of two MiB, which a test fills."""

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """The file system.

    Attributes:
        folder: where it is mounted.
    """

    folder: Path

    @property
    def state(self) -> Path:
        """A file for stored state."""
        return self.folder / "state.db"

    def fill(self) -> None:
        """Take all room that is left, also that of SQLite's log."""
        if self.state.exists():
            with closing(sqlite3.connect(self.state)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._write()  # before the log is removed with the last connection
        self._write()

    def _write(self) -> None:
        with suppress(OSError), (self.folder / "other").open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def empty(self) -> None:
        """Give the room back."""
        os.truncate(self.folder / "other", 0)

    def make_read_only(self) -> None:
        """Allow no more writes."""
        subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mount the file system; skips the test where that is refused."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
