"""What a pause wastes in an engine that drops contexts: one kind of call at a time, under vLLM's policy of 2024."""

from random import Random

from jinfercept.sched.profile import load_profile
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.distributions import DISTRIBUTIONS
from jinfercept.sim.plots import Bars
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from jinfercept.sim.tables import TextTable
from jinfercept.sim.workload import draw
from jinfercept.studies.answer import StudyAnswer, StudyEffort

RATE = 3.0


def ask(effort: StudyEffort) -> StudyAnswer:
    """Requests whose calls are all of one kind, at one rate, under `discard` and under `copy_ahead`."""
    kinds = tuple(DISTRIBUTIONS["trace"])[: 2 if effort.quick else None]
    duration_s = 20.0 if effort.quick else 300.0
    machine = load_profile("paper-gptj-6b-a100")
    runs = [
        SweepRun(Simulation(machine, policy, "history", duration_s), _load(kind, duration_s, effort.seed))
        for kind in kinds
        for policy in ("discard", "copy_ahead")
    ]
    reports = effort.play(runs)
    rows = [[one["workload"], one["policy"], *(f"{value:.1%}" for value in _shares(one).values())] for one in reports]
    table = TextTable("Waste by kind of call.", ["calls", "policy", *_shares(reports[0])], rows)
    dropped = [one for one in reports if one["policy"] == "discard"]
    worst = max(dropped, key=lambda one: one["recompute_share"]["forward_time"])
    return StudyAnswer(
        "What does a pause waste where contexts are dropped?",
        [table],
        [f"Recomputation takes most under {worst['workload']}: {worst['recompute_share']['forward_time']:.1%}."],
        [[Bars("waste under discard", "share", {one["workload"]: _shares(one) for one in dropped}, beside=True)]],
        reports,
    )


def _load(kind: str, duration_s: float, seed: int) -> SimulatedLoad[Arrival]:
    rng = Random(seed)
    return SimulatedLoad(kind, RATE, seed, arrivals(lambda: draw(kind, rng, "trace"), RATE, duration_s, rng))


def _shares(report: Report) -> dict[str, float]:
    return {
        "recomputation of device time": report["recompute_share"]["forward_time"],
        "recomputation of latency": report["recompute_share"]["request_latency"],
        "memory wasted": report["waste_fraction"],
    }
