"""`python -m studies paper`: every policy over loads on the paper's machines, and what the paper reports beside it.

Writes a folder: `paper.md` (tables), `paper.csv` (a row for each run) and `paper.png`. One sweep does it all: the mixed
workload at all rates for Figure 2, the waste and the ablation; then each kind of request alone.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from rich.console import Console

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.cli.simulate import drawer, load
from jinfercept.cli.simulation_table import exit_status, table
from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.policies import SETTINGS
from jinfercept.sched.profile import Profile
from jinfercept.sim.reports import check_least, listed, numbers, show, write_all
from jinfercept.sim.simulation import BOUNDS, Simulation
from jinfercept.sim.sweep import Report, SimulatedLoad, SweepRun, sweep
from jinfercept.sim.workload import DISTRIBUTIONS, Arrival, Script, from_trace, load_trace
from studies.answer import output_folder, write_csv
from studies.paper.report import WIDE_STEPS, Study, Summary, load_figure, markdown, panels
from studies.plots import draw

FULL_RATES, SHORT_RATES = ("1,2,3,4,5,6,8",), ("2,4,6",)
FIGURE = Path(__file__).with_name("figure_2.csv")
"""The paper's Figure 2, digitised from the authors' vector figure (arXiv 2402.01869)."""
POLICIES = (*SETTINGS, *BOUNDS)
KIND_POLICIES = ("discard", "min_waste", "copy_ahead")
INTERRUPTED_NAME = "paper-interrupted.csv"
PAPER_SOURCE = "the authors' mixed trace, from a public copy"
SAMPLES = 500
"""Requests that are drawn to learn how long those of a kind are."""


class Pool(NamedTuple):
    """Tokens of KV that a machine has room for, and where the number is from."""

    tokens: int
    source: str


POOLS: Mapping[str, Pool] = {
    "paper-gptj-6b-a100": Pool(
        53_000, "what 90 % of a 40 GB A100 leaves beside 12.1 GB of weights, at 448 KiB a token"
    ),
    "paper-vicuna-13b-2xa100": Pool(
        56_000, "by the same rule (2 × 40 GB × 0.9 − 26 GB, at 800 KiB a token); with 80 GB cards it would be 144,000"
    ),
}
"""Of the paper's machines. The paper does not give the pools: 53,000 is an estimate, and tells the size of the cards."""

MACHINES = (*POOLS, "roofline-llama-3-70b-4xa100")
"""Profiles of the paper's machines; the short study has the first."""
NO_CONSTANTS = (
    "the authors publish no constants of this machine, so that its prices follow from data sheets too: order and ratios may be "
    "compared with the paper's, milliseconds and positions may not"
)


