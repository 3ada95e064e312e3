"""What a start shows: one line at a terminal, lines of the log where there is none."""

import io
import logging
import subprocess
import sys

import pytest

from jinfercept.startup.progress import StartDisplay

SCRIPT = """
from jinfercept.startup.progress import StartDisplay
with StartDisplay() as progress:
    for done in range(3):
        progress("loading", done, 2)
    progress("compiling", 0, 9)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_script_without_a_terminal_writes_a_line_for_each_phase() -> None:
    shown = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert shown.stderr.splitlines() == ["start: loading, 0 of 2", "start: compiling, 0 of 9"]
    assert shown.stdout == ""


def test_a_program_that_logs_gets_records_and_no_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    handlers = list(logging.getLogger("jinfercept").handlers)
    with caplog.at_level("INFO", "jinfercept"), StartDisplay() as progress:
        assert logging.getLogger("jinfercept").handlers == handlers
        progress("compiling", 3, 9)
    assert caplog.messages == ["start: compiling, 3 of 9"]


def test_a_terminal_shows_one_phase_at_a_time_and_nothing_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with StartDisplay() as progress:
        for what in ("loading", "compiling"):
            progress(what, 0, 2)
            progress(what, 1, 2)
    last = terminal.getvalue().split("\x1b[2K")[-2]
    assert ("compiling" in last, "loading" in last) == (True, False)
