"""The parts of the suite, in jobs that are one command each: A, B and C take a quarter of an hour together, the others nine
minutes each at most.

Imports no JAX.
"""

from collections.abc import Mapping
from functools import partial

from benchmarks.suite.parts import TRACED_WITH_GRAPHS, Part

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
        "kernels": _part("gpu_suite.kernels", 35.0, environment=OWN_MEMORY),
        "torch_step": Part("gpu_suite.torch_peer", 30.0, packages=TORCH),
        "flashinfer": Part("gpu_suite.flashinfer_peer", 35.0, packages=(*TORCH, *FLASHINFER)),
    },
    "D": {
        "decode": _part("suite.steps", 70.0, "decode_rows", OWN_MEMORY),
        "overlap": _part("suite.transfers", 75.0, environment={**OWN_MEMORY, **OWN_THREAD}),
        "checks": _part("suite.correctness", 80.0, "kernel_rows", GROWING_MEMORY),
        "idle": _part("suite.idle", 70.0),
        "experts": _part("gpu_suite.experts", 150.0, environment=OWN_MEMORY),
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
