"""The cells of the map of where deciding matters: a machine and a crowd each, and the policies that serve it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jinfercept.sched.named_profiles import GPTJ_6B
from jinfercept.sched.plugins import label
from jinfercept.sched.profile import Profile
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SweepRun
from studies.answer import StudyEffort
from studies.deciding.crowd import MOST_CONTEXT, Crowd

DEVICE_TOKENS = 12_000
SATURATION = 1_000.0
"""Decoded tokens per second of load 1. At the centre 1 of 100 first tokens comes after 1.3 s under `lru_host`; at load 0.9
after 0.6 s (seed 0)."""
DURATION_S = 40.0
BOTH_WAYS = 1.5
"""Tokens that a link moves both ways together over those that it moves one way: 83 over 53 GB/s on PCIe 5, rounded."""


class DecidingCell(NamedTuple):
    """A machine and a crowd; the defaults are the centre.

    Attributes:
        host: host memory over the device's pool.
        link: GB/s of the host link one way.
        load: over `SATURATION`.
        returning: share of clients that stay to the end.
        spread: standard deviation of the logarithm of the seconds of calls.
    """

    host: float = 1.0
    link: float = 16.0
    load: float = 1.0
    returning: float = 0.7
    spread: float = 1.5

    @property
    def machine(self) -> Profile:
        """InferCept's GPT-J-6B on an A100 behind another link."""
        tokens_per_s = self.link * 1e9 / GPTJ_6B.kv_bytes_per_token
        return replace(
            GPTJ_6B,
            name=f"gptj-6b-a100, {self.link:g} GB/s",
            link_out_tokens_per_s=tokens_per_s,
            link_in_tokens_per_s=tokens_per_s,
            link_both_tokens_per_s=BOTH_WAYS * tokens_per_s,
        )

    @property
    def crowd(self) -> Crowd:
        """The requests."""
        return Crowd(self.load * SATURATION, self.returning, self.spread)


CROWD = DecidingCell(returning=0.3)
"""A crowd in which 70 of 100 clients leave."""
CROWD_S = 120.0
CROWD_SEEDS = 3


class Factor(NamedTuple):
    """What is varied.

    Attributes:
        title: for tables and axes.
        values: of the cells' field, with their texts.
    """

    title: str
    values: Mapping[float, str]


def _plain(*values: float) -> Mapping[float, str]:
    return {value: f"{value:g}" for value in values}


FACTORS: Mapping[str, Factor] = {
    "host": Factor("host memory / device pool", _plain(0.25, 0.5, 1.0, 2.0, 8.0)),
    "link": Factor("host link, GB/s one way", {2.0: "16/8", 4.0: "32/8", 8.0: "64/8", 16.0: "16", 64.0: "64"}),
    "load": Factor("load / saturation", _plain(0.5, 0.75, 1.0, 1.15, 1.3)),
    "returning": Factor("share of clients that return", _plain(1.0, 0.7, 0.5, 0.3, 0.1)),
    "spread": Factor("spread of call durations, sigma", _plain(0.0, 0.75, 1.5, 2.25, 3.0)),
}
"""By the field of `DecidingCell`. `64/8` is a link of 64 GB/s that eight busy devices share."""

PLANES = (("host", "link"), ("load", "returning"))
"""Pairs of factors that are varied together: of the rows and of the columns of a heat map."""


class Contender(NamedTuple):
    """A policy with its estimator, and the order of waiting requests."""

    policy: str
    estimator: str = "elapsed"
    order: str = "fcfs"

    @property
    def name(self) -> str:
        """In tables."""
        policy = label(self.policy).rpartition(":")[2]
        return policy if self.order == "fcfs" else f"{policy}, {self.order_name}"

    @property
    def order_name(self) -> str:
        """In tables."""
        return label(self.order).rpartition(":")[2]


OURS = Contender("copy_ahead", "history")
BASELINE = Contender("lru_host")
ORDERED = Contender("copy_ahead", "history", "examples.memory_time:MemoryTime")
RIVALS = (*(Contender(name) for name in ("lru", "min_waste", "swap", "improved_discard")), ORDERED)


