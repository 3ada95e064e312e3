"""The parts of the suite in the order of what they are worth, and jobs of them that take less than nine minutes each.

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

JOBS: tuple[Mapping[str, Part], ...] = (
    {
        "smoke": _part("suite.smoke", 120.0),
        "decode": _part("suite.steps", 70.0, "decode_rows", OWN_MEMORY),
        "overlap": _part("suite.transfers", 75.0, "overlap_rows", OWN_MEMORY),
        "checks": _part("suite.correctness", 80.0, "kernel_rows", GROWING_MEMORY),
        "kernels": _part("gpu_suite.kernels", 150.0, environment=OWN_MEMORY),
    },
    {
        "policies": _part("suite.policies", 235.0),
        "agents": _part("suite.policies", 230.0, "agent_rows"),
        "idle": _part("suite.idle", 70.0),
    },
    {
        "tokens": _part("suite.correctness", 120.0, environment=GROWING_MEMORY),
        "kinds": _part("suite.correctness", 120.0, "kind_rows", GROWING_MEMORY),
        "chunks": _part("gpu_suite.kernels", 80.0, "chunk_rows", OWN_MEMORY),
        "attention": _part("suite.steps", 70.0, "attention_rows", OWN_MEMORY),
        "transfers": _part("suite.transfers", 85.0, environment=OWN_MEMORY),
        "threads": _part("suite.transfers", 60.0, "overlap_rows", {**OWN_MEMORY, **OWN_THREAD}),
    },
    {
        "uploads": _part("suite.uploads", 40.0, environment=OWN_MEMORY),
        "groups": _part("suite.steps", 150.0, "group_rows", OWN_MEMORY),
        "launches": _part("suite.steps", 60.0, "launch_rows", OWN_MEMORY, xla_flags=()),
        "torch_peer": _part("gpu_suite.torch_peer", 40.0),
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
    {
        "devices": _part("suite.correctness", 300.0, "device_rows", GROWING_MEMORY),
    },
    {
        "long_agents": _part("suite.policies", 300.0, "long_agent_rows"),
        "products": _part("gpu_suite.products", 170.0, environment=OWN_MEMORY),
    },
)
"""What one job of ten minutes measures, by name; the limits of a job's parts are less than 540 s together. The
fifth is for machines with several GPUs."""

PARTS: Mapping[str, Part] = {name: part for job in JOBS for name, part in job.items()}
