"""Reports of simulations as a table and as curves, and the exit status that they come to. Imports no JAX."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from jinfercept.sim.plots import COLOURS, CurvePanel, PlottedCurve
from jinfercept.sim.reports import group, latency_ms, over_seeds
from jinfercept.sim.sweep import INTERRUPTED, Report, rate_text
from jinfercept.sim.tables import number_text, plain_table


def exit_status(reports: Sequence[Report]) -> int:
    """0 if all went well, 1 if a run failed, 130 if Ctrl-C ended some."""
    errors = [report["error"] for report in reports if "error" in report]
    return 130 if INTERRUPTED in errors else 1 if errors else 0


_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "p50": lambda report: report["normalized_latency_paper_ms_per_token"]["p50"],
    "p99": lambda report: report["normalized_latency_paper_ms_per_token"]["p99"],
    "ttft s": lambda report: report["ttft_s"]["mean"],
    "done/s": lambda report: report["completed_per_s"],
    "good/s": lambda report: report["goodput_per_s"],
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
p50, p99  the same, exceeded by half of the requests, and by one of a hundred
ttft s    seconds from arrival to the first token, mean
done/s    requests finished per second
good/s    goodput: those of them that stayed within --first-token-limit and --per-token-limit
left      requests that were not finished when the time was over
recomp.   tokens that were computed again
out, in   tokens copied to host memory and back
waste     share of the device's KV pool, over time, that was held without being used
wall s    seconds that the simulation took"""
"""What the columns of `table` mean."""


def table(reports: Sequence[Report]) -> Table:
    """A row for each rate, policy and order: means over seeds, for the latency with its range; or what went wrong."""
    errors = ["error"] if any("error" in report for report in reports) else []
    shown = plain_table(("rate", "policy", "ms/token", *_COLUMNS, *errors), left=("policy", "error"))
    for (rate, policy), same in group(reports, lambda report: (report["rate"], scheduled_by(report))).items():
        cells = [latency_text(same), *(_cell(name, same, value) for name, value in _COLUMNS.items())]
        errors = [f"seed {report['seed']}: {report['error']}" for report in same if "error" in report]
        shown.add_row(rate_text(rate), policy, *cells, *["; ".join(errors)][: len(errors)])
    return shown


def scheduled_by(report: Mapping[str, Any]) -> str:
    """The policy, with the order of waiting requests unless they come first that came first."""
    order = report.get("order", "fcfs")
    return report["policy"] if order == "fcfs" else f"{report['policy']}, {order}"


def latency_text(reports: Sequence[Report]) -> str:
    """Mean normalized latency over seeds in ms per token, with least and most where there are several; `-` if there is none."""
    spread = over_seeds(reports, latency_ms)
    if spread is None:
        return "-"
    mean, low, high = (number_text(value) for value in spread)
    return mean if spread.low == spread.high else f"{mean} ({low}–{high})"


def _cell(name: str, reports: Sequence[Report], value: Callable[[Mapping[str, Any]], float | None]) -> str:
    spread = over_seeds(reports, value)
    if spread is None:
        return "-"
    return f"{spread.mean:.1%}" if name == "waste" else number_text(spread.mean)


def curves(title: str, reports: Sequence[Report]) -> CurvePanel:
    """Latency against rate, a line for each policy and order."""
    lines = []
    for policy, same in group(reports, scheduled_by).items():
        by_rate = group(same, lambda report: report["rate"])
        points = [(rate, spread) for rate in sorted(by_rate) if (spread := over_seeds(by_rate[rate], latency_ms))]
        lines.append(PlottedCurve(policy, points, COLOURS.get(policy)))
    return CurvePanel(title, lines)
