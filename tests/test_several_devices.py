"""Runs `on_several_devices.py` in a process of its own, whose CPU is eight devices: those of this process are one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("on_several_devices.py")
NUM_DEVICES = 8


def run_apart(*arguments: str) -> None:
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments, str(FILE)],
        capture_output=True,
        text=True,
        cwd=FILE.parents[1],
        env=os.environ | {"XLA_FLAGS": flags, "NPROC": str(2 * NUM_DEVICES)},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)  # a first run compiles for minutes
def test_several_devices_serve_as_one_does() -> None:
    run_apart()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_number_of_devices_under_every_policy() -> None:
    run_apart("-m", "slow")
