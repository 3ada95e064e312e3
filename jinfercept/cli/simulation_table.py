"""Reports of simulations as tables and rankings, and the exit status of a command. Imports no JAX."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from jinfercept.sim.reports import group, latency_ms, number_text, over_seeds, plain_table, ranking
from jinfercept.sim.sweep import INTERRUPTED, Report


def exit_status(reports: Sequence[Report]) -> int:
    """Return 0 if all went well, 1 if a run failed, 130 if Ctrl-C ended a run."""
    errors = [report["error"] for report in reports if "error" in report]
    return 130 if INTERRUPTED in errors else 1 if errors else 0


_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "p50": lambda report: report["normalized_latency_paper_ms_per_token"]["p50"],
    "p99": lambda report: report["normalized_latency_paper_ms_per_token"]["p99"],
    "ttft s": lambda report: report["ttft_s"]["mean"],
    "turn s": lambda report: report["turn_delay_s"]["mean"],
    "done/s": lambda report: report["completed_per_s"],
    "good/s": lambda report: report["goodput_per_s"],
    "left": lambda report: report["unfinished"],
    "recomp.": lambda report: report["recomputed_tokens"],
    "out": lambda report: report["copied_out_tokens"],
    "in": lambda report: report["copied_in_tokens"],
    "waste": lambda report: None if report["policy"] == "bound" else report["waste_fraction"],  # its pool is another
    "wall s": lambda report: report["sim_wall_s"],
}


_SESSION_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "p50": lambda report: report["turn_delay_s"]["p50"],
    "p90": lambda report: report["turn_delay_s"]["p90"],
    "p99": lambda report: report["turn_delay_s"]["p99"],
    "longest": lambda report: report["longest_wait_s"],
    "door s": lambda report: report["door_s"]["mean"],
    "with door": lambda report: report["turn_delay_with_door_s"]["mean"],
    "in limits": lambda report: report["within_limits_share"],
    "session s": lambda report: report["session_delay_s"]["mean"],
    **{name: _COLUMNS[name] for name in ("done/s", "good/s")},
    "ms/token": latency_ms,
    "left": lambda report: report["unfinished"],
    "lost": lambda report: report["lost_tokens"],
    **{name: _COLUMNS[name] for name in ("recomp.", "out", "in", "waste", "wall s")},
}


LEGEND = """\
ms/token  latency over tokens: from arrival to the end without the time of calls, over generated and returned tokens; mean over
          requests, of several seeds the mean and the range
p50, p99  the same, exceeded by half of the requests, and by one of a hundred
ttft s    seconds from arrival to the first token, mean
turn s    turn delay: the same, and from each return of calls to the next token, mean
done/s    requests finished per second
good/s    goodput: those of them that had their first token within 2 s, and took 50 ms per token after it
left      requests that were not finished when the time was over
recomp.   tokens that were computed again
out, in   tokens copied to host memory and back
waste     share of the device's KV pool, over time, that was held without being used
wall s    seconds that the simulation took"""
"""What the columns of `table` mean."""

SESSION_LEGEND = """\
delay s   turn delay: seconds from a turn's submission (its tool has returned, its person has written) to its first token; turns
          without one count with their time so far; mean over turns, of several seeds the mean and the range
p50, …    the same, exceeded by half, a tenth and a hundredth of the turns, and of the turn that waited longest
door s    seconds at the door before that, unless --overload is serve: mean over the first turns of sessions
with door turn delay with the seconds at the door
in limits share of the turns inside whose first token took 2 s and a second more for each 10,000 new tokens, and others 50 ms
          each, at most
session s session delay: all seconds of a session, so far, that were not its tools' or its person's, mean
done/s    turns finished per second
good/s    those of them that were within these limits with their seconds at the door
ms/token  from a turn's submission to its end, over generated tokens
left      turns that were not finished when the time was over
lost      tokens that sessions had sent or read before, or that all share, and that were in no memory when they returned
recomp.   tokens that were computed again while the engine knew them as a context's: after evictions and preemptions
out, in   tokens copied to host memory and back
waste     share of the device's KV pool, over time, that was held without being used
wall s    seconds that the simulation took"""
"""What the columns of `table` mean for sessions of agents."""


def table(reports: Sequence[Report]) -> Table:
    """Make a row for each load, policy and order: means over seeds, with the range of the delay or latency, or the error."""
    errors = ["error"] if any("error" in report for report in reports) else []
    of_sessions = any("session_delay_s" in report for report in reports)
    columns, main = (_SESSION_COLUMNS, "delay s") if of_sessions else (_COLUMNS, "ms/token")
    load = "load" if of_sessions else "rate"
    shown = plain_table((load, "policy", main, *columns, *errors), left=("policy", "error"))
    for (load, policy), same in group(reports, lambda report: (report["load"], scheduled_by(report))).items():
        spread = _spread_text(same, turn_delay_s) if of_sessions else _spread_text(same, latency_ms)
        cells = [spread, *(_cell(name, same, value) for name, value in columns.items())]
        errors = [f"seed {report['seed']}: {report['error']}" for report in same if "error" in report]
        shown.add_row(load, policy, *cells, *["; ".join(errors)][: len(errors)])
    return shown


def delay_rankings(reports: Sequence[Report]) -> list[str]:
    """Rank the policies and orders of each load of sessions by mean turn delay, and say if the seeds can tell them apart."""
    measured = (report for report in reports if "session_delay_s" in report and report["requests"])
    lines = list[str]()
    for load, same in group(measured, lambda report: report["load"]).items():
        by_contender = group(same, scheduled_by)
        delays = {name: {report["seed"]: turn_delay_s(report) for report in of} for name, of in by_contender.items()}
        if len(delays) > 1:
            how = "ratios to it seed by seed, with their 95 % interval"
            ranked = (f"  {line}" for line in ranking(delays))
            lines += [f"{load}: mean turn delay in s, the least first; {how}:", *ranked]
    return lines


def scheduled_by(report: Mapping[str, Any]) -> str:
    """Name the policy, and the order of waiting requests unless it is first come, first served."""
    order = report.get("order", "fcfs")
    return report["policy"] if order == "fcfs" else f"{report['policy']}, {order}"


def turn_delay_s(report: Mapping[str, Any]) -> float:
    return report["turn_delay_s"]["mean"]


def _spread_text(reports: Sequence[Report], value: Callable[[Mapping[str, Any]], float | None]) -> str:
    spread = over_seeds(reports, value)
    if spread is None:
        return "-"
    mean, low, high = (number_text(value) for value in spread)
    return mean if spread.low == spread.high else f"{mean} ({low}–{high})"


def _cell(name: str, reports: Sequence[Report], value: Callable[[Mapping[str, Any]], float | None]) -> str:
    spread = over_seeds(reports, value)
    if spread is None:
        return "-"
    return f"{spread.mean:.1%}" if name in ("waste", "in limits") else number_text(spread.mean)
