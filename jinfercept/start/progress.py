"""Shows how far a start is: on one line of standard error, or in the log where no terminal shows it."""

import logging
import sys
import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger("jinfercept")

LOG_EVERY_S = 5.0
"""Seconds between two lines of the log about one phase of a start."""


@final
class StartDisplay:
    """Shows the phases of a start while it is entered; call it as `LLM(progress=...)`. The display goes away at its end.

    Where only the log can show it and the program has set up no logging, the records of the logger `jinfercept` are written to
    standard error meanwhile.

    Args:
        notes: write these records, and warnings of the loggers below it, in every case: memory plan, times, sampling defaults.
    """

    def __init__(self, *, notes: bool = False) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._notes = notes
        self._lines, self._level = _Lines(), log.level
        self._phase, self._logged_s = "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        begins = what != self._phase
        if begins:
            self._phase = what
        if self._bar is None:
            now_s = time.monotonic()
            if begins or (done < total and now_s - self._logged_s >= LOG_EVERY_S):
                self._logged_s = now_s
                log.info("start: %s, %d of %d", what, done, total)
        else:
            for task in self._bar.task_ids if begins else ():
                self._bar.remove_task(task)
            task = self._bar.add_task(what, total=total) if begins else self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total)

    def close(self) -> None:
        """Take the display away."""
        if self._bar is not None:
            self._bar.stop()
        if self._lines in log.handlers:
            log.removeHandler(self._lines)
            log.setLevel(self._level)

    def __enter__(self) -> Self:
        if self._notes or (self._bar is None and not log.hasHandlers()):
            log.addHandler(self._lines)
            log.setLevel(logging.INFO)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@final
class _Lines(logging.Handler):
    # `sys.stderr` is looked up for each message: a bar replaces it while it is shown.
    def filter(self, record: logging.LogRecord) -> bool:
        return record.name == log.name or record.levelno >= logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)
