"""The suites by name. Imports no JAX."""

from collections.abc import Mapping

from benchmarks.gpu_suite.kind import GPU
from benchmarks.suite.kind import SuiteKind
from benchmarks.tpu_suite.kind import TPU

KINDS: Mapping[str, SuiteKind] = {kind.name: kind for kind in (GPU, TPU)}
