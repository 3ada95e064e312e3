"""`jinfercept simulate`: one workload, one or several policies, a table and a JSON file. Imports no JAX."""

import json
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jinfercept.bench.arrivals import Arrival, arrivals
from jinfercept.bench.simulate import Simulation
from jinfercept.bench.workload import draw, from_trace, load_trace
from jinfercept.sched.profile import load_profile


def simulate(
    *,
    trace: str | None,
    workload: str,
    like: Any,
    profile: str,
    policies: list[str],
    estimator: str,
    rate: float,
    burstiness: float,
    duration: float,
    seed: int,
    kv_tokens: int,
    host_tokens: int,
    page_size: int,
    json_path: str | None,
) -> int:
    """Run the command; returns the exit status."""
    rng = Random(seed)
    source = from_trace(load_trace(trace), rng) if trace else lambda: draw(workload, rng, like)
    coming = arrivals(source, rate, duration, rng, burstiness)
    simulations = [
        Simulation(
            load_profile(profile),
            policy,
            estimator,
            duration,
            kv_tokens=kv_tokens,
            host_tokens=host_tokens,
            page_size=page_size,
        )
        for policy in policies
    ]
    reports = [_play(simulation, coming) | {"rate": rate, "seed": seed} for simulation in simulations]
    Console().print(table(reports))
    if json_path:
        Path(json_path).write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    return 0


def _play(simulation: Simulation, coming: list[Arrival]) -> dict[str, Any]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(simulation.policy, total=2 * simulation.duration_s)
        return simulation.run(coming, lambda now, end: progress.update(task, completed=now))


def table(reports: list[dict[str, Any]]) -> Table:
    """A row for each run."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("policy", no_wrap=True)
    for name in (
        "ms/token",
        "p99",
        "ttft s",
        "done/s",
        "left",
        "recomputed",
        "out",
        "in",
        "waste",
        "recompute",
        "wall s",
    ):
        shown.add_column(name, justify="right")
    for report in reports:
        latency = report["normalized_latency_paper_ms_per_token"]
        shown.add_row(
            report["policy"],
            _number(latency["mean"]),
            _number(latency["p99"]),
            _number(report["ttft_s"]["mean"]),
            _number(report["completed_per_s"]),
            str(report["unfinished"]),
            f"{report['recomputed_tokens']:,}",
            f"{report['copied_out_tokens']:,}",
            f"{report['copied_in_tokens']:,}",
            f"{report['waste_fraction']:.1%}",
            f"{report['recompute_share']['forward_time']:.1%}",
            f"{report['sim_wall_s']:.0f}",
        )
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
