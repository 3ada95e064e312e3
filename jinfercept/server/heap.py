"""Freed memory goes back to the system: glibc keeps what threads have freed, in an arena for each, until it is asked to."""

import ctypes
from contextlib import suppress

_libc: ctypes.CDLL | None = None
with suppress(OSError):  # another system, or another C library
    _libc = ctypes.CDLL("libc.so.6")


def trim_heap() -> None:
    """Return free pages of the heap to the system. Takes milliseconds; does nothing without glibc. From any thread."""
    if _libc is not None and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
