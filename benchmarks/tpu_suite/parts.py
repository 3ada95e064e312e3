"""The parts of the suite in the order of what they are worth, jobs of them, and what this machine lacks for them.

    python -m benchmarks.tpu_suite.parts [--tiny]

Prints a line for each thing that is missing; the exit status is 1 if no part can run, with `--tiny` without a TPU. Imports no
JAX.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.suite.parts import Missing, Part, installed_version, packages, print_missing, room

JOBS: Mapping[str, Mapping[str, Part]] = {
    "A": {
        "smoke": Part("suite.smoke", 600.0),
        "checks": Part("suite.correctness", 300.0, "kernel_rows"),
        "decode": Part("suite.steps", 600.0, "decode_rows"),
        "kernels": Part("tpu_suite.kernels", 600.0, "attention"),
        "experts": Part("tpu_suite.kernels", 300.0, "experts"),
    },
    "B": {
        "overlap": Part("suite.transfers", 300.0),
        "tokens": Part("suite.correctness", 600.0),
        "kinds": Part("suite.correctness", 600.0, "kind_rows"),
        "idle": Part("suite.idle", 600.0),
    },
    "C": {
        "policies": Part("suite.policies", 900.0),
        "agents": Part("suite.policies", 900.0, "agent_rows"),
    },
    "D": {
        "groups": Part("suite.steps", 900.0, "group_rows"),
    },
    "E": {
        "devices": Part("suite.correctness", 900.0, "device_rows"),
    },
}
"""By name. Limits are generous: how long XLA compiles on the host of a TPU is not known. The last is for several chips."""


NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""Files of the devices that Linux has for TPUs, by generation."""


def missing() -> list[Missing]:
    """Everything that is missing, what matters most first."""
    lacking = packages()
    if installed_version("libtpu") is None:
        lacking.append(Missing("libtpu (pip install 'jinfercept[tpu]')", "every part but with --tiny", True, False))
    if not any(any(Path("/").glob(pattern.removeprefix("/"))) for pattern in NODES):
        lacking.append(Missing(f"a TPU ({' or '.join(NODES)})", "perhaps every part but with --tiny"))
    return sorted([*lacking, *room()], key=lambda lack: not lack.fatal)


if __name__ == "__main__":
    sys.exit(print_missing(missing()))
