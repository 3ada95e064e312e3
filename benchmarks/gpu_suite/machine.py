"""What the suite ran on: device, driver, clocks, versions, commit. Asks `nvidia-smi` where there is one; imports no JAX."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu_suite.missing import missing
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
    """The machine, its software, and the commit that runs (the checkout's, unless given; None where nobody knows)."""
    return {
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "missing": [found.what for found in missing()],
        "commit": commit or _commit(),
        "gpu": gpu_state(),
    }


def gpu_state() -> Row | None:
    """Name, driver, clocks and temperature of the first GPU as they are now; None without `nvidia-smi`."""
    asked = f"--query-gpu={','.join(QUERIES.values())}"
    said = _said("nvidia-smi", asked, "--format=csv,noheader", "--id=0")
    return None if said is None else dict(zip(QUERIES, map(str.strip, said.split(",")), strict=False))


def _commit() -> str | None:
    folder = str(Path(__file__).parent)
    commit = _said("git", "-C", folder, "rev-parse", "HEAD")
    changed = commit is not None and _said("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if changed else commit


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    """What a command printed; None if it is not there or failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
