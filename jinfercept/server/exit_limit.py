"""Ends the process of a server, which a thread or a coroutine of a tool may hold."""

import atexit
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

log = logging.getLogger(__name__)


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
