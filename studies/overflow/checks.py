"""The findings of the SC24 poster on KV cache overflow, each held against a study's figures. Runs nothing.

The poster publishes no values in text; the sentences are its findings.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from studies.overflow.batch_run import (
    AUTO,
    OUR_RECOMPUTE,
    OUR_SWAP,
    RECOMPUTE_2024,
    SWAP_PAGEABLE,
    SWAP_PINNED,
    BatchRun,
)
from studies.overflow.figures import OverflowFigure, OverflowPoint

FLAT = 1.1
"""Overheads are flat if the largest is less than so many times the smallest."""
SLACK = 1.02
"""Overheads that differ by less count as equal."""
ALLOWED = 1.02
"""What `auto` may cost over the better of both ways."""

RECOMPUTE, SWAP = RECOMPUTE_2024.name, SWAP_PINNED.name
"""The modes that stand for the poster's two ways: recompute, and swap in one copy per page and layer."""
BOTH = (OUR_RECOMPUTE.name, OUR_SWAP.name)
"""The ways between which `auto` chooses."""


class TrendCheck(NamedTuple):
    """A finding, and whether the study shows it.

    Attributes:
        figure: its number; 0: of several.
        sentence: the poster's finding, or what is claimed of `auto`.
        passed: whether the figures show it.
        seen: the numbers that decide.
        why: why ours disagrees, where it is known to.
    """

    figure: int
    sentence: str
    passed: bool
    seen: str
    why: str = ""


def trend_checks(figures: Sequence[OverflowFigure], over_time: Mapping[str, BatchRun]) -> list[TrendCheck]:
    """The checks of the figures that there are."""
    by_number = {2: _figure_2, 3: _figure_3, 4: _figure_4, 5: _figure_5}
    checks = [check for figure in figures for check in by_number[figure.number](figure)]
    if over_time:
        checks += _figure_6(over_time[RECOMPUTE], over_time[SWAP])
    return checks + list(_auto(figures))


def crossover(figure: OverflowFigure, first: str, other: str) -> float | None:
    """The x from which on `first` costs less than `other`, interpolated; None if never, the least x if always."""
    gaps = [(x, cells[first].overhead_s - cells[other].overhead_s) for x, cells in figure.by_x.items()]
    if gaps[-1][1] >= 0:
        return None
    crossing = gaps[0][0]
    for (x, gap), (next_x, next_gap) in pairwise(gaps):
        if gap >= 0 > next_gap:
            crossing = x + (next_x - x) * gap / (gap - next_gap)
    return crossing


def _figure_2(figure: OverflowFigure) -> Iterator[TrendCheck]:
    recompute, swap = figure.curve(RECOMPUTE), figure.curve(SWAP)
    spread = max(recompute) / min(recompute)
    yield TrendCheck(2, "recompute's overhead is flat in page size", spread < FLAT, f"largest {spread:.2f} × smallest")
    seen = f"{SWAP}: {_seconds(swap[0])} at the smallest pages, {_seconds(swap[-1])} at the largest"
    yield TrendCheck(2, "swap's overhead falls with page size", swap[-1] < swap[0], seen)
    if pageable := figure.curve(SWAP_PAGEABLE.name):
        seen = f"{_seconds(swap[-1])} pinned, {_seconds(pageable[-1])} pageable"
        yield TrendCheck(2, "pinned memory wins at large pages", swap[-1] < pageable[-1], seen)


def _figure_3(figure: OverflowFigure) -> Iterator[TrendCheck]:
    yield _growth(figure, "overhead grows with evicted tokens")
    yield _swap_wins(figure, "swap wins when many are evicted")


def _figure_4(figure: OverflowFigure) -> Iterator[TrendCheck]:
    yield _growth(figure, "overhead grows with sequence length at batch 16")
    yield _swap_wins(figure, "swap wins for long sequences")


def _growth(figure: OverflowFigure, sentence: str) -> TrendCheck:
    curves = {mode: figure.curve(mode) for mode in (RECOMPUTE, SWAP)}
    grows = all(after >= before / SLACK for curve in curves.values() for before, after in pairwise(curve))
    return TrendCheck(figure.number, sentence, grows, _shown(curves))


def _swap_wins(figure: OverflowFigure, sentence: str) -> TrendCheck:
    at = crossover(figure, SWAP, RECOMPUTE)
    seen = "never" if at is None else f"from {at:,.0f} tokens on"
    return TrendCheck(figure.number, sentence, at is not None, f"{SWAP} under {RECOMPUTE}: {seen}")


