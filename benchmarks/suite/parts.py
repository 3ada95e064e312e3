"""The parts of a suite, and what this machine lacks for them: known before anything is imported but Python's own."""

import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[2]
LEAST_DISK_GIB = 4
MOST_S = 3.0
"""Of a question to a program: all that is missing is known within five seconds."""

ENGINES = "smoke, agents, policies, tokens, kinds, idle, memcheck, devices"
"""Parts that start an engine."""

PREVENTS = {
    "jax": "every part",
    "flax": "every part",
    "docstring_parser": "no part: Python functions as tools alone need it",
    "gguf": "no part: checkpoints in .gguf files alone need it",
    "llguidance": "no part: requests with a grammar alone need it",
    "huggingface_hub": "no part: random weights need no download",
    "jinja2": "no part: chats alone need it",
    "pip": "no part: downloads alone need it",
    "pydantic": "no part: Python functions as tools alone need it",
    "transformers": "no part: other tokenizers alone need it",
    "tyro": "gpu-report: read the JSON on another machine",
    "psutil": ENGINES,
    "safetensors": ENGINES,
    "tokenizers": ENGINES,
}
"""By dependency of the project what is impossible without it; every part, if it is not here."""


class Missing(NamedTuple):
    """Something that is not there, what that makes impossible, whether that is every part, and whether also with `--tiny`."""

    what: str
    prevents: str
    fatal: bool = False
    with_tiny: bool = True


def packages() -> list[Missing]:
    """Dependencies of the project that are not there, or in another version, and what these need themselves."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        from packaging.requirements import Requirement
    except ImportError:  # Transformers depends on it
        return [Missing("packaging, and transformers with it", "every part", True)]
    lacking = list[Missing]()
    for requirement in map(Requirement, project["dependencies"]):
        installed, prevents = installed_version(requirement.name), PREVENTS.get(requirement.name, "every part")
        if installed is None:
            lacking.append(Missing(requirement.name, prevents, prevents == "every part"))
        elif not requirement.specifier.contains(installed, prereleases=True):
            what = f"{requirement.name}{requirement.specifier} (there is {installed})"
            lacking.append(Missing(what, _perhaps(prevents)))
        else:
            for name in _needs(requirement.name, set()):
                lacking.append(Missing(f"{name}, which {requirement.name} needs", _perhaps(prevents)))
    return lacking


def _needs(package: str, seen: set[str]) -> Iterator[str]:
    """What a package that is there needs, directly or not, and is not there."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, distribution(package).requires or ()):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in seen:
            seen.add(requirement.name)
            if installed_version(requirement.name) is None:
                yield requirement.name
            else:
                yield from _needs(requirement.name, seen)


def _perhaps(prevents: str) -> str:
    return prevents if prevents.startswith("no part") else f"perhaps {prevents}"


def room() -> list[Missing]:
    """Space for compiled executables and traces."""
    free = shutil.disk_usage(Path.home()).free >> 30
    had = f"{LEAST_DISK_GIB} GiB of disk (there are {free})"
    return [] if free >= LEAST_DISK_GIB else [Missing(had, "compiled executables to be kept between parts")]


def installed_version(name: str) -> str | None:
    """The version of a package; None if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def print_missing(lacking: Sequence[Missing], fix: str = "") -> int:
    """Print what is missing; returns the exit status, 1 if no part can run, with `--tiny` without a device.

    Args:
        fix: the last line, if anything is missing.
    """
    for lack in lacking:
        print(f"missing: {lack.what}; prevents {lack.prevents}", file=sys.stderr)
    if lacking and fix:
        print(fix, file=sys.stderr)
    tiny = "--tiny" in sys.argv
    return int(any(lack.fatal and (lack.with_tiny or not tiny) for lack in lacking))


TRACED_WITH_GRAPHS = ("--xla_enable_command_buffers_during_profiling=true",)
"""Without it XLA launches every kernel of a GPU by itself while a profiler runs: a trace of another mode."""

ATTENTION_PARTS = ("kernels", "flashinfer", "chunks", "torch_peer")
"""Parts that time attention by itself; only earlier files have the last two."""
STEP_PARTS = ("decode", "groups", "torch_step")
"""Parts that time steps of greedy rows, see `steps`; the last one in torch."""
LINK_PARTS = ("overlap", "threads", "transfers")
"""Parts that load the host link beside a step, see `transfers`; only earlier files have the last two."""
RIGHT_PARTS = ("smoke", "checks", "tokens", "kinds")
"""Parts that check what is computed: every row is `ok` or not."""


class Part(NamedTuple):
    """One part, which runs in a process of its own.

    Attributes:
        module: among `benchmarks`.
        limit_s: seconds after which it is ended, so that one that hangs leaves time for the others.
        function: of the module, from `Sizes` to rows.
        environment: variables that it needs before JAX starts its backend.
        xla_flags: of its executables.
        checked: it runs under `compute-sanitizer`, where that is on the path.
        packages: that it needs beside the project's; it is skipped where one is not there. With torch it runs without JAX.
    """

    module: str
    limit_s: float
    function: str = "rows"
    environment: Mapping[str, str] = {}
    xla_flags: tuple[str, ...] = ()
    checked: bool = False
    packages: tuple[str, ...] = ()

    @property
    def lacking(self) -> list[str]:
        """Those of its packages that are not here."""
        return [name for name in self.packages if installed_version(name) is None]
