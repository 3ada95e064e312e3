"""A part of a suite, and what parts of all suites are called. Imports no JAX."""

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.suite.missing import installed_version

TRACED_WITH_GRAPHS = ("--xla_enable_command_buffers_during_profiling=true",)
"""Without it XLA launches every kernel of a GPU by itself while a profiler runs: a trace of another mode."""

ATTENTION_PARTS = ("kernels", "flashinfer", "chunks", "torch_peer")
"""Parts that time attention by itself; only earlier files have the last two."""
STEP_PARTS = ("decode", "groups", "torch_step")
"""Parts that time steps of greedy rows, see `steps`; the last one in torch."""
LINK_PARTS = ("overlap", "threads", "transfers")
"""Parts that load the host link beside a step, see `transfers`; only earlier files have the last two."""
RIGHT_PARTS = ("smoke", "checks", "tokens", "kinds")
"""Parts that check what is computed: every row is `ok` or not."""


class Part(NamedTuple):
    """One part, which runs in a process of its own.

    Attributes:
        module: among `benchmarks`.
        limit_s: seconds after which it is ended, so that one that hangs leaves time for the others.
        function: of the module, from `Sizes` to rows.
        environment: variables that it needs before JAX starts its backend.
        xla_flags: of its executables.
        checked: it runs under `compute-sanitizer`, where that is on the path.
        packages: that it needs beside the project's; it is skipped where one is not there. With torch it runs without JAX.
    """

    module: str
    limit_s: float
    function: str = "rows"
    environment: Mapping[str, str] = {}
    xla_flags: tuple[str, ...] = ()
    checked: bool = False
    packages: tuple[str, ...] = ()

    @property
    def lacking(self) -> list[str]:
        """Those of its packages that are not here."""
        return [name for name in self.packages if installed_version(name) is None]
