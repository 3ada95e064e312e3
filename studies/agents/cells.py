"""Cells and contenders of the study of agents, and their simulation."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.orders import ORDERS
from jinfercept.sim.agent_sessions import ScriptedSession, fitting
from jinfercept.sim.run_stats import Report
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from studies.answer import StudyEffort

PAGE_SIZE = 64
MEAN_CONTEXT = 105_000
"""Tokens of a session's context, the median of the traces."""


class AgentModel(NamedTuple):
    """A model on its machine.

    Attributes:
        title: for tables.
        profile: its prices, a name of `PROFILES`.
        kv_tokens: of its device pool.
    """

    title: str
    profile: str
    kv_tokens: int


MODELS = (
    AgentModel("8B, H100", "roofline-llama-3-8b-h100-attention", 400_000),
    AgentModel("70B, 8 × A100", "roofline-llama-3-70b-8xa100-attention", 400_000),
    AgentModel("32B, H100", "roofline-qwen2.5-32b-fp8-h100-attention", 400_000),
)
"""By data sheets. The pools are as large for all, so that a cell's sessions are the same."""


class AgentCell(NamedTuple):
    """A model, and the pools beside the contexts of the live sessions.

    Attributes:
        model: of `MODELS`.
        device: device pool over the contexts of the live sessions.
        host: host pool over the device pool.
        disk: disk tier over the device pool; 0: there is none.
    """

    model: AgentModel
    device: float
    host: float
    disk: float = 0.0

    @property
    def live(self) -> int:
        """Sessions at a time."""
        return max(1, round(self.model.kv_tokens / (self.device * MEAN_CONTEXT)))

    def __str__(self) -> str:
        disk = f", disk {self.disk:g} ×" if self.disk else ""
        return f"{self.model.title}, device {self.device:g} ×, host {self.host:g} ×{disk}"


class Contender(NamedTuple):
    """A policy with its estimator, and the order of waiting requests."""

    title: str
    policy: str
    estimator: str = "elapsed"
    order: str = "fcfs"


_RIVALS = "examples.rivals"
_PROGRAM_ORDER = f"{_RIVALS}.continuum:ProgramOrder"
_ORDERS = {order: "" if order == "fcfs" else f"+{order}" for order in ORDERS}
"""What a contender's title ends in, by order."""
BASELINE = Contender("lru_host", "lru_host")
BOUNDS = tuple(
    Contender(f"belady{suffix}", f"{_RIVALS}.belady:Belady", "oracle", order)
    for order, suffix in (_ORDERS | {_PROGRAM_ORDER: "+programs"}).items()
)
"""The best of them is the bound that memory allows."""
OURS = tuple(Contender(f"copy_ahead{suffix}", "copy_ahead", "history", order) for order, suffix in _ORDERS.items())
RIVALS = (
    BASELINE,
    Contender("lru", "lru"),
    Contender("continuum", f"{_RIVALS}.continuum:TimeToLive", order=_PROGRAM_ORDER),
    Contender("thunder_agent", f"{_RIVALS}.thunder_agent:ProgramPausing"),
    Contender("saga", f"{_RIVALS}.saga:WorkflowLRU"),
    Contender("token_cake", f"{_RIVALS}.token_cake:PredictiveUpload"),
)
INFINITE = Contender("infinite", "bound")
CONTENDERS = (*OURS, *RIVALS, *BOUNDS, INFINITE)


class CellResult(NamedTuple):
    """What a contender did in a cell: means over seeds.

    Attributes:
        mean, p50, p99: turn delay in seconds.
        good: turns per second within the limits.
        turns: finished turns per second.
        recomputed, copied_out, copied_in: tokens.
    """

    mean: float
    p50: float
    p99: float
    good: float
    turns: float
    recomputed: float
    copied_out: float
    copied_in: float

    @classmethod
    def of(cls, reports: Sequence[Report]) -> "CellResult":
        """From the reports of its seeds."""
        rows = [
            (
                *(report["turn_delay_s"][name] for name in ("mean", "p50", "p99")),
                report["good_turns_per_s"],
                report["turns_per_s"],
                *(report[f"{name}_tokens"] for name in ("recomputed", "copied_out", "copied_in")),
            )
            for report in reports
        ]
        return cls(*(fmean(values) for values in zip(*rows, strict=True)))


class AgentMap(NamedTuple):
    """The results by cell and contender's title, and a row for each run."""

    cells: Sequence[AgentCell]
    contenders: Sequence[Contender]
    results: Mapping[tuple[AgentCell, str], CellResult]
    rows: Sequence[Report]

    def bound(self, cell: AgentCell, measure: str) -> float | None:
        """A number of the best of `BOUNDS`: the one of least mean delay; None if none was played."""
        played = [self.results[cell, bound.title] for bound in BOUNDS if (cell, bound.title) in self.results]
        return getattr(min(played, key=lambda result: result.mean), measure) if played else None


def play(
    effort: StudyEffort,
    sessions: Sequence[ScriptedSession],
    cells: Sequence[AgentCell],
    contenders: Sequence[Contender],
    num_seeds: int,
    duration_s: float,
) -> AgentMap:
    """Simulate all contenders in all cells under the same sessions.

    Raises:
        ConfigError: no session fits a pool, and as `StudyEffort.play`.
    """
    trials = list(_trials(cells, contenders, range(effort.seed, effort.seed + num_seeds)))
    runs = [
        SweepRun(_simulation(cell, contender, duration_s), _load(sessions, cell, seed, duration_s))
        for cell, contender, seed in trials
    ]
    reports = effort.play(runs)
    by_trial = dict(zip(trials, reports, strict=True))
    results = {
        (cell, contender.title): CellResult.of([by_trial[trial] for trial in trials if trial[:2] == (cell, contender)])
        for cell in cells
        for contender in contenders
    }
    rows = [
        {"contender": contender.title, "device": cell.device, "host": cell.host, "disk": cell.disk, "live": cell.live}
        | report
        for (cell, contender, _), report in by_trial.items()
    ]
    return AgentMap(cells, contenders, results, rows)


def _trials(
    cells: Sequence[AgentCell], contenders: Sequence[Contender], seeds: range
) -> Iterator[tuple[AgentCell, Contender, int]]:
    for cell in cells:
        for contender in contenders:
            for seed in seeds:
                yield cell, contender, seed


def _load(
    sessions: Sequence[ScriptedSession], cell: AgentCell, seed: int, duration_s: float
) -> SimulatedLoad[SessionLoad]:
    load = SessionLoad(fitting(sessions, cell.model.kv_tokens), seed, cell.live, duration_s=duration_s, named=True)
    return SimulatedLoad("agents", 0.0, seed, load)


def _simulation(cell: AgentCell, contender: Contender, duration_s: float) -> Simulation:
    kv_tokens = cell.model.kv_tokens // PAGE_SIZE * PAGE_SIZE
    return Simulation(
        PROFILES[cell.model.profile],
        contender.policy,
        contender.estimator,
        duration_s,
        drain_s=0.0,
        kv_tokens=kv_tokens,
        host_tokens=round(cell.host * kv_tokens),
        disk_tokens=round(cell.disk * kv_tokens) if contender is not INFINITE else 0,
        page_size=PAGE_SIZE,
        max_model_len=kv_tokens,
        prefix_caching=True,
        order=contender.order,
        warm_up_s=duration_s / 10,
    )
