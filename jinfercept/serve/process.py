"""A server's process: its memory and its end. Freed pages go back to the system, and collections of garbage are short. A
thread or a coroutine of a tool may hold the process at its end.

glibc keeps memory that threads have freed in arenas until `malloc_trim`. Python's collector visits all objects from time to
time: those that a start has made took it a quarter of a second, in which no token is written.
"""

import atexit
import ctypes
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

log = logging.getLogger(__name__)

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


def end_process_by(time_s: float) -> None:
    """End this process with status 0 at a time, in seconds of `time.monotonic`, if it is still there."""

    def end() -> None:
        time.sleep(max(0.0, time_s - time.monotonic()))
        names = ", ".join(sorted({thread.name for thread in threading.enumerate() if not thread.daemon}))
        with suppress(Exception):
            log.warning("the process is ended at its time limit, though these threads run: %s", names)
        _exit()

    threading.Thread(target=end, name="jinfercept-exit", daemon=True).start()


def end_process() -> NoReturn:
    """End this process with status 0, behind its other threads and its exit handlers.

    What runs still is not destroyed, as Python does it: a coroutine that swallows the `GeneratorExit` would never end, and a
    thread within native code would abort the process.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] # as Python does it
    atexit._run_exitfuncs()
    _exit()


def _exit() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)
