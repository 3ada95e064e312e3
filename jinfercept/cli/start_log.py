"""Shows at a terminal what a starting engine logs: the memory plan, the times, the sampling defaults."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from jinfercept.server.observe.log_lines import StderrHandler


@contextmanager
def start_log() -> Iterator[None]:
    """Write INFO records of the logger `jinfercept`, and warnings of those below it, to standard error as plain lines."""
    log, handler = logging.getLogger("jinfercept"), StderrHandler()
    handler.addFilter(lambda record: record.name == "jinfercept" or record.levelno >= logging.WARNING)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
