"""`python -m studies estimators`: what better predictions of durations are worth, and what wrong ones cost. Imports no JAX.

Two studies. One context alone, where the cost of knowing can be computed; and whole simulations, under policies that ask an
estimator, on all kinds of requests and on those with long calls only, beside an oracle and oracles that are wrong.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro import conf

from jinfercept.cli.options import Maybe, Several
from jinfercept.cli.simulated_loads import POLICY_NAMES, check_policies, load
from jinfercept.cli.simulation_table import exit_status
from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.profile import Profile
from jinfercept.sim.distributions import Like
from jinfercept.sim.plots import Bars, Panel, check_drawing, draw
from jinfercept.sim.reports import check_outputs, group, latency_ms, write_all, write_json
from jinfercept.sim.simulation import STUDIED_ESTIMATORS, Simulation
from jinfercept.sim.sweep import Report, SweepRun, sweep
from jinfercept.sim.tables import check_least, listed, show
from jinfercept.sim.workload import MIXED_WEIGHTS, Script, from_trace, load_trace
from jinfercept.sim.workload import draw as draw_script
from studies.estimators.single_request import RULES, cost_over_optimum

KINDS = {"mixed": tuple(MIXED_WEIGHTS), "long": ("chat", "image", "tts")}
"""The workloads of the study. In the second all calls take seconds: persons, pictures and speech."""

PARTS = ("preserve", "recompute", "stall", "fetch")
"""What waste is made of, as in a simulation's report."""


@dataclass(frozen=True)
class Estimators:
    """The command."""

    trace: Maybe[str] = None
    """scripts to draw from, a JSON line each, or paper (default: generated ones)"""
    like: Like = "trace"
    """statistics if generated"""
    profile: str = "paper-gptj-6b-a100"
    """a named profile, or a JSON file"""
    policy: Annotated[Several, conf.arg(help=f"{POLICY_NAMES} (default: min_waste and copy_ahead)")] = ()
    rate: float = 3.5
    """requests per second"""
    duration: float = 300.0
    """seconds of arrivals"""
    seed: int = 0
    """seed of the arrivals"""
    kv_tokens: int = 53_000
    """device pool"""
    host_tokens: int = 300_000
    """host pool"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    json: Maybe[str] = None
    """write both studies to this file"""
    plot: Maybe[str] = None
    """draw waste and latency into this file"""

    def run(self) -> int:
        """Run both studies; returns the exit status. Raises `ConfigError` before they begin if the options make no sense."""
        json_path, plot_path = self.json, self.plot
        machine = load_profile(self.profile)
        policies = listed(self.policy or ("min_waste", "copy_ahead"))
        check_policies(policies)
        check_least("--jobs", self.jobs, 1)
        check_outputs((("--json", json_path), ("--plot", plot_path)))
        if plot_path is not None:
            check_drawing(plot_path)
        runs = self._runs(machine, policies)
        single = single_request(machine)
        show(single_request_table(single))
        reports = with_regret(sweep(runs, self.jobs, Console(stderr=True)))
        show(table(reports))
        writers: dict[str, Callable[[], object]] = {}
        if json_path is not None:
            writers[json_path] = lambda: write_json(json_path, {"single_request": single, "simulated": reports})
        if plot_path is not None:
            writers[plot_path] = lambda: draw(plot_path, panels(reports))
        write_all(writers)
        return exit_status(reports)

    def _runs(self, machine: Profile, policies: Sequence[str]) -> list[SweepRun]:
        """Every combination of workload, policy and estimator."""
        return [
            SweepRun(self._simulation(machine, policy, estimator), coming)
            for name, kinds in KINDS.items()
            for coming in [load(name, source(kinds, self.trace, self.like), self.rate, self.duration, self.seed)]
            for policy in policies
            for estimator in STUDIED_ESTIMATORS
        ]

    def _simulation(self, machine: Profile, policy: str, estimator: str) -> Simulation:
        return Simulation(
            machine, policy, estimator, self.duration, kv_tokens=self.kv_tokens, host_tokens=self.host_tokens
        )


def source(kinds: Sequence[str], trace: str | None, like: Like) -> Callable[[Random], Callable[[], Script]]:
    """How requests of some kinds are drawn from a trace or, without one, generated. Raises `ConfigError` for a trace that
    has none of them."""
    if trace is None:
        weights = {kind: MIXED_WEIGHTS[kind] for kind in kinds}
        return lambda rng: lambda: draw_script("mixed", rng, like, weights)
    scripts = [script for script in load_trace(trace) if script.kind in kinds]
    if not scripts:
        raise ConfigError("the trace has no requests of these kinds", got=trace, fix=f"one with {', '.join(kinds)}")
    return lambda rng: from_trace(scripts, rng)


def single_request(profile: Profile) -> dict[str, float]:
    """Cost over the optimum by rule, on Table 1's six tools."""
    return {rule.name: cost_over_optimum(rule, lambda tokens: profile.step_s(tokens, 0)) for rule in RULES}


