"""Drops damaged entries of JAX's compilation cache, which JAX reports at every start but never replaces.

An entry is damaged by a process that ends while it writes, or by a full disk. Entries are checked once, at the first start
after they were written: a file `.checked` has the time of the last check. Knows the entries' compression, not their contents.
"""

import logging
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_ENTRIES, _STAMP = "*-cache", ".checked"
_ZSTD = b"\x28\xb5\x2f\xfd"
_WRITING_S = 60.0
"""Age of an entry below which another process may still write it."""


def drop_damaged(directory: Path) -> list[Path]:
    """Delete the entries that cannot be unpacked, each with a warning; returns them. A read-only directory stays as it is.

    Entries of the last minute are left to the next check.
    """
    dropped = list[Path]()
    if not os.access(directory, os.W_OK):
        return dropped
    began_s = time.time()
    with suppress(OSError):  # another process may delete too
        for entry in _new_entries(directory, began_s - _WRITING_S):
            if not _unpacks(entry.read_bytes()):
                entry.unlink()
                dropped.append(entry)
                log.warning("dropped a damaged entry of JAX's compilation cache, which is compiled again: %s", entry)
        stamp = directory / _STAMP
        stamp.touch()
        os.utime(stamp, (began_s - _WRITING_S, began_s - _WRITING_S))
    return dropped


def _new_entries(directory: Path, until_s: float) -> Iterator[Path]:
    """Entries that were written since the last check, and before a time."""
    stamp = directory / _STAMP
    since_s = stamp.stat().st_mtime if stamp.is_file() else 0.0
    return (entry for entry in directory.glob(_ENTRIES) if since_s <= entry.stat().st_mtime < until_s)


def _unpacks(entry: bytes) -> bool:
    """Whether an entry can be unpacked. JAX packs with zlib, or, where it is installed, with zstandard: not checked."""
    try:
        zlib.decompress(entry)
    except zlib.error:
        return entry.startswith(_ZSTD)
    return True