@dataclass(frozen=True)
class Paper:
    """The command."""

    profile: Several = ()
    """a named profile, or a JSON file; the first one also plays each kind of request alone (default: GPT-J's; with --full
    the paper's three)"""
    full: Switch = False
    """all 312 runs: three machines, seven rates (default: one machine, three rates, a few minutes)"""
    reference: str = str(FIGURE)
    """the paper's Figure 2, digitised: a CSV file, to be drawn beside the simulated one"""
    trace: Maybe[str] = "paper"
    """scripts to draw from, a JSON line each; paper: the authors'; generated: their statistics"""
    duration: Maybe[float] = None
    """seconds of arrivals of a run (default: 100; with --full 200)"""
    rate: Several = ()
    """requests per second (default: 2, 4 and 6; with --full 1 to 6, and 8)"""
    seed: int = 0
    """seed of the arrivals"""
    kv_tokens: Maybe[int] = None
    """device pool (default: the paper's, or the profile's)"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    out: str = "paper"
    """folder to write paper.md, .csv and .png to; made if it does not exist"""

    def run(self) -> int:
        """Simulate, and write the report.

        Returns:
            The exit status: 0, 1 if a run failed, 130 if Ctrl-C ended some.

        Raises:
            ConfigError: the options make no sense.
        """
        check_least("--jobs", self.jobs, 1)
        figure, trace = load_figure(self.reference), None if self.trace == "generated" else self.trace
        chosen = self.profile or (MACHINES if self.full else MACHINES[:1])
        machines = {machine.name: machine for machine in map(load_profile, listed(chosen))}
        pools = {name: _pool(machine, self.kv_tokens) for name, machine in machines.items()}
        rates = numbers("--rate", self.rate or (FULL_RATES if self.full else SHORT_RATES), float)
        duration = (200.0 if self.full else 100.0) if self.duration is None else self.duration
        folder = output_folder(self.out, ("paper.csv", "paper.md", "paper.png", INTERRUPTED_NAME))
        runs = _runs(machines, pools, trace, duration, rates, self.seed)
        reports = sweep(runs, self.jobs, Console(stderr=True))
        for name in machines:
            print(name)
            show(table([report for report in reports if (report["profile"], report["workload"]) == (name, "mixed")]))
        status = exit_status(reports)
        if status == 130:  # a report that was there stays
            _write_interrupted(folder, reports)
            return status
        studies = [
            Study(name, [report for report in reports if report["profile"] == name], pool.tokens, pool.source)
            for name, pool in pools.items()
        ]
        source = (
            "generated with the trace's statistics"
            if trace is None
            else PAPER_SOURCE
            if trace == "paper"
            else Path(trace).name
        )
        _write(folder, Summary(studies, figure, source, duration, self.seed), reports)
        return status


def _write_interrupted(folder: Path, reports: Sequence[Report]) -> None:
    """Write the runs that are done to a file of their own."""
    path = folder / INTERRUPTED_NAME
    write_all({str(path): lambda: write_csv(path, reports)})
    num_done = sum("error" not in report for report in reports)
    print(f"interrupted: {num_done} of {len(reports)} runs are done and in {path}")


def _write(folder: Path, summary: Summary, reports: Sequence[Report]) -> None:
    """Write the report: tables, a row for each run, and a picture if there is something to draw."""
    writers: dict[str, Callable[[], object]] = {
        "paper.csv": lambda: write_csv(folder / "paper.csv", reports),
        "paper.md": lambda: (folder / "paper.md").write_text(markdown(summary), encoding="utf-8"),
    }
    drawn = panels(summary)
    if drawn:
        writers["paper.png"] = lambda: draw(folder / "paper.png", drawn)
    write_all({str(folder / name): write for name, write in writers.items()})
    print(f"written: {', '.join(str(folder / name) for name in writers)}")


def _pool(machine: Profile, kv_tokens: int | None) -> Pool:
    if kv_tokens is not None:
        return Pool(kv_tokens, "as asked for")
    if (name := machine.name.removesuffix("-attention")) in POOLS:
        return POOLS[name]
    derived = machine.tables.get("derived")
    tokens = derived.get("kv_tokens") if isinstance(derived, Mapping) else None
    if type(tokens) is not int:
        raise ConfigError("how much KV does this machine hold?", got=machine.name, fix="say --kv-tokens N")
    return Pool(tokens, f"what the data sheets leave beside the weights; {NO_CONSTANTS}")


def _runs(
    machines: Mapping[str, Profile],
    pools: Mapping[str, Pool],
    trace: str | None,
    duration: float,
    rates: Sequence[float],
    seed: int,
) -> list[SweepRun]:
    """The mixed workload at all rates on all machines under all policies; each kind alone on the first."""
    base = {
        name: Simulation(machine, "copy_ahead", duration_s=duration, kv_tokens=pools[name].tokens)
        for name, machine in machines.items()
    }
    first = next(iter(base.values()))
    mixed = drawer(trace, "mixed", first.max_model_len)
    loads = [load("mixed", mixed, rate, duration, seed) for rate in rates]
    runs = [
        SweepRun(_under(base[name], policy), run_load) for name in base for run_load in loads for policy in POLICIES
    ]
    wide = {name: _wide(simulation) for name, simulation in base.items()}
    runs += [SweepRun(wide[name], run_load._replace(workload=WIDE_STEPS)) for name in base for run_load in loads]
    alone = _kinds(trace, mixed, rates[len(rates) // 2], duration, seed)
    return runs + [SweepRun(_under(first, policy), run_load) for run_load in alone for policy in KIND_POLICIES]


def _under(base: Simulation, policy: str) -> Simulation:
    """Ours with the estimator that it ships with, the others with the paper's."""
    return replace(base, policy=policy, estimator="history" if policy == "copy_ahead" else "elapsed")


def _wide(base: Simulation) -> Simulation:
    """Chunks in steps as large as whole prompts have: what of the ablation is the chunks and what the size of the steps."""
    return replace(_under(base, "chunked_discard"), buckets=tuple(range(1, base.max_model_len + 1)))


Source = Callable[[Random], Callable[[], Script]]


def _kinds(
    trace: str | None, mixed: Source, rate: float, duration: float, seed: int
) -> list[SimulatedLoad[Sequence[Arrival]]]:
    """Each kind alone, as often as brings the tokens per second that the mix brings at `rate`."""
    sources: dict[str, Source] = {}
    if trace is None:
        sources = {kind: drawer(None, kind, 1 << 30) for kind in DISTRIBUTIONS}
    else:
        scripts = load_trace(trace)
        for kind in sorted({script.kind for script in scripts}):
            own = [script for script in scripts if script.kind == kind]
            sources[kind] = lambda rng, own=own: from_trace(own, rng)
    tokens_per_s = rate * _mean_tokens(mixed, seed)
    return [
        load(kind, source, round(tokens_per_s / _mean_tokens(source, seed), 2), duration, seed)
        for kind, source in sources.items()
    ]


def _mean_tokens(source: Source, seed: int) -> float:
    drawn = source(Random(seed))
    return fmean(drawn().context for _ in range(SAMPLES))
