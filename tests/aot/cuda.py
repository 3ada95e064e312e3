"""The CUDA plugin without a GPU: fetched once into the cache, used in a process of its own that compiles and reports."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from jinfercept.models.embedded import cache_directory

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
ASSEMBLERS = {
    "cuda13": ("nvidia-cuda-nvcc>=13.0.48,<14", "nvidia-nvvm>=13.0.48,<14"),
    "cuda12": ("nvidia-cuda-nvcc-cu12>=12.6.85",),
}
"""What the plugin compiles with: `ptxas` and libdevice."""


def compile_for(gpu: str, generation: str = "cuda13", **asked: Any) -> dict[str, dict[str, Any]]:
    """What `compile_for_cuda.py` says of what is asked. Skips the test where the plugin cannot be had."""
    path = [*plugin(generation), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # it cannot read executables for a device that is not there
        "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX": re.escape(f"{PROJECT}/"),  # one program in every checkout
        "AOT_RESULTS": str(cache_directory() / "aot-results"),
    }
    done = subprocess.run(
        [sys.executable, HERE / "compile_for_cuda.py"],
        input=json.dumps({"gpu": gpu, "generation": generation} | asked),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@cache
def plugin(generation: str) -> tuple[str, ...]:
    """The folders to put on the path: none if the plugin is installed."""
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_{generation}"):
        return ()
    folder = cache_directory() / f"jax-{generation}-{jax.__version__}-aot"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="download-") as scratch:
            _install(generation, Path(scratch) / "plugin")
            with suppress(OSError):  # another process was first
                os.replace(Path(scratch) / "plugin", folder)
    return (str(folder),)


def _install(generation: str, folder: Path) -> None:
    """250 MB from the package index, without what only a real GPU needs."""
    packages = [f"jax-{generation}-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
    packages += ASSEMBLERS[generation]
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
        pytest.skip(f"no CUDA plugin: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
