"""Tables and pictures of `python -m studies calls`. Imports no JAX and no matplotlib."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from jinfercept.sim.reports import Range, group
from jinfercept.sim.run_stats import Report
from jinfercept.sim.sweep import rate_text
from jinfercept.sim.tables import TextTable, number_text
from studies.calls.alone import FASTER, PUBLISHED, Row, excess
from studies.calls.load import CALL_MODES, memory_token_s
from studies.heat_map import HeatMap
from studies.plots import COLOURS, Bars, CurvePanel, Panel, PlottedCurve

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
