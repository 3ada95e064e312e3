"""What was read of an executable, and the path that a step takes through it: of every conditional the cheapest branch.

Steps whose rows are all greedy take that path; what other rows add shows in the difference to all branches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_bill.cases import Case
from benchmarks.gpu_bill.machine_code import Kernel
from benchmarks.gpu_bill.program import NO_TRAFFIC, Thunk, Traffic

SILENT = ("kSequential", "kCommandBuffer", "kConditional", "kWhile", "kCopyDone", "kWaitForStreams")
"""Thunks that launch nothing themselves."""
WAITING = ("kConditional", "kWhile", "kDeviceToHostCopy", "kCopyDone", "kHostSend", "kHostRecv")


@dataclass
class Launch:
    """A kernel, a library's call or a copy that a step launches.

    Attributes:
        turns: how often; more than once in loops.
        in_graph: whether it is part of a command buffer.
    """

    thunk: Thunk
    traffic: Traffic
    turns: float
    in_graph: bool

    @property
    def attends_chunks(self) -> bool:
        """Whether it is the kernel of attention for chunks; Mosaic's reads a slice of the step's upload."""
        return self.traffic.pages and (self.thunk.kind == "kDynamicSliceFusion" or "chunk" in self.thunk.kernel)


@dataclass
class Reading:
    """What was read of one executable.

    Attributes:
        key: of the executable, as a runner names it, in words.
        error: of the compilation; None if it succeeded.
    """

    case: Case
    key: tuple[str, ...]
    error: str | None
    temp_bytes: int = 0
    thunks: Thunk = field(default_factory=lambda: Thunk("kSequential"))
    traffic: dict[int, Traffic] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`embed`, `layers`, `head`, `sample`, `gather`, …; variants as `decode layers` are of the same kind."""
        return self.key[0].split()[-1]

    @property
    def decode_only(self) -> bool:
        """Whether it is for steps of decode rows only."""
        return self.key[0].startswith("decode ")

    @property
    def num_rows(self) -> int:
        """Rows of its products."""
        return int(self.key[2]) if self.kind == "head" else self.case.bucket

    def path(self, turns: float) -> list[Launch]:
        """What a step launches; `turns` of every loop."""
        return list(self._launches(self.thunks, turns, 1.0, False))

    def waits(self, turns: float) -> float:
        """How often the host waits for the device on that path."""
        return sum(count for _, count in self._waits(self.thunks, turns, 1.0))

    def _chosen(self, thunk: Thunk, turns: float) -> list[Thunk]:
        """Children that run: of a conditional those of its cheapest branch."""
        if thunk.kind != "kConditional":
            return thunk.children
        branches = {
            label: [c for c in thunk.children if c.label == label] for label in {c.label for c in thunk.children}
        }
        if len(branches) < 2:
            return []  # the other branch has nothing to do
        return min(branches.values(), key=lambda branch: self._weigh(branch, turns))

    def _weigh(self, branch: list[Thunk], turns: float) -> tuple[float, int]:
        launches = [launch for thunk in branch for launch in self._launches(thunk, turns, 1.0, False)]
        return sum(launch.turns * (launch.traffic.read + launch.traffic.made) for launch in launches), len(launches)

    def _launches(self, thunk: Thunk, turns: float, count: float, in_graph: bool) -> Iterator[Launch]:
        if thunk.kind not in SILENT:
            yield Launch(thunk, self.traffic.get(id(thunk), NO_TRAFFIC), count, in_graph)
        inner = count * turns if thunk.kind == "kWhile" else count
        for child in self._chosen(thunk, turns):
            yield from self._launches(child, turns, inner, in_graph or thunk.kind == "kCommandBuffer")

    def _waits(self, thunk: Thunk, turns: float, count: float) -> Iterator[tuple[Thunk, float]]:
        inner = count * turns if thunk.kind == "kWhile" else count
        if thunk.kind in WAITING:
            yield thunk, inner
        for child in self._chosen(thunk, turns):
            yield from self._waits(child, turns, inner)


def reading(line: Mapping[str, Any]) -> Reading:
    """A line of the program that compiles."""
    fields = line["reading"]
    words = (word for word in line["key"] if "LayerKind" not in word)  # those of a model are always the same
    result = Reading(Case(*line["case"]), tuple(words), fields["error"])
    if result.error is None:
        result.temp_bytes = fields["temp_bytes"]
        result.thunks = _thunk(fields["thunks"], result.traffic)
        result.traffic = {place: _of_used_experts(traffic, result.case) for place, traffic in result.traffic.items()}
        result.kernels = {name: Kernel(**kernel) for name, kernel in fields["kernels"].items()}
    return result


def _of_used_experts(traffic: Traffic, case: Case) -> Traffic:
    """What a product with a stack of experts reads: of those in use. All others as they are."""
    experts = case.config.experts
    if experts is None or traffic.weight not in case.expert_bytes:
        return traffic
    idle = int(traffic.weight * case.idle_share(case.bucket))
    arguments = ((name, size - idle if size == traffic.weight else size) for name, size in traffic.arguments)
    share = experts.per_token / experts.num_experts
    return traffic._replace(read=traffic.read - idle, arguments=tuple(arguments), row_share=share)


def _thunk(described: Mapping[str, Any], traffic: dict[int, Traffic]) -> Thunk:
    plain = {name: value for name, value in described.items() if name not in ("children", "traffic")}
    thunk = Thunk(**plain, children=[_thunk(child, traffic) for child in described["children"]])
    if "traffic" in described:
        traffic[id(thunk)] = Traffic(**described["traffic"])
    return thunk
