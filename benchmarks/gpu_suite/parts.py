"""The parts of the suite in the order of what they are worth, and jobs of them that take less than nine minutes each.

Imports no JAX.
"""

from collections.abc import Mapping
from typing import NamedTuple

TRACED_WITH_GRAPHS = ("--xla_enable_command_buffers_during_profiling=true",)
"""Without it XLA launches every kernel by itself while a profiler runs: a trace of another mode."""
NO_GRAPHS = ("--xla_gpu_enable_command_buffer=",)
NO_AUTOTUNING = ("--xla_gpu_autotune_level=0",)


class Part(NamedTuple):
    """One part, which runs in a process of its own.

    Attributes:
        module: beside this one.
        limit_s: seconds after which it is ended, so that one that hangs leaves time for the others.
        function: of the module, from `Sizes` to rows.
        environment: variables that it needs before JAX starts its backend.
        xla_flags: of its executables.
        checked: it runs under `compute-sanitizer`, where that is on the path.
    """

    module: str
    limit_s: float
    function: str = "rows"
    environment: Mapping[str, str] = {}
    xla_flags: tuple[str, ...] = TRACED_WITH_GRAPHS
    checked: bool = False


OWN_MEMORY = {"XLA_CLIENT_MEM_FRACTION": "0.92", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "48"}
"""Of parts that make runners and arrays themselves; an engine sets both at its start."""
GROWING_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Of parts that make weights before an engine that would set it: these leave the GPU's memory to others."""
EVERY_ALLOCATION = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Every array is an allocation of its own: in one large pool no access is out of bounds."""

MORE_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Queues that streams share: with the 8 of CUDA's default, a copy may wait for another stream's kernels."""

JOBS: tuple[Mapping[str, Part], ...] = (
    {
        "smoke": Part("smoke", 120.0),
        "decode": Part("steps", 70.0, "decode_rows", OWN_MEMORY),
        "overlap": Part("transfers", 75.0, "overlap_rows", OWN_MEMORY),
        "checks": Part("correctness", 80.0, "kernel_rows", GROWING_MEMORY),
        "kernels": Part("kernels", 150.0, environment=OWN_MEMORY),
    },
    {
        "policies": Part("policies", 235.0),
        "agents": Part("policies", 230.0, "agent_rows"),
        "idle": Part("idle", 70.0),
    },
    {
        "tokens": Part("correctness", 120.0, environment=GROWING_MEMORY),
        "kinds": Part("correctness", 120.0, "kind_rows", GROWING_MEMORY),
        "chunks": Part("kernels", 150.0, "chunk_rows", OWN_MEMORY),
        "transfers": Part("transfers", 85.0, environment=OWN_MEMORY),
        "connections": Part("transfers", 60.0, "overlap_rows", {**OWN_MEMORY, **MORE_CONNECTIONS}),
    },
    {
        "uploads": Part("uploads", 40.0, environment=OWN_MEMORY),
        "groups": Part("steps", 150.0, "group_rows", OWN_MEMORY),
        "launches": Part("steps", 60.0, "launch_rows", OWN_MEMORY, xla_flags=()),
        "torch_peer": Part("torch_peer", 40.0),
        "experts": Part("experts", 150.0, environment=OWN_MEMORY),
        "memcheck": Part(
            "correctness", 90.0, "memcheck_rows", EVERY_ALLOCATION, (*NO_AUTOTUNING, *NO_GRAPHS), checked=True
        ),
    },
    {
        "devices": Part("correctness", 300.0, "device_rows", GROWING_MEMORY),
    },
)
"""What one job of ten minutes measures, by name; the limits of a job's parts are less than 540 s together. The last is for
machines with several GPUs."""

PARTS: Mapping[str, Part] = {name: part for job in JOBS for name, part in job.items()}

STEP_PARTS = ("decode", "groups")
"""Parts that time steps of greedy rows, see `steps`."""

LINK_PARTS = ("overlap", "transfers")
"""Parts that load the host link beside a step, see `transfers`."""

RIGHT_PARTS = ("smoke", "checks", "tokens", "kinds")
"""Parts that check what is computed: every row is `ok` or not."""
