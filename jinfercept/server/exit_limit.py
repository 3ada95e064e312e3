"""Ends the process of a server that does not end by itself, since a tool or a library holds a thread of it."""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

log = logging.getLogger(__name__)


def end_process_by(time_s: float) -> None:
    """End this process with status 0 at a time, in seconds of `time.monotonic`, if it is still there."""

    def end() -> None:
        time.sleep(max(0.0, time_s - time.monotonic()))
        names = ", ".join(sorted({thread.name for thread in threading.enumerate() if not thread.daemon}))
        with suppress(Exception):
            log.warning("the process is ended at its time limit, though these threads run: %s", names)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)

    threading.Thread(target=end, name="jinfercept-exit", daemon=True).start()
