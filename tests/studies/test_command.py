"""The studies' command: its overview, its help, and a package that is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from studies.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]


def test_the_overview_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in shown] == []


def test_every_study_explains_its_flags_without_jax() -> None:
    code = (
        "import contextlib, sys\nfrom studies.__main__ import COMMANDS, main\nfor name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit): main([name, '--help'])\n"
        "print({'jax', 'matplotlib', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert [name for name in COMMANDS if f"usage: python -m studies {name} " not in done.stdout] == []
    assert done.stdout.endswith("set()\n")


def test_a_package_that_is_missing_is_said_before_a_study_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("studies.__main__.NEEDED", ("no_such_package",))
    assert main(["deciding"]) == 2
    assert "studies need no_such_package: pip install '.[studies]'" in capsys.readouterr().err
    assert main(["--help"]) == 0
