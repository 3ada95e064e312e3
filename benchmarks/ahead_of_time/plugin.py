"""The compilers of GPUs and TPUs without one, and the tools that read machine code: fetched once into the cache, used in child
processes.

Imports JAX for its version alone; what compiles runs as a program of its own, with `environment`.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import jax

from jinfercept.errors import JinferceptError
from jinfercept.models.embedded import cache_directory

PROJECT = Path(__file__).parents[2]
ASSEMBLERS = {
    "cuda13": ("nvidia-cuda-nvcc>=13.0.48,<14", "nvidia-nvvm>=13.0.48,<14"),
    "cuda12": ("nvidia-cuda-nvcc-cu12>=12.6.85",),
}
"""What the plugin compiles with: `ptxas` and libdevice."""
DISASSEMBLER = "nvidia-cuda-nvdisasm>=13.0.48,<14"
"""Reads the machine code of both generations."""


class PluginMissingError(JinferceptError):
    """A compiler or one of its tools can neither be found nor fetched."""


@cache
def plugin(generation: str = "cuda13") -> tuple[str, ...]:
    """The folders to put on the path: none if the plugin is installed. Raises `PluginMissingError`."""
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_{generation}"):
        return ()
    packages = [f"jax-{generation}-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
    return (str(_fetched(f"jax-{generation}-{jax.__version__}-aot", [*packages, *ASSEMBLERS[generation]])),)


@cache
def tool(name: str, generation: str = "cuda13") -> Path:
    """The program `ptxas` or `nvdisasm`. Raises `PluginMissingError`."""
    folders = [*plugin(generation), *sys.path]
    if name == "nvdisasm":
        folders = [str(_fetched("nvdisasm-cuda13", [DISASSEMBLER]))]
    paths = (path for folder in folders for path in Path(folder or ".", "nvidia").glob(f"*/bin/{name}"))
    if (path := next(paths, None)) is None:
        raise PluginMissingError(f"{name} is not there", got=", ".join(folders), fix="install the wheels of the plugin")
    return path


@cache
def libtpu() -> tuple[str, ...]:
    """The folders to put on the path for TPUs: none if their library is installed. Raises `PluginMissingError`."""
    if importlib.util.find_spec("libtpu"):
        return ()
    wanted = (line.split(";")[0].strip() for line in requires("jax") or () if line.startswith("libtpu"))
    package = next(wanted, "libtpu")  # the version that this JAX is released with
    return (str(_fetched(f"libtpu-jax-{jax.__version__}-aot", [package])),)


def environment(generation: str = "cuda13") -> dict[str, str]:
    """The environment of a process that compiles ahead of time for NVIDIA GPUs. Raises `PluginMissingError`."""
    return _environment(plugin(generation))


def tpu_environment() -> dict[str, str]:
    """The environment of a process that compiles ahead of time for TPUs. Raises `PluginMissingError`."""
    return _environment(libtpu()) | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def _environment(folders: Sequence[str]) -> dict[str, str]:
    path = [*folders, str(PROJECT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",  # tests set it
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # it cannot read executables for a device that is not there
        "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS": "false",  # a program is the same wherever its lines stand
        "AOT_RESULTS": str(cache_directory() / "aot-results"),
    }


def _fetched(name: str, packages: Sequence[str]) -> Path:
    """A folder of the cache with these packages."""
    folder = cache_directory() / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="download-") as scratch:
            _install(packages, Path(scratch) / "packages")
            with suppress(OSError):  # another process was first
                os.replace(Path(scratch) / "packages", folder)
    return folder


def _install(packages: Sequence[str], folder: Path) -> None:
    """At most 250 MB from the package index, without what only a real GPU needs."""
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
        "--timeout=20",
    ]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        got = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise PluginMissingError(f"no {packages[0]}", got=got, fix="connect to a package index, or install the package")


def child_lines(module: str, environment: Mapping[str, str], order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the program, as they come. Raises `RuntimeError` if it fails."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([sys.executable, "-m", module], env=environment, text=True, stderr=errors, **pipes)
        assert child.stdout is not None
        assert child.stdin is not None
        with child:
            child.stdin.write(json.dumps(order))
            child.stdin.close()
            yield from map(json.loads, child.stdout)
        if child.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"the program that compiles failed: {errors.read()[-4000:]}")
