"""What the suite ran on: device, driver, clocks, versions, commit. Asks `nvidia-smi` where there is one; imports no JAX."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu_suite.missing import MOST_S, missing
from benchmarks.gpu_suite.sizes import Row

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "flax",
    "numpy",
    "torch",
    "triton",
    "transformers",
)
QUERIES = {
    "name": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "temperature": "temperature.gpu",
    "power": "power.draw",
}


def describe(commit: str | None) -> Row:
    """The machine, its software, and the commit that runs (the checkout's, unless given; None without one)."""
    return {
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: installed for name in PACKAGES if (installed := _version(name))},
        "missing": [lack.what for lack in missing()],
        "commit": commit or _commit(),
        "gpu": gpu_state(),
    }


def gpu_state() -> Row | None:
    """Name, driver, clocks and temperature of the first GPU as they are now; None without `nvidia-smi`."""
    query = f"--query-gpu={','.join(QUERIES.values())}"
    line = _printed("nvidia-smi", query, "--format=csv,noheader", "--id=0")
    return None if line is None else dict(zip(QUERIES, map(str.strip, line.split(",")), strict=False))


def _commit() -> str | None:
    folder = str(Path(__file__).parent)
    commit = _printed("git", "-C", folder, "rev-parse", "HEAD")
    changed = commit is not None and _printed("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if changed else commit


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _printed(*command: str) -> str | None:
    """Standard output of a command; None if it is not there or failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=MOST_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
