"""The suite of GPUs, and what `nvidia-smi` says of one. Imports no JAX."""

from benchmarks.gpu_suite.missing import missing
from benchmarks.gpu_suite.parts import JOBS
from benchmarks.gpu_suite.sizes import FULL
from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.machine import printed
from benchmarks.suite.sizes import Row

PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "triton")
QUERIES = {
    "name": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "temperature": "temperature.gpu",
    "power": "power.draw",
}


def gpu_state() -> Row | None:
    """Name, driver, clocks and temperature of the first GPU as they are now; None without `nvidia-smi`."""
    query = f"--query-gpu={','.join(QUERIES.values())}"
    line = printed("nvidia-smi", query, "--format=csv,noheader", "--id=0")
    return None if line is None else dict(zip(QUERIES, map(str.strip, line.split(",")), strict=False))


GPU = SuiteKind(
    name="gpu",
    device="GPU",
    platform="cuda",
    install="install it for CUDA",
    jobs=JOBS,
    full=lambda: FULL,
    limit_s=540.0,
    missing=missing,
    state=gpu_state,
    packages=PACKAGES,
    tunes=True,
)
