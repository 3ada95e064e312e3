"""What a suite ran on: platform, versions, commit, and what the device's own tools say. Imports no JAX."""

import platform
import subprocess
import sys
from pathlib import Path

from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.missing import MOST_S, installed_version
from benchmarks.suite.sizes import Row

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers")


def describe(kind: SuiteKind, commit: str | None) -> Row:
    """The machine, its software, and the commit that runs (the checkout's, unless given; None without one)."""
    return {
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: has for name in (*PACKAGES, *kind.packages) if (has := installed_version(name))},
        "missing": [lack.what for lack in kind.missing()],
        "commit": commit or _commit(),
        kind.name: kind.state(),
    }


def printed(*command: str) -> str | None:
    """Standard output of a command; None if it is not there or failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=MOST_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str | None:
    folder = str(Path(__file__).parent)
    commit = printed("git", "-C", folder, "rev-parse", "HEAD")
    changed = commit is not None and printed("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if changed else commit
