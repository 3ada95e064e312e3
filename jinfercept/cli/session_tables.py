"""Reports of `jinfercept bench sessions` as tables and as a picture."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from jinfercept.bench.client_report import number, percent
from jinfercept.sim.plots import Bars, draw
from jinfercept.sim.tables import plain_table

Report = dict[str, Any]


def rounds_table(reports: Sequence[Report]) -> Table:
    """A row for each round; below it what failed."""
    caption = "round s: its requests one after another; not recomputed: share of prompt tokens"
    if reports[0]["concurrent"]:
        caption = "round s: from its first start to its last end; not recomputed: share of prompt tokens"
    columns = ("turn", "requests", "round s", "request s", "TTFT ms", "prompt tokens", "cached", "not recomputed")
    shown = plain_table(("server", "sessions", *columns, "failed"), left=("server",), caption=caption)
    for report in reports:
        for turn in report["rounds"]:
            shown.add_row(
                report["server"],
                str(report["sessions"]),
                str(turn["turn"]),
                str(turn["requests"]),
                number(turn["round_s"]),
                number(turn["request_s"]),
                _ms(turn["ttft_s"]),
                _count(turn["prompt_tokens"]),
                _count(turn["cached_tokens"]),
                percent(turn["cached_share"]),
                str(turn["failed"]),
            )
        for error, times in Counter(report["errors"]).items():
            shown.add_row(report["server"], str(report["sessions"]), f"{times} × {error}")
    return shown


def summary_table(reports: Sequence[Report]) -> Table | None:
    """What the later turns come to, sessions against fewer sessions, and a newcomer's wait; None if there is none of it.

    `× fewest`: a round's time over that of the fewest sessions, each for its number of sessions: 1 is as many times as long
    as there are more sessions.
    """
    shown_reports = [report for report in reports if report["later_turns"] or report["newcomer"]]
    if not shown_reports:
        return None
    columns = ("turns 2… round s", "slowest", "request s", "TTFT ms", "not recomputed", "× fewest")
    newcomer = ("idle TTFT ms", "newcomer's", "×") if any(report["newcomer"] for report in shown_reports) else ()
    caption = "× fewest: of a round, for its number of sessions"
    shown = plain_table(("server", "sessions", *columns, *newcomer), left=("server",), caption=caption)
    for report in shown_reports:
        later, new = report["later_turns"] or {}, report["newcomer"]
        cells = [number(later.get(name)) for name in ("round_s", "slowest_round_s", "request_s")]
        cells += [_ms(later.get("ttft_s")), percent(later.get("cached_share")), _growth(report, reports)]
        if newcomer:
            cells += (
                [_ms(median(new["idle_s"])), _ms(median(new["ttft_s"])), f"{new['ratio']:.2f}"] if new else ["-"] * 3
            )
        shown.add_row(report["server"], str(report["sessions"]), *cells)
    return shown


def plot(path: str, reports: Sequence[Report]) -> None:
    """Draw rounds beside each other: time of a request, first token, share that was not recomputed."""
    panels = (("a request", "s", "request_s"), ("its first token", "s", "ttft_s"))
    panels = (*panels, ("prompt tokens not recomputed", "share", "cached_share"))
    bars = []
    for title, unit, key in panels:
        by_turn: dict[str, dict[str, float]] = {}
        for report in reports:
            for turn in report["rounds"]:
                name = f"{report['server']}, {report['sessions']} sessions"
                by_turn.setdefault(f"turn {turn['turn']}", {})[name] = turn[key] or 0.0
        bars.append(Bars(title, unit, by_turn, beside=True))
    draw(path, [bars])


def _growth(report: Report, reports: Sequence[Report]) -> str:
    """A round of it over a round of the fewest sessions on that server, for its number of sessions."""
    fewest = next(other for other in reports if other["server"] == report["server"])
    if report is fewest or not report["later_turns"] or not fewest["later_turns"]:
        return "-"
    times = report["later_turns"]["round_s"] / fewest["later_turns"]["round_s"]
    return f"{times * fewest['sessions'] / report['sessions']:.2f}"


def _ms(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"
