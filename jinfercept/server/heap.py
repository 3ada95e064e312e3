"""The memory of a server's process: freed pages go back to the system, and collections of garbage are short.

glibc keeps memory that threads have freed in arenas until `malloc_trim`. Python's collector visits all objects from time to
time: those that a start has made took it a quarter of a second, in which no token is written.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_libc: ctypes.CDLL | None = None
with suppress(OSError):  # another system, or another C library
    _libc = ctypes.CDLL("libc.so.6")


@contextmanager
def frozen_heap() -> Iterator[None]:
    """While this lasts, collections of garbage do not visit the objects that are there already."""
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()


def freeze_heap() -> None:
    """Take the objects that are there out of collections of garbage, after a last one; they are freed as before otherwise."""
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return free pages of the heap to the system. Takes milliseconds; has no effect without glibc. Thread-safe."""
    if _libc is not None and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
