"""`jinfercept simulate`: one run, or all combinations of rates, policies and seeds side by side. Imports no JAX.

Says what is wrong with the options before anything runs; ends with one table and, where asked for, JSON, CSV and a picture.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jinfercept.errors import ConfigError, nearest
from jinfercept.sched.policies import SETTINGS
from jinfercept.sched.profile import load_profile
from jinfercept.sched.scheduler import Preemption
from jinfercept.sim.arrivals import arrivals
from jinfercept.sim.distributions import Like
from jinfercept.sim.plots import COLOURS, CurvePanel, PlottedCurve, check_drawing, draw
from jinfercept.sim.recording import NO_RECORDS, RecordFiles, name_files
from jinfercept.sim.reports import check_outputs, group, latency_ms, over_seeds, write_all, write_csv, write_json
from jinfercept.sim.simulation import BOUNDS, Simulation
from jinfercept.sim.sweep import INTERRUPTED, Report, SimulatedLoad, SweepRun, rate_text, sweep
from jinfercept.sim.tables import check_least, listed, number_text, numbers, show
from jinfercept.sim.workload import Script, from_trace, load_trace
from jinfercept.sim.workload import draw as draw_script

TABLE_NOTE = (
    "note: the contexts of the paper's table exceed its own window of 2,048 tokens (ve: 2,185 on average). "
    "The generator cuts each request where it reaches the window, so means come out below the table's."
)

MOST = 1_000_000
"""Sequences, tokens of a page, processes."""

_RECORD_FLAGS = ("--decisions", "--chrome-trace")


def simulate(
    *,
    trace: str | None,
    workload: str,
    like: Like,
    profile: str,
    policies: Sequence[str],
    estimator: str,
    rates: Sequence[str],
    burstiness: float,
    duration: float,
    seeds: Sequence[str],
    kv_tokens: int,
    host_tokens: int,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    chunked_prefill: bool | None,
    preemption: Preemption,
    jobs: int,
    json_path: str | None,
    csv_path: str | None,
    plot_path: str | None,
    records: RecordFiles = NO_RECORDS,
) -> int:
    """Run the command.

    Args:
        policies, rates, seeds: every combination is a run; each text may hold several, with commas.
        json_path, csv_path, plot_path: files to write.
        records: more of them; with several runs, policy, rate and seed go into their names.
        others: as in `Simulation`, `arrivals` and `workload.draw`.

    Returns:
        The exit status: 0, 1 if a run failed, 130 if Ctrl-C ended some.

    Raises:
        ConfigError: the options make no sense.
    """
    counts = {
        "--max-num-seqs": max_num_seqs,
        "--max-model-len": max_model_len,
        "--page-size": page_size,
        "--jobs": jobs,
    }
    for flag, count in counts.items():
        check_least(flag, count, 1)
        if count > MOST:
            raise ConfigError(f"{flag} is too large", got=count, fix=f"at most {MOST:,}")
    check_least("--host-tokens", host_tokens, 0)
    check_policies(listed(policies))
    check_outputs(
        (("--json", json_path), ("--csv", csv_path), ("--plot", plot_path), *zip(_RECORD_FLAGS, records, strict=True))
    )
    if plot_path is not None:
        check_drawing(plot_path)
    if like == "table":
        if trace is not None:
            raise ConfigError("--like is for generated workloads", got="a trace too", fix="leave out one of them")
        print(TABLE_NOTE, file=sys.stderr)
    simulations = [
        Simulation(
            load_profile(profile),
            policy,
            estimator,
            duration,
            kv_tokens=kv_tokens,
            host_tokens=host_tokens,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            chunked_prefill=chunked_prefill,
            preemption=preemption,
        )
        for policy in listed(policies)
    ]
    source = drawer(trace, workload, like, simulations[0].max_model_len)
    name = workload if trace is None else Path(trace).name
    loads = [
        load(name, source, rate, duration, seed, burstiness)
        for rate in numbers("--rate", rates, float)
        for seed in numbers("--seed", seeds, int)
    ]
    runs = [SweepRun(simulation, load) for load in loads for simulation in simulations]
    if len(runs) == 1:
        runs = [replace(runs[0], records=records)]
    else:
        runs = [replace(run, records=records.of(run.file_name)) for run in runs]
        check_outputs(output for run in runs for output in zip(_RECORD_FLAGS, run.records, strict=True))
    console = Console(stderr=True)
    reports = sweep(runs, jobs, console) if len(runs) > 1 else [play_here(runs[0], console)]
    show(table(reports))
    print(LEGEND, file=sys.stderr)
    if len(runs) > 1:
        name_files(run.records for run in runs)
    writers: dict[str, Callable[[], object]] = {}
    if json_path is not None:
        writers[json_path] = lambda: write_json(json_path, reports)
    if csv_path is not None:
        writers[csv_path] = lambda: write_csv(csv_path, reports)
    if plot_path is not None:
        title = f"{name}, {simulations[0].profile.name}"
        writers[plot_path] = lambda: draw(plot_path, [[curves(title, reports)]])
    write_all(writers)
    return exit_status(reports)


def exit_status(reports: Sequence[Report]) -> int:
    """0 if all went well, 1 if a run failed, 130 if Ctrl-C ended some."""
    errors = [report["error"] for report in reports if "error" in report]
    return 130 if INTERRUPTED in errors else 1 if errors else 0


# -- options -----------------------------------------------------------------------------------------------------------


def check_policies(names: Sequence[str]) -> None:
    """Raise `ConfigError` unless all of these can be simulated: a policy, or a bound."""
    for name in names:
        if name not in SETTINGS and name not in BOUNDS:
            known = (*SETTINGS, *BOUNDS)
            raise ConfigError("no such policy", got=name + nearest(name, known), fix=f"one of {', '.join(known)}")


def drawer(
    trace: str | None, workload: str, like: Like, max_model_len: int
) -> Callable[[Random], Callable[[], Script]]:
    """How requests are drawn from a trace or, without one, generated.

    Raises:
        ConfigError: no such trace, workload or statistics, or requests longer than `max_model_len`.
    """
    if trace is None:
        draw_script(workload, Random(0), like)
        return lambda rng: lambda: draw_script(workload, rng, like)
    scripts = load_trace(trace)
    longest = max(script.context for script in scripts)
    if longest >= max_model_len:
        raise ConfigError("the trace has a request that is too long", got=longest, fix=f"below {max_model_len} tokens")
    return lambda rng: from_trace(scripts, rng)


def load(
    workload: str,
    source: Callable[[Random], Callable[[], Script]],
    rate: float,
    duration: float,
    seed: int,
    burstiness: float = 1.0,
) -> SimulatedLoad:
    """Arrivals from a source. Raises `ConfigError` if rate, duration or burstiness are out of range."""
    rng = Random(seed)
    return SimulatedLoad(workload, rate, seed, arrivals(source(rng), rate, duration, rng, burstiness))


# -- one run, in this process ------------------------------------------------------------------------------------------


def play_here(run: SweepRun, console: Console) -> Report:
    """The report of a run; what Ctrl-C ends is one that has failed, as in a sweep."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(run.simulation.policy, total=2 * run.simulation.duration_s)
        try:
            return run.play(lambda now: progress.update(task, completed=now))
        except KeyboardInterrupt:
            return run.failed(INTERRUPTED)