def with_regret(reports: list[Report]) -> list[Report]:
    """The reports with `regret`: waste and latency over those of the run with the oracle; None where one of them is missing."""
    oracles = {_panel(report): report for report in reports if report["estimator"] == "oracle"}
    return [
        report
        | {
            "regret": {
                "waste": _ratio(_waste(report), _waste(oracles[_panel(report)])),
                "latency": _ratio(latency_ms(report), latency_ms(oracles[_panel(report)])),
            }
        }
        for report in reports
    ]


def _panel(report: Mapping[str, Any]) -> tuple[str, str]:
    return report["workload"], report["policy"]


def _waste(report: Report) -> float | None:
    return None if "error" in report else sum(report["waste_token_s"].values())


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def single_request_table(costs: Mapping[str, float]) -> Table:
    """A row for each rule."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("one context alone", no_wrap=True)
    shown.add_column("cost over the cost of knowing", justify="right", no_wrap=True)
    for name, cost in costs.items():
        shown.add_row(name, f"{cost:.2f}")
    return shown


def table(reports: Sequence[Report]) -> Table:
    """A row for each run: latency, waste and its parts in % of the pool's token·seconds, tokens, and regret."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("workload", "policy", "estimator"):
        shown.add_column(name, no_wrap=True)
    for name in ("ms/token", "p99", "left", "waste", *PARTS, "recomputed", "out", "in", "waste/oracle", "ms/oracle"):
        shown.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        cells = [report["error"]] if "error" in report else _cells(report)
        shown.add_row(report["workload"], report["policy"], report["estimator"], *cells)
    return shown


def _cells(report: Report) -> list[str]:
    latency, regret = report["normalized_latency_paper_ms_per_token"], report["regret"]
    pool_token_s = report["kv_tokens"] * report["simulated_s"] or 1.0
    return [
        _number(latency["mean"]),
        _number(latency["p99"]),
        str(report["unfinished"]),
        f"{report['waste_fraction']:.2%}",
        *(f"{report['waste_token_s'][part] / pool_token_s:.2%}" for part in PARTS),
        *(f"{report[key]:,}" for key in ("recomputed_tokens", "copied_out_tokens", "copied_in_tokens")),
        _number(regret["waste"]),
        _number(regret["latency"]),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def panels(reports: Sequence[Report]) -> list[list[Panel]]:
    """A row for each workload and policy: waste by its parts, and latency, by estimator."""
    rows: list[list[Panel]] = []
    for names, some in group(reports, _panel).items():
        done = [report for report in some if "error" not in report]
        waste = {r["estimator"]: {part: r["waste_token_s"][part] for part in PARTS} for r in done}
        latency = {report["estimator"]: {"latency": latency_ms(report) or 0.0} for report in done}
        title = ", ".join(names)
        rows.append([Bars(title, "waste, token·seconds", waste), Bars(title, "latency, ms per token", latency)])
    return rows
