"""`python -m studies calls`: what asynchronous calls are worth, beside synchronous and parallel ones.

One request alone in virtual time, beside AsyncLM's formulas; and many at once, under several policies. Both run the real engine
and scheduler. Imports no JAX.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress
from tyro import conf

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.cli.simulate import POLICY_NAMES, check_policies
from jinfercept.cli.simulation_table import exit_status
from jinfercept.errors import ConfigError
from jinfercept.sched.estimator import ESTIMATORS
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.reports import Range, check_outputs, group, write_all, write_json
from jinfercept.sim.run_stats import Report
from jinfercept.sim.sweep import SweepRun, rate_text, sweep
from jinfercept.sim.tables import TextTable, check_least, listed, number_text, numbers, show
from studies.answer import titled_table, write_csv
from studies.calls.alone import FASTER, PUBLISHED, AloneCell, Row, at_token_s, excess, play_cells
from studies.calls.markup import CALL_MODES, call_loads, memory_token_s
from studies.calls.scripts import DURATIONS, CallMix
from studies.calls.simulation import CallSimulation
from studies.plots import COLOURS, Bars, CurvePanel, HeatMap, Panel, PlottedCurve, check_drawing, draw

TOOL_NAMES: Mapping[str, str] = {"short": "30–500 ms", "heavy": "heavy-tailed"}
"""Durations of calls by tool."""


def alone_table(rows: Sequence[Row]) -> TextTable:
    """Speed-up over synchronous calls, with a column for each share of prose."""
    shares = sorted({row["prose"] for row in rows})
    columns = ["calls last", "ms/token", "rounds", "calls", "ΣE/ΣG", *(f"{share:.0%} prose" for share in shares)]
    lines: list[list[str]] = []
    for key, same in group(rows, lambda row: (row["tool"], row["token_ms"], row["rounds"], row["calls"])).items():
        tool, token_ms, rounds, calls = key
        by_share = {row["prose"]: row for row in same}
        work = by_share[shares[0]]["work"]
        cells = [_ways(by_share[share]["speedup"]) if share in by_share else "-" for share in shares]
        lines.append([TOOL_NAMES[tool], f"{token_ms:g}", str(rounds), str(calls), f"{work:.2g}", *cells])
    title = (
        "One request alone: synchronous latency over that of parallel / async / async with the longest call first; medians. "
        f"ΣE/ΣG: seconds of calls over seconds of writing, at {shares[0]:.0%} prose."
    )
    return TextTable(title, columns, lines)


def formula_text(rows: Sequence[Row]) -> str:
    """How far latencies are from the formulas."""
    least, most, reading = excess(rows)
    num = sum(4 * row["requests"] for row in rows)
    return (
        f"{num:,} runs: none was shorter than its formula by over {abs(least):.3f} steps, and none longer than formula and "
        f"reading of all its interrupts by over {abs(most):.3f} steps; this reading took at most {reading:.1f} steps"
    )


def _ways(speedup: Mapping[str, float]) -> str:
    return " / ".join(f"{speedup[way]:.2f}" for way in FASTER)


def load_table(reports: Sequence[Report]) -> TextTable:
    """Latency and memory of every policy under every load, each cell with a number for every way to call."""
    lines: list[list[str]] = []
    for (rate, policy), same in group(reports, lambda report: (report["rate"], report["policy"])).items():
        by_mode = {report["workload"]: report for report in same}
        cells = (" / ".join(_cell(by_mode.get(mode), value) for mode in CALL_MODES) for value in _LOAD_VALUES.values())
        lines.append([rate_text(rate), policy, *cells])
    title = (
        f"Many requests, {' / '.join(CALL_MODES)} calls: seconds from arrival to end, the mean and the 99th percentile; "
        "token·seconds of device memory per finished request, and of these in paused contexts; requests left unfinished."
    )
    return TextTable(title, ["requests/s", "policy", *_LOAD_VALUES], lines)


_LOAD_VALUES: Mapping[str, Callable[[Report], float | None]] = {
    "mean s": lambda report: report["latency_s"]["mean"],
    "p99 s": lambda report: report["latency_s"]["p99"],
    "token·s": lambda report: sum(memory_token_s(report).values()),
    "paused": lambda report: memory_token_s(report)["paused"],
    "left": lambda report: report["unfinished"],
}


def _cell(report: Report | None, value: Callable[[Report], float | None]) -> str:
    shown_value = None if report is None or "error" in report else value(report)
    return "-" if shown_value is None else number_text(shown_value)


# -- the picture -------------------------------------------------------------------------------------------------------


def panels(rows: Sequence[Row], reports: Sequence[Report]) -> list[list[Panel]]:
    """Speed-ups of one round by calls and prose, a row for each kind of durations; under them latency and memory under load."""
    one_round = [row for row in rows if row["rounds"] == 1]
    most = max(row["speedup"]["async"] for row in one_round)
    drawn: list[list[Panel]] = []
    for tool, same in group(one_round, lambda row: row["tool"]).items():
        speeds = group(same, lambda row: row["token_ms"])
        drawn.append([_heat(f"{TOOL_NAMES[tool]} calls", speeds[ms], ms, most) for ms in sorted(speeds)])
    done = [report for report in reports if "error" not in report]
    if done:
        means = [report["latency_s"]["mean"] for report in done if report["latency_s"]["mean"]]
        span = (0.9 * min(means), 1.1 * max(means))
        drawn.append(
            [_curves(mode, [report for report in done if report["workload"] == mode], span) for mode in CALL_MODES]
        )
        rates = sorted({report["rate"] for report in done})
        rate = rates[len(rates) // 2]
        drawn.append([_memory(rate, [report for report in done if report["rate"] == rate])])
    return drawn


def _heat(title: str, rows: Iterable[Row], token_ms: float, most: float) -> HeatMap:
    speed_ups = {(row["prose"], row["calls"]): row["speedup"]["async"] for row in rows}
    shares, calls = sorted({share for share, _ in speed_ups}), sorted({number for _, number in speed_ups})
    return HeatMap(
        f"async over sync: {title}, {token_ms:g} ms a token",
        ("share of prose", f"calls (framed: {PUBLISHED[0]}–{PUBLISHED[1]} ×, as published)"),
        [f"{share:.0%}" for share in shares],
        [str(number) for number in calls],
        [[speed_ups.get((share, number)) for number in calls] for share in shares],
        most,
        PUBLISHED,
    )


def _curves(mode: str, reports: Sequence[Report], span: tuple[float, float]) -> CurvePanel:
    lines: list[PlottedCurve] = []
    for policy, same in group(reports, lambda report: report["policy"]).items():
        points = [
            (report["rate"], Range(*[report["latency_s"]["mean"]] * 3))
            for report in same
            if report["latency_s"]["mean"]
        ]
        lines.append(PlottedCurve(policy, points, COLOURS.get(policy)))
    return CurvePanel(f"{mode} calls under load", lines, unit="mean seconds from arrival to end", span=span)


def _memory(rate: float, reports: Sequence[Report]) -> Bars:
    bars = {f"{report['policy']}, {report['workload']}": memory_token_s(report) for report in reports}
    return Bars(f"device memory at {rate_text(rate)} requests/s", "token·seconds per finished request", bars)


POLICIES = ("discard", "swap", "preserve", "min_waste", "copy_ahead")
CALLS, PROSE, ROUNDS = (1, 2, 4, 8, 16), (0.0, 0.25, 0.5, 0.75), (1, 4)
QUICK_CALLS, QUICK_PROSE, QUICK_ROUNDS = (1, 4, 16), (0.0, 0.5), (1,)
LOAD_MODEL_LEN = 2560


@dataclass(frozen=True, kw_only=True)
class StudyCalls:
    """The command."""

    quick: Switch = False
    """a small part of everything, in seconds"""
    profile: str = "paper-gptj-6b-a100"
    """a named profile, or a JSON file"""
    token_ms: Several = ()
    """milliseconds in which a request alone writes a token: the profile's prices are scaled (default: 1,3,10)"""
    requests: int = 8
    """requests of each mix that are served alone"""
    policy: Annotated[Several, conf.arg(help=f"{POLICY_NAMES} (default: {', '.join(POLICIES)})")] = ()
    rate: Several = ()
    """requests per second of the load (default: 2,4,8,12)"""
    duration: Maybe[float] = None
    """seconds of arrivals of the load (default: 40; with --quick 4)"""
    estimator: Annotated[str, conf.arg(help=f"of durations: {', '.join(ESTIMATORS)}")] = "history"
    kv_tokens: int = 53_000
    """device pool under load"""
    host_tokens: int = 300_000
    """host pool under load"""
    seed: int = 0
    """of the requests"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    json: Maybe[str] = None
    """write all numbers to this file"""
    csv: Maybe[str] = None
    """write a row for each mix and each run under load to this file"""
    markdown: Maybe[str] = None
    """write the tables to this file"""
    plot: Maybe[str] = None
    """draw speed-ups, latency and memory into this file"""

    def run(self) -> int:
        """Run the study, and print tables.

        Returns:
            The exit status: 0, 1 if a run failed, 130 if Ctrl-C ended some.

        Raises:
            ConfigError: the options make no sense.
        """
        self._check()
        console = Console(stderr=True)
        cells, runs = self._cells(), self._runs()
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("requests alone", total=len(cells))
            rows = play_cells(cells, self.jobs, lambda: progress.advance(task))
        reports = sweep(runs, self.jobs, console)
        tables = [alone_table(rows), load_table(reports)]
        show(tables[0].shown())
        print(formula_text(rows))
        show(tables[1].shown())
        self._write(tables, rows, reports, formula_text(rows))
        return exit_status(reports)

    def _check(self) -> None:
        """Raise `ConfigError` for options that make no sense, and for files that cannot be written."""
        check_least("--requests", self.requests, 1)
        check_least("--jobs", self.jobs, 1)
        check_least("--host-tokens", self.host_tokens, 0)
        check_least("--kv-tokens", self.kv_tokens, LOAD_MODEL_LEN)
        if self.estimator not in ESTIMATORS:
            raise ConfigError("no such estimator", got=self.estimator, fix=f"one of {', '.join(ESTIMATORS)}")
        check_policies(self._policies)
        files = (("--json", self.json), ("--csv", self.csv), ("--markdown", self.markdown), ("--plot", self.plot))
        check_outputs(files)
        if self.plot is not None:
            check_drawing(self.plot)

    @property
    def _policies(self) -> list[str]:
        return listed(self.policy or POLICIES)

    def _cells(self) -> list[AloneCell]:
        """Every combination of durations, speed, rounds, calls and prose."""
        speeds = numbers("--token-ms", self.token_ms or ("3" if self.quick else "1,3,10",), float)
        check_least("--token-ms", speeds[0], 1e-3)
        machine = load_profile(self.profile)
        some = (QUICK_ROUNDS, QUICK_CALLS, QUICK_PROSE) if self.quick else (ROUNDS, CALLS, PROSE)
        mixes = [
            CallMix(calls, share, rounds, tool)
            for tool in DURATIONS
            for rounds in some[0]
            for calls in some[1]
            if calls >= rounds
            for share in some[2]
        ]
        num = 1 if self.quick else self.requests
        return [AloneCell(mix, at_token_s(machine, ms / 1e3), num, self.seed) for ms in speeds for mix in mixes]

    def _runs(self) -> list[SweepRun]:
        """Every combination of rate, way to call and policy."""
        duration_s = (4.0 if self.quick else 40.0) if self.duration is None else self.duration
        rates = numbers("--rate", self.rate or ("8" if self.quick else "2,4,8,12",), float)
        machine, runs = load_profile(self.profile), list[SweepRun]()
        for load in call_loads(rates, duration_s, self.seed):
            for policy in self._policies:
                simulation = CallSimulation(
                    machine,
                    policy,
                    self.estimator,
                    duration_s,
                    kv_tokens=self.kv_tokens,
                    host_tokens=self.host_tokens,
                    max_model_len=LOAD_MODEL_LEN,
                )
                runs.append(SweepRun(simulation, load))  # pyright: ignore[reportArgumentType] # a `CallSimulation` takes them
        return runs

    def _write(self, tables: Sequence[TextTable], rows: Sequence[Row], reports: Sequence[Report], note: str) -> None:
        """Write the files that were asked for."""
        writers: dict[str, Callable[[], object]] = {}
        if (json_path := self.json) is not None:
            writers[json_path] = lambda: write_json(json_path, {"requests": rows, "loads": reports})
        if (csv_path := self.csv) is not None:
            writers[csv_path] = lambda: write_csv(csv_path, [*rows, *reports])
        if (markdown_path := self.markdown) is not None:
            text = "\n\n".join([*map(titled_table, tables), note])
            writers[markdown_path] = lambda: Path(markdown_path).write_text(text.strip() + "\n", encoding="utf-8")
        if (plot_path := self.plot) is not None:
            writers[plot_path] = lambda: draw(plot_path, panels(rows, reports))
        write_all(writers)
