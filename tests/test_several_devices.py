"""Runs files of tests in a process of their own, whose CPU is eight devices: those of this process are one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = ("on_several_devices.py", "on_random_mixes.py")
NUM_DEVICES = 8


def run_apart(names: Sequence[str], *arguments: str) -> None:
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    files = [str(FOLDER / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments, *files],
        capture_output=True,
        text=True,
        cwd=FOLDER.parent,
        env=os.environ | {"XLA_FLAGS": flags, "NPROC": str(2 * NUM_DEVICES)},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)  # a first run compiles for minutes
def test_several_devices_serve_as_one_does() -> None:
    run_apart(FILES)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_mixes_for_as_long_as_wanted() -> None:
    run_apart(FILES[1:], "-m", "slow")