def _figure_5(figure: OverflowFigure) -> Iterator[TrendCheck]:
    low = {mode: [figure.by_x[x][mode].overhead_s for x in figure.by_x if x <= 40] for mode in (RECOMPUTE, SWAP)}
    falls = all(after <= before * SLACK for curve in low.values() for before, after in pairwise(curve))
    yield TrendCheck(5, "overhead falls as memory grows up to 40 %", falls, _shown(low))
    least = {mode: min(figure.by_x, key=lambda x: figure.by_x[x][mode].overhead_s) for mode in (RECOMPUTE, SWAP)}
    yield TrendCheck(
        5,
        "each strategy is lowest at 30 % or 50 %",
        all(x in (30, 50) for x in least.values()),
        "; ".join(f"{mode}: lowest at {x:g} %" for mode, x in least.items()),
        why="overhead is counted against the same requests in a pool that holds them all: with all of the demand it is 0 by "
        "definition, and in between a larger pool serves more requests at once, which is worth more than what is moved or "
        "recomputed",
    )


def _figure_6(recompute: BatchRun, swap: BatchRun) -> Iterator[TrendCheck]:
    bursts = {name: _prompt_bursts(run) for name, run in (("recompute", recompute), ("swap", swap))}
    prompts, requests = sum(step.prompt_tokens for step in swap.steps), len(swap.streams)
    extra = sum(step.prompt_tokens for step in recompute.steps) - prompts
    yield TrendCheck(
        6,
        "under recompute throughput rises periodically as waiting and resumed requests are processed",
        bursts["recompute"] > bursts["swap"] and extra > 0,
        f"{bursts['recompute']} steps compute prompts, {extra:,} tokens of them again",
    )
    seen = f"{bursts['swap']} steps compute prompts, of {requests} requests once each"
    yield TrendCheck(
        6, "under swap it spikes with the prompt phase of waiting requests", bursts["swap"] <= requests, seen
    )
    falls = {name: _falls(run) for name, run in (("recompute", recompute), ("swap", swap))}
    seen = "; ".join(f"{name}: usage falls {count} times" for name, count in falls.items())
    yield TrendCheck(6, "usage saws with evictions and returns in both", min(falls.values()) >= 3, seen)


def _prompt_bursts(run: BatchRun) -> int:
    return sum(step.prompt_tokens > 0 for step in run.steps)


def _falls(run: BatchRun) -> int:
    """Steps after which a tenth of the peak's pages and more are no longer used."""
    least = run.peak_pages / 10
    return sum(before.used_pages - after.used_pages >= least for before, after in pairwise(run.steps))


def _auto(figures: Sequence[OverflowFigure]) -> Iterator[TrendCheck]:
    compared = [figure for figure in figures if figure.number in (3, 4, 5) and AUTO.name in figure.modes]
    if not compared:
        return
    ratios = [
        (_over_better(cells), f"Figure {figure.number} at {x:g}")
        for figure in compared
        for x, cells in figure.by_x.items()
    ]
    over = sum(ratio > ALLOWED for ratio, _ in ratios)
    worst, where = max(ratios)
    seen = f"{len(ratios)} cells; worst: {worst - 1:+.1%}, {where}" + (f"; over 2 % in {over}" if over else "")
    sentence = "auto is at most 2 % worse than the better of both in every cell of Figures 3 to 5"
    yield TrendCheck(0, sentence, not over, seen)
    for figure in compared:
        if figure.number == 5:
            sums = {mode: sum(figure.curve(mode)) for mode in (*BOTH, AUTO.name)}
            yield TrendCheck(
                5,
                "auto is better than either over the whole of Figure 5",
                sums[AUTO.name] < min(sums[name] for name in BOTH),
                "; ".join(f"{mode}: {_seconds(seconds)}" for mode, seconds in sums.items()),
            )


def _over_better(cells: Mapping[str, OverflowPoint]) -> float:
    """The overhead of `auto` over the lesser one of recomputing and swapping (1 where nothing overflows)."""
    auto, better = cells[AUTO.name].overhead_s, min(cells[name].overhead_s for name in BOTH)
    return auto / better if better > 0 else 1.0 + max(0.0, auto)


def _shown(curves: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(f"{mode}: {', '.join(map(_seconds, curve))}" for mode, curve in curves.items())


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