class CellResult(NamedTuple):
    """What a contender did in a cell.

    Attributes:
        mean, p50, p99: latency over tokens in ms, as InferCept defines it.
        first_token_s: exceeded by one first token of a hundred.
        good: requests per second of arrivals within the limits of goodput.
        recomputed: tokens.
    """

    mean: float
    p50: float
    p99: float
    first_token_s: float
    good: float
    recomputed: int

    @classmethod
    def of(cls, report: Report) -> "CellResult":
        """From a run's report."""
        latency = report["normalized_latency_paper_ms_per_token"]
        good = report["goodput_per_s"] * report["simulated_s"] / report["duration_s"]
        return cls(
            latency["mean"], latency["p50"], latency["p99"], report["ttft_s"]["p99"], good, report["recomputed_tokens"]
        )


class DecidingMap(NamedTuple):
    """The runs of a map, and their rows for a file.

    Attributes:
        crowd: reports of ours and of the baseline in `CROWD`, for longer and with several seeds.
    """

    played: Mapping[tuple[DecidingCell, str], CellResult]
    rows: Sequence[Report]
    crowd: Sequence[Report]

    def ratio(self, cell: DecidingCell, measure: str, name: str = OURS.name, over: str = BASELINE.name) -> float:
        """A contender's number over that of another; 1 if both are 0."""
        ours, rivals = (getattr(self.played[cell, contender_name], measure) for contender_name in (name, over))
        return ours / rivals if rivals else 1.0 if ours == rivals else float("inf")


def axis(factor: str, quick: bool) -> list[DecidingCell]:
    """The cells in which one factor is varied: all of its values, or the ends."""
    values = list(FACTORS[factor].values)
    return [DecidingCell()._replace(**{factor: value}) for value in ([values[0], values[-1]] if quick else values)]


def plane(rows: str, columns: str, quick: bool) -> list[list[DecidingCell]]:
    """The cells in which two factors are varied, by row."""
    return [
        [cell._replace(**{columns: getattr(at_column, columns)}) for at_column in axis(columns, quick)]
        for cell in axis(rows, quick)
    ]


def play(effort: StudyEffort, contenders: Sequence[Contender]) -> DecidingMap:
    """Simulate all contenders in the cells of the axes, and ours and the baseline in those of the planes."""
    trials = dict.fromkeys(_asked(effort.quick, contenders))
    duration_s = 3.0 if effort.quick else DURATION_S
    loads = {cell.crowd: cell.crowd.load(duration_s, effort.seed) for cell, _ in trials}
    runs = [SweepRun(_simulation(cell, contender, duration_s), loads[cell.crowd]) for cell, contender in trials]
    seeds = range(effort.seed, effort.seed + CROWD_SEEDS)
    crowd_s = duration_s if effort.quick else CROWD_S
    crowds = [CROWD.crowd.load(crowd_s, seed) for seed in seeds]
    runs += [
        SweepRun(_simulation(CROWD, contender, crowd_s), load) for load in crowds for contender in (OURS, BASELINE)
    ]
    reports = effort.play(runs)
    crowd, reports = reports[len(trials) :], reports[: len(trials)]
    rows = [cell._asdict() | report for (cell, _), report in zip(trials, reports, strict=True)]
    results = {
        (cell, contender.name): CellResult.of(report) for (cell, contender), report in zip(trials, reports, strict=True)
    }
    return DecidingMap(results, rows, crowd)


def _asked(quick: bool, contenders: Sequence[Contender]) -> Iterator[tuple[DecidingCell, Contender]]:
    for factor in FACTORS:
        for cell in (DecidingCell(), *axis(factor, quick)):
            yield from ((cell, contender) for contender in contenders)
    for rows, columns in PLANES:
        for line in plane(rows, columns, quick):
            yield from ((cell, contender) for cell in line for contender in (OURS, BASELINE))


def _simulation(cell: DecidingCell, contender: Contender, duration_s: float) -> Simulation:
    return Simulation(
        cell.machine,
        contender.policy,
        contender.estimator,
        duration_s,
        kv_tokens=DEVICE_TOKENS,
        host_tokens=round(cell.host * DEVICE_TOKENS),
        max_model_len=MOST_CONTEXT + 1,
        order=contender.order,
    )
