"""The parts of the suite in the order of what they are worth, and jobs of them that take less than nine minutes each.

Imports no JAX.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Part(NamedTuple):
    """One part, which runs in a process of its own.

    Attributes:
        module: beside this one.
        limit_s: seconds after which it is ended, so that one that hangs leaves time for the others.
        function: of the module, from `Sizes` to rows.
        environment: variables that it needs before JAX starts its backend.
        checked: it runs under `compute-sanitizer`, where that is on the path.
    """

    module: str
    limit_s: float
    function: str = "rows"
    environment: Mapping[str, str] = {}
    checked: bool = False


EVERY_ALLOCATION = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Every array is an allocation of its own: in one large pool no access is out of bounds."""

JOBS: tuple[Mapping[str, Part], ...] = (
    {
        "correctness": Part("correctness", 80.0),
        "decode": Part("steps", 130.0, "decode_rows"),
        "transfers": Part("transfers", 160.0),
        "memcheck": Part("correctness", 90.0, "memcheck_rows", EVERY_ALLOCATION, checked=True),
        "ceilings": Part("ceilings", 40.0),
    },
    {
        "sampled": Part("steps", 90.0, "sampled_rows"),
        "async_dispatch": Part("steps", 100.0, "sampled_rows", {"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}),
        "groups": Part("steps", 190.0, "group_rows"),
        "buckets": Part("steps", 100.0, "default_bucket_rows"),
        "separate": Part("steps", 55.0, "separate_rows"),
    },
    {
        "kernels": Part("kernels", 130.0),
        "torch_peer": Part("torch_peer", 50.0),
        "gptj": Part("steps", 80.0, "gptj_rows"),
        "idle": Part("idle", 80.0),
        "policies": Part("policies", 180.0),
    },
    {
        "devices": Part("correctness", 300.0, "device_rows"),
    },
    {
        "overflow": Part("overflow", 520.0),
    },
)
"""What one job of ten minutes measures, by name; the limits of a job's parts are less than 540 s together. The fourth is for
machines with several GPUs."""

PARTS: Mapping[str, Part] = {name: part for job in JOBS for name, part in job.items()}

STEP_PARTS = ("decode", "groups", "gptj")
"""Parts whose steps have fitted buckets and greedy rows, see `steps`."""
