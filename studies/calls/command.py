"""`python -m studies calls`: what asynchronous calls are worth, beside synchronous and parallel ones.

One request alone in virtual time, on the real engine and scheduler, beside AsyncLM's formulas. Imports no JAX.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from jinfercept.cli.options import Maybe, Several, Switch
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.reports import TextTable, check_least, check_outputs, group, numbers, show, write_all
from studies.answer import titled_table
from studies.calls.alone import FASTER, PUBLISHED, AloneCell, Row, at_token_s, excess, play_cells
from studies.calls.scripts import DURATIONS, CallMix
from studies.plots import HeatMap, Panel, check_drawing, draw

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


# -- the picture -------------------------------------------------------------------------------------------------------


def panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """Speed-ups of one round by calls and prose, a row for each kind of durations."""
    one_round = [row for row in rows if row["rounds"] == 1]
    most = max(row["speedup"]["async"] for row in one_round)
    drawn: list[list[Panel]] = []
    for tool, same in group(one_round, lambda row: row["tool"]).items():
        speeds = group(same, lambda row: row["token_ms"])
        drawn.append([_heat(f"{TOOL_NAMES[tool]} calls", speeds[ms], ms, most) for ms in sorted(speeds)])
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


CALLS, PROSE, ROUNDS = (1, 2, 4, 8, 16), (0.0, 0.25, 0.5, 0.75), (1, 4)
QUICK_CALLS, QUICK_PROSE, QUICK_ROUNDS = (1, 4, 16), (0.0, 0.5), (1,)


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
    seed: int = 0
    """of the requests"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    markdown: Maybe[str] = None
    """write the table to this file"""
    plot: Maybe[str] = None
    """draw the speed-ups into this file"""

    def run(self) -> int:
        """Run the study, and print its table; returns 0.

        Raises:
            ConfigError: the options make no sense.
        """
        check_least("--requests", self.requests, 1)
        check_least("--jobs", self.jobs, 1)
        check_outputs((("--markdown", self.markdown), ("--plot", self.plot)))
        if self.plot is not None:
            check_drawing(self.plot)
        cells = self._cells()
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("requests alone", total=len(cells))
            rows = play_cells(cells, self.jobs, lambda: progress.advance(task))
        table, note = alone_table(rows), formula_text(rows)
        show(table.shown())
        print(note)
        writers: dict[str, Callable[[], object]] = {}
        if (markdown_path := self.markdown) is not None:
            text = f"{titled_table(table)}\n\n{note}\n"
            writers[markdown_path] = lambda: Path(markdown_path).write_text(text, encoding="utf-8")
        if (plot_path := self.plot) is not None:
            writers[plot_path] = lambda: draw(plot_path, panels(rows))
        write_all(writers)
        return 0

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
