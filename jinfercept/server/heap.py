"""Returns freed memory to the system: glibc keeps memory that threads have freed in arenas until `malloc_trim`."""

import ctypes
from contextlib import suppress

_libc: ctypes.CDLL | None = None
with suppress(OSError):  # another system, or another C library
    _libc = ctypes.CDLL("libc.so.6")


def trim_heap() -> None:
    """Return free pages of the heap to the system. Takes milliseconds; has no effect without glibc. Thread-safe."""
    if _libc is not None and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
