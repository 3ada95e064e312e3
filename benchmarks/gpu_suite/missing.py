"""What this machine lacks for the suite, and what that makes impossible, known before anything is imported but Python's own.

    python -m benchmarks.gpu_suite.missing [--tiny]

Prints a line for each thing; the exit status is 1 if no part can run, with `--tiny` without a GPU.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[2]
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
LEAST_GPU_MIB = 70_000
LEAST_DISK_GIB = 4

PREVENTS = {
    "jax": "every part",
    "flax": "every part",
    "gguf": "no part: checkpoints in .gguf files alone need it",
    "llguidance": "no part: requests with a grammar alone need it",
    "huggingface_hub": "no part: random weights need no download",
    "jinja2": "no part: chats alone need it",
    "orbax-checkpoint": "no part: converted checkpoints alone need it",
    "pip": "no part: downloads alone need it",
    "pydantic": "no part: Python functions as tools alone need it",
    "tensorstore": "no part: converted checkpoints alone need it",
    "transformers": "no part: other tokenizers alone need it",
    "tyro": "gpu-report: read the JSON on another machine",
    "psutil": "correctness, memcheck, idle, policies",
    "safetensors": "correctness, memcheck, idle, policies",
    "tokenizers": "correctness, memcheck, idle, policies",
}
"""By dependency of the project what is impossible without it; every part, if it is not here."""


class Missing(NamedTuple):
    """Something that is not there, what that makes impossible, and whether that is every part."""

    what: str
    prevents: str
    fatal: bool = False


def missing() -> list[Missing]:
    """Everything that is missing, what matters most first."""
    found = [*_packages(), *_device(), *_room()]
    if _version("torch") is None:
        found.append(Missing("torch", "torch_peer"))
    if shutil.which("compute-sanitizer") is None:
        found.append(Missing("compute-sanitizer on the path", "no part, but memcheck runs without a memory checker"))
    return sorted(found, key=lambda one: not one.fatal)


def satisfies(found: str, specifier: str) -> bool:
    """Whether a version is within bounds such as `>=0.11.2,<0.13`, by its numbers alone."""
    compared = {
        ">=": lambda one, other: one >= other,
        "<": lambda one, other: one < other,
        "==": lambda one, other: one == other,
    }
    bounds = re.findall(r"(>=|<|==)\s*([\d.]+)", specifier)
    return all(compared[sign](_numbers(found), _numbers(bound)) for sign, bound in bounds)


def _packages() -> list[Missing]:
    """Dependencies of the project that are not there, or in another version."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for dependency in project["dependencies"]:
        name, specifier = re.fullmatch(r"([\w-]+)(.*)", dependency).groups()  # pyright: ignore[reportOptionalMemberAccess]
        installed, prevents = _version(name), PREVENTS.get(name, "every part")
        fatal = prevents == "every part"
        if installed is None:
            found.append(Missing(name, prevents, fatal))
        elif not satisfies(installed, specifier):
            found.append(
                Missing(f"{name}{specifier} (there is {installed})", f"nothing for certain; {prevents} may fail")
            )
    return found


def _device() -> list[Missing]:
    """A GPU, its memory, and what JAX drives it by."""
    found = []
    if not any(map(_version, PLUGINS)):
        found.append(Missing("JAX's plugin for CUDA", "every part but with --tiny", True))
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        memory = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        found.append(Missing("an NVIDIA GPU with its driver", "every part but with --tiny", True))
    else:
        if memory < LEAST_GPU_MIB:
            had = f"{LEAST_GPU_MIB // 1000} GB of GPU memory (there are {memory // 1000})"
            found.append(Missing(had, "steps whose pages do not fit: they are left out"))
    return found


def _room() -> list[Missing]:
    """Space for compiled executables and traces."""
    free = shutil.disk_usage(Path.home()).free >> 30
    had = f"{LEAST_DISK_GIB} GiB of disk (there are {free})"
    return [] if free >= LEAST_DISK_GIB else [Missing(had, "compiled executables to be kept between parts")]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.match(r"[\d.]*", text)[0].strip(".").split(".") if number]  # pyright: ignore[reportOptionalSubscript]


def main() -> int:
    """Print what is missing; returns the exit status."""
    found = missing()
    for one in found:
        print(f"missing: {one.what}; prevents {one.prevents}", file=sys.stderr)
    if _packages():
        print("tools/gpu_wheels FOLDER, where there is a package index, fills a folder with them", file=sys.stderr)
    device = _device() if "--tiny" in sys.argv else []
    return int(any(one.fatal and one not in device for one in found))


if __name__ == "__main__":
    sys.exit(main())
