"""What a suite has of its own: the kind of device, its parts, its sizes, and what tells whether and how the device is there.

Imports no JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.suite.missing import Missing
from benchmarks.suite.parts import Part
from benchmarks.suite.sizes import TINY, Row, Sizes


class SuiteKind(NamedTuple):
    """One suite.

    Attributes:
        name: gpu or tpu: of the tool, of the folder of what is its own, and of its results.
        device: in words.
        platform: JAX's name of it, in `JAX_PLATFORMS`.
        install: what to do where JAX does not find it.
        jobs: by the name of a job its parts, by theirs.
        full: sizes for the device, asked for in a part's process.
        missing: what the machine lacks.
        limit_s: seconds for all parts together, unless the command says otherwise.
        state: what the device's own tools say of it now; None without them.
        packages: whose versions are noted, beside those of every suite.
        tunes: XLA chooses kernels by timing them, which is kept for the next run.
        tiny: sizes for a CPU.
    """

    name: str
    device: str
    platform: str
    install: str
    jobs: Mapping[str, Mapping[str, Part]]
    full: Callable[[], Sizes]
    limit_s: float
    missing: Callable[[], list[Missing]]
    state: Callable[[], Row | None]
    packages: Sequence[str] = ()
    tunes: bool = False
    tiny: Sizes = TINY

    @property
    def tool(self) -> str:
        """The command among `tools/`."""
        return f"{self.name}_suite"

    @property
    def parts(self) -> dict[str, Part]:
        """All parts, what matters most first."""
        return {name: part for job in self.jobs.values() for name, part in job.items()}
