"""The suite of TPUs, and what a TPU machine's variables say of it. Imports no JAX. No TPU has run the suite."""

import os

from benchmarks.suite.kind import SuiteKind
from benchmarks.suite.sizes import Row
from benchmarks.tpu_suite.missing import missing
from benchmarks.tpu_suite.parts import JOBS
from benchmarks.tpu_suite.sizes import ON_CPU, full

VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_WORKER_ID", "TPU_CHIPS_PER_HOST_BOUNDS", "LIBTPU_INIT_ARGS")


def tpu_state() -> Row | None:
    """The variables of the environment that describe the TPU; None without any."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ} or None


TPU = SuiteKind(
    name="tpu",
    device="TPU",
    platform="tpu",
    install="pip install 'jinfercept[tpu]' on a machine that has one",
    jobs=JOBS,
    full=full,
    limit_s=7200.0,
    missing=missing,
    state=tpu_state,
    packages=("libtpu",),
    tiny=ON_CPU,
)
