"""What a suite has of its own, from its parts to what tells whether the device is there, and what it ran on. Imports no JAX."""

import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.suite.parts import MOST_S, Missing, Part, installed_version
from benchmarks.suite.sizes import TINY, Row, Sizes


class SuiteKind(NamedTuple):
    """One suite.

    Attributes:
        name: gpu or tpu: of the tool, of the folder of what is its own, and of its results.
        device: in words.
        platform: JAX's name of it, in `JAX_PLATFORMS`.
        install: what to do where JAX does not find it.
        jobs: by the name of a job its parts, by theirs.
        full: sizes for the device, asked for in a part's process.
        missing: what the machine lacks.
        limit_s: seconds for all parts together, unless the command says otherwise.
        state: what the device's own tools say of it now; None without them.
        packages: whose versions are noted, beside those of every suite.
        tunes: XLA chooses kernels by timing them, which is kept for the next run.
        tiny: sizes for a CPU.
    """

    name: str
    device: str
    platform: str
    install: str
    jobs: Mapping[str, Mapping[str, Part]]
    full: Callable[[], Sizes]
    limit_s: float
    missing: Callable[[], list[Missing]]
    state: Callable[[], Row | None]
    packages: Sequence[str] = ()
    tunes: bool = False
    tiny: Sizes = TINY

    @property
    def tool(self) -> str:
        """The command among `tools/`."""
        return f"{self.name}_suite"

    @property
    def parts(self) -> dict[str, Part]:
        """All parts, what matters most first."""
        return {name: part for job in self.jobs.values() for name, part in job.items()}


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
