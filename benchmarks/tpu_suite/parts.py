"""The parts of the suite in the order of what they are worth, and jobs of them. Imports no JAX."""

from collections.abc import Mapping

from benchmarks.suite.parts import Part

JOBS: Mapping[str, Mapping[str, Part]] = {
    "A": {
        "smoke": Part("suite.smoke", 600.0),
        "checks": Part("suite.correctness", 300.0, "kernel_rows"),
        "decode": Part("suite.steps", 600.0, "decode_rows"),
        "kernels": Part("tpu_suite.kernels", 600.0),
        "experts": Part("tpu_suite.experts", 300.0),
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
