"""The parts of the suite, in jobs that are one command each, and what this machine lacks for them.

    python -m benchmarks.gpu_suite.parts [--tiny]

Prints a line for each thing that is missing; the exit status is 1 if no part can run, with `--tiny` without a GPU. Jobs A, B
and C take a quarter of an hour together, the others nine minutes each at most. Imports no JAX.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

from benchmarks.suite.parts import (
    MOST_S,
    TRACED_WITH_GRAPHS,
    Missing,
    Part,
    installed_version,
    packages,
    print_missing,
    room,
)

NO_GRAPHS = ("--xla_gpu_enable_command_buffer=",)
NO_AUTOTUNING = ("--xla_gpu_autotune_level=0",)
_part = partial(Part, xla_flags=TRACED_WITH_GRAPHS)

OWN_MEMORY = {"XLA_CLIENT_MEM_FRACTION": "0.92", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "48"}
"""Of parts that make runners and arrays themselves; an engine sets both at its start."""
GROWING_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Of parts that make weights before an engine that would set it: these leave the GPU's memory to others."""
EVERY_ALLOCATION = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Every array is an allocation of its own: in one large pool no access is out of bounds."""

OWN_THREAD = {"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}
"""XLA dispatches from a thread of its own, as an engine asks it to by default."""

TORCH = ("torch",)
FLASHINFER = ("flashinfer-python", "apache-tvm-ffi", "nvidia-ml-py", "ninja", "requests")
"""What its attention needs beside torch; most of what it depends on is for other kernels."""

JOBS: Mapping[str, Mapping[str, Part]] = {
    "A": {
        "smoke": _part("suite.smoke", 65.0),
        "deep": _part("suite.steps", 50.0, "deep_rows", OWN_MEMORY),
        "groups": _part("suite.steps", 55.0, "group_rows", OWN_MEMORY),
    },
    "B": {
        "agents": _part("suite.policies", 400.0, "agent_rows"),
    },
    "C": {
        "products": _part("gpu_suite.products", 60.0, environment=OWN_MEMORY),
        "torch_products": Part("gpu_suite.torch_peer", 10.0, "product_rows", packages=TORCH),
        "kernels": _part("gpu_suite.kernels", 35.0, "attention", environment=OWN_MEMORY),
        "torch_step": Part("gpu_suite.torch_peer", 30.0, packages=TORCH),
        "flashinfer": Part("gpu_suite.flashinfer_peer", 35.0, packages=(*TORCH, *FLASHINFER)),
    },
    "D": {
        "decode": _part("suite.steps", 70.0, "decode_rows", OWN_MEMORY),
        "overlap": _part("suite.transfers", 75.0, environment={**OWN_MEMORY, **OWN_THREAD}),
        "checks": _part("suite.correctness", 80.0, "kernel_rows", GROWING_MEMORY),
        "idle": _part("suite.idle", 70.0),
        "experts": _part("gpu_suite.kernels", 150.0, "experts", environment=OWN_MEMORY),
        "memcheck": Part(
            "suite.correctness",
            90.0,
            "memcheck_rows",
            EVERY_ALLOCATION,
            xla_flags=(*NO_AUTOTUNING, *NO_GRAPHS),
            checked=True,
        ),
    },
    "E": {
        "policies": _part("suite.policies", 235.0),
        "tokens": _part("suite.correctness", 120.0, environment=GROWING_MEMORY),
        "kinds": _part("suite.correctness", 120.0, "kind_rows", GROWING_MEMORY),
    },
    "F": {
        "devices": _part("suite.correctness", 300.0, "device_rows", GROWING_MEMORY),
    },
}
"""By the name of a job its parts by theirs, what matters most first. F is for machines with several GPUs."""

PARTS: Mapping[str, Part] = {name: part for job in JOBS.values() for name, part in job.items()}


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