# -- what is shown -----------------------------------------------------------------------------------------------------

_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "p99": lambda report: report["normalized_latency_paper_ms_per_token"]["p99"],
    "ttft s": lambda report: report["ttft_s"]["mean"],
    "done/s": lambda report: report["completed_per_s"],
    "left": lambda report: report["unfinished"],
    "recomp.": lambda report: report["recomputed_tokens"],
    "out": lambda report: report["copied_out_tokens"],
    "in": lambda report: report["copied_in_tokens"],
    "waste": lambda report: None if report["policy"] == "bound" else report["waste_fraction"],  # its pool is another
    "wall s": lambda report: report["sim_wall_s"],
}


LEGEND = """\
ms/token  latency over tokens: from arrival to the end without the time of calls, over generated and returned tokens; mean over
          requests, of several seeds the mean and the range
p99       the same, exceeded by one request of a hundred
ttft s    seconds from arrival to the first token, mean
done/s    requests finished per second
left      requests that were not finished when the time was over
recomp.   tokens that were computed again
out, in   tokens copied to host memory and back
waste     share of the device's KV pool, over time, that was held without being used
wall s    seconds that the simulation took"""
"""What the columns of `table` mean."""


def table(reports: Sequence[Report]) -> Table:
    """A row for each rate and policy: means over seeds, for the latency with its range; or what went wrong."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("rate", justify="right", no_wrap=True)
    shown.add_column("policy", no_wrap=True)
    for name in ("ms/token", *_COLUMNS):
        shown.add_column(name, justify="right", no_wrap=True)
    if any("error" in report for report in reports):
        shown.add_column("error", no_wrap=True)
    for (rate, policy), same in group(reports, lambda report: (report["rate"], report["policy"])).items():
        cells = [latency_text(same), *(_cell(name, same, value) for name, value in _COLUMNS.items())]
        errors = [f"seed {report['seed']}: {report['error']}" for report in same if "error" in report]
        shown.add_row(rate_text(rate), policy, *cells, *["; ".join(errors)][: len(errors)])
    return shown


def latency_text(reports: Sequence[Report]) -> str:
    """Mean normalized latency over seeds in ms per token, with least and most where there are several; `-` if there is none."""
    found = over_seeds(reports, latency_ms)
    if found is None:
        return "-"
    mean, low, high = (number_text(value) for value in found)
    return mean if found.low == found.high else f"{mean} ({low}–{high})"


def _cell(name: str, reports: Sequence[Report], value: Callable[[Mapping[str, Any]], float | None]) -> str:
    found = over_seeds(reports, value)
    if found is None:
        return "-"
    return f"{found.mean:.1%}" if name == "waste" else number_text(found.mean)


def curves(title: str, reports: Sequence[Report]) -> CurvePanel:
    """Latency against rate, a line for each policy."""
    lines = []
    for policy, same in group(reports, lambda report: report["policy"]).items():
        by_rate = group(same, lambda report: report["rate"])
        points = [(rate, found) for rate in sorted(by_rate) if (found := over_seeds(by_rate[rate], latency_ms))]
        lines.append(PlottedCurve(policy, points, COLOURS.get(policy)))
    return CurvePanel(title, lines)
