"""What this machine lacks for the suite.

    python -m benchmarks.gpu_suite.missing [--tiny]

Prints a line for each thing; the exit status is 1 if no part can run, with `--tiny` without a GPU.
"""

import shutil
import subprocess
import sys

from benchmarks.gpu_suite.parts import PARTS
from benchmarks.suite.missing import MOST_S, Missing, installed_version, packages, print_missing, room

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
LEAST_GPU_MIB = 70_000
WHEELS = "tools/gpu_wheels FOLDER, where there is a package index, fetches the packages of them"


def missing() -> list[Missing]:
    """Everything that is missing, what matters most first."""
    lacking = [*packages(), *_device(), *room()]
    lacking += [Missing(f"{', '.join(part.lacking)} (a peer's)", name) for name, part in PARTS.items() if part.lacking]
    if shutil.which("compute-sanitizer") is None:
        lacking.append(Missing("compute-sanitizer on the path", "no part, but memcheck runs without a memory checker"))
    return sorted(lacking, key=lambda lack: not lack.fatal)


def _device() -> list[Missing]:
    """A GPU, its memory, and what JAX drives it by."""
    lacking = list[Missing]()
    plugins = {name: installed for name in PLUGINS if (installed := installed_version(name))}
    if not plugins:
        lacking.append(Missing("JAX's plugin for CUDA", "every part but with --tiny", True, False))
    elif (jaxlib := installed_version("jaxlib")) not in plugins.values():
        had = ", ".join(f"{name} {installed}" for name, installed in plugins.items())
        lacking.append(Missing(f"a plugin of jaxlib's version {jaxlib} (there is {had})", "perhaps every part"))
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        memory = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=MOST_S).stdout)
    except subprocess.TimeoutExpired:  # of a driver that starts
        lacking.append(Missing(f"an answer of nvidia-smi within {MOST_S:.0f} s", "nothing by itself"))
    except (OSError, ValueError, subprocess.SubprocessError):
        lacking.append(Missing("an NVIDIA GPU with its driver", "every part but with --tiny", True, False))
    else:
        if memory < LEAST_GPU_MIB:
            had = f"{LEAST_GPU_MIB // 1000} GB of GPU memory (there are {memory // 1000})"
            lacking.append(Missing(had, "steps whose pages do not fit: they are left out"))
    return lacking


if __name__ == "__main__":
    sys.exit(print_missing(missing(), WHEELS))
