"""The report of `python -m studies overflow`: tables in Markdown, and a picture with a panel for every figure.

The simulator's figures stand beside those of the real engine: whether the same way wins, and with the same overheads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinfercept.sim.reports import Range
from studies.answer import markdown_table
from studies.overflow.batch_run import AUTO, BatchRun
from studies.overflow.checks import Ways, crossover, trend_checks
from studies.overflow.figures import OverflowFigure, OverflowPoint
from studies.plots import check_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


WANTED_WINNERS = 0.9
"""Share of the cells in which the simulator should name the way that costs less."""
WITHIN = 0.25
"""Difference of overheads, over the measured one, that counts as the same."""


class AgreementCell(NamedTuple):
    """A cell's overhead, measured and simulated."""

    figure: int
    x: float
    mode: str
    measured_s: Range
    simulated_s: float

    @property
    def is_resolved(self) -> bool:
        """Whether the seeds differ by less than `WITHIN` from their mean; one seed shows no difference."""
        mean, low, high = self.measured_s
        return max(mean - low, high - mean) <= WITHIN * abs(mean)

    @property
    def is_near(self) -> bool:
        """Whether the two differ by at most `WITHIN`."""
        mean = self.measured_s.mean
        return abs(self.simulated_s - mean) <= WITHIN * abs(mean)


class Agreement(NamedTuple):
    """The comparison of all cells.

    Attributes:
        cells: of every mode.
        same_winner, num_compared: pairs of recomputing and a way of swapping in a cell of which the same one costs less in
            both, of those whose measured ranges do not overlap.
        num_undecided: pairs whose measured ranges overlap.
    """

    cells: Sequence[AgreementCell]
    same_winner: int
    num_compared: int
    num_undecided: int

    @property
    def resolved(self) -> Sequence[AgreementCell]:
        """The cells whose measurement is more exact than what it is compared by."""
        return [cell for cell in self.cells if cell.is_resolved]

    @property
    def num_near(self) -> int:
        """Resolved overheads that differ by at most `WITHIN`."""
        return sum(cell.is_near for cell in self.resolved)

    def __str__(self) -> str:
        winners = self.num_compared > 0 and self.same_winner >= WANTED_WINNERS * self.num_compared
        resolved = len(self.resolved)
        near = self.num_near == resolved > 0
        rest = len(self.cells) - resolved
        return (
            f"{'pass' if winners else 'FAIL'}: the same winner in {self.same_winner} of {self.num_compared} comparisons of a "
            f"way of swapping with recomputing (wanted: {WANTED_WINNERS:.0%}), beside {self.num_undecided} in which the "
            f"measured ranges overlap. {'pass' if near else 'FAIL'}: overheads within {WITHIN:.0%} in {self.num_near} of "
            f"{resolved} cells, beside {rest} whose seeds differ by more than {WITHIN:.0%} (of these "
            f"{sum(cell.is_near for cell in self.cells) - self.num_near} are as near)."
        )


def agreement(measured: Sequence[OverflowFigure], simulated: Sequence[OverflowFigure], ways: Ways) -> Agreement:
    """Compare the figures that both have, cells without overflow left out.

    Args:
        ways: their recomputation is compared with every way of swapping.
    """
    cells, same, compared, undecided = list[AgreementCell](), 0, 0, 0
    for number, x, ours, theirs in _cells(measured, simulated):
        cells += [
            AgreementCell(number, x, mode, point.overhead_s, theirs[mode].overhead_s.mean)
            for mode, point in ours.items()
        ]
        for swap in ours.keys() - {ways.recompute, AUTO.name}:
            first, second = sorted((ours[ways.recompute].overhead_s, ours[swap].overhead_s))
            if first.high >= second.low and first.high > first.low:
                undecided += 1
                continue
            compared += 1
            same += _gap(ours, ways.recompute, swap) * _gap(theirs, ways.recompute, swap) > 0
    return Agreement(cells, same, compared, undecided)


Cell = tuple[int, float, Mapping[str, OverflowPoint], Mapping[str, OverflowPoint]]


def _cells(measured: Sequence[OverflowFigure], simulated: Sequence[OverflowFigure]) -> Iterator[Cell]:
    """The figure, x, and measured and simulated points by mode of every cell in which a request was preempted."""
    by_number = {figure.number: figure for figure in simulated}
    for figure in measured:
        theirs = by_number[figure.number].by_x if figure.number in by_number else {}
        for x, points in figure.by_x.items():
            if x in theirs and all(point.counters.preemptions for point in points.values()):
                yield figure.number, x, points, theirs[x]


def _gap(points: Mapping[str, OverflowPoint], first: str, other: str) -> float:
    return points[first].overhead_s.mean - points[other].overhead_s.mean


NUM_BINS = 120
"""Points of a line over time."""
LOGARITHMIC = (2, 3)
"""Figures whose axis doubles from tick to tick."""

COMPARED = (4, 5)
"""Figures whose curves lie on each other, so that a second panel shows their differences."""


class OverflowReport(NamedTuple):
    """What a study found.

    Attributes:
        title: the machine, and whether it was simulated or measured.
        figures: Figures 2 to 5, as far as they were asked for.
        over_time: the runs of Figure 6 by mode; empty if it was not asked for.
        pool_pages: of these runs.
        ways: the modes that stand for the poster's two.
        simulated: the same figures in the simulator, for a measured report; empty for a simulated one.
    """

    title: str
    figures: Sequence[OverflowFigure]
    over_time: Mapping[str, BatchRun]
    pool_pages: int
    ways: Ways
    simulated: Sequence[OverflowFigure] = ()


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(report: OverflowReport) -> str:
    """Every table of a report."""
    parts = [f"## {report.title}"]
    for figure in report.figures:
        parts += _figure_parts(figure, report.ways)
    if report.over_time:
        parts += ["### Figure 6: throughput and pool usage over time", _over_time(report)]
    parts += ["### Trend checks", _checks(report)]
    if report.simulated:
        agreed = agreement(report.figures, report.simulated, report.ways)
        parts += ["### Agreement of the simulator with the real engine", str(agreed), _agreement_table(agreed)]
    return "\n\n".join(parts) + "\n"


def _figure_parts(figure: OverflowFigure, ways: Ways) -> Iterator[str]:
    yield f"### Figure {figure.number}: {figure.title}"
    yield _by_x(figure, lambda point: _milliseconds(point.overhead_s), "overhead, ms")
    if figure.number == 3:
        yield _crossovers(figure, ways)
    if figure.number == 5:
        yield _by_x(figure, lambda point: str(point.counters.preemptions), "preemptions")
        yield _by_x(figure, lambda point: f"{point.moved_tokens:,}", "tokens moved, both ways")
        yield _by_x(figure, lambda point: f"{point.counters.recomputed:,}", "tokens recomputed")


def _crossovers(figure: OverflowFigure, ways: Ways) -> str:
    texts = []
    for mode in figure.modes:
        if "swap" in mode:
            at = crossover(figure, mode, next(name for name in figure.modes if name == _rival(mode, ways)))
            texts.append(
                f"{mode} costs less than {_rival(mode, ways)} " + ("nowhere" if at is None else f"from {at:,.0f} on")
            )
    return "Crossover, evicted tokens: " + "; ".join(texts) + "."


def _rival(swap: str, ways: Ways) -> str:
    """The recomputation under the same engine as a swap."""
    return f"our {ways.recompute.removeprefix('our ')}" if swap.startswith("our ") else ways.recompute


def _by_x(figure: OverflowFigure, text: Callable[[OverflowPoint], str], what: str) -> str:
    frame = _pivot(figure, text).fillna("-").rename(index="{:,g}".format)
    return markdown_table(frame.rename_axis(f"{what}, by {figure.axis}"), index=True)


def _pivot(figure: OverflowFigure, value: Callable[[OverflowPoint], Any]) -> "DataFrame":
    """A value of every point: a row for each x, ascending, and a column for each mode."""
    from pandas import DataFrame

    columns = {
        mode: {x: value(cells[mode]) for x, cells in figure.by_x.items() if mode in cells} for mode in figure.modes
    }
    return DataFrame(columns).sort_index()


def _steps(run: BatchRun, pool_pages: int) -> "DataFrame":
    """The steps of a run, and the share of the pool that each uses."""
    from pandas import DataFrame

    frame = DataFrame([step._asdict() for step in run.steps])
    return frame.assign(usage=frame.used_pages / pool_pages)


def _over_time(report: OverflowReport) -> str:
    from pandas import DataFrame

    rows = []
    for mode, run in report.over_time.items():
        steps = _steps(run, report.pool_pages)
        rows.append(
            {
                "mode": mode,
                "seconds": f"{run.seconds:.1f}",
                "prompt tokens/s": f"{steps.prompt_tokens.sum() / run.seconds:,.0f}",
                "decode tokens/s": f"{steps.decode_tokens.sum() / run.seconds:,.0f}",
                "steps with prompts": str((steps.prompt_tokens > 0).sum()),
                "preemptions": str(run.counters.preemptions),
                "mean usage": f"{steps.usage.mean():.0%}",
                "peak": f"{steps.usage.max():.0%}",
            }
        )
    return markdown_table(DataFrame(rows))


def _checks(report: OverflowReport) -> str:
    from pandas import DataFrame

    frame = DataFrame(
        {
            "figure": str(check.figure or "3-5"),
            "finding": check.sentence,
            "": "pass" if check.passed else "FAIL",
            "seen": check.seen + (f" ({check.why})" if check.why and not check.passed else ""),
        }
        for check in trend_checks(report.figures, report.over_time, report.ways)
    )
    return markdown_table(frame)


def _agreement_table(agreed: Agreement) -> str:
    from pandas import DataFrame

    frame = DataFrame(
        {
            "figure": f"{cell.figure}",
            "x": f"{cell.x:,g}",
            "mode": cell.mode,
            "measured, ms": _milliseconds(cell.measured_s),
            "simulated, ms": f"{1e3 * cell.simulated_s:,.1f}",
            f"within {WITHIN:.0%}": "" if not cell.is_resolved else "yes" if cell.is_near else "no",
        }
        for cell in agreed.cells
    )
    return markdown_table(frame)


def _milliseconds(spread: Range) -> str:
    mean, low, high = (1e3 * seconds for seconds in spread)
    text = f"{mean:,.0f}" if abs(mean) >= 100 else f"{mean:.1f}"
    return text if low == high else f"{text} ({low:,.0f} to {high:,.0f})"


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_report(path: str | Path, report: OverflowReport) -> None:
    """Draw a panel for every figure. Raises `ConfigError` as `check_drawing`."""
    check_drawing(path)
    from matplotlib.figure import Figure

    compared = [figure for figure in report.figures if figure.number in COMPARED]
    num_panels = len(report.figures) + len(compared) + 2 * bool(report.over_time)
    columns = min(3, max(1, num_panels))
    rows = -(-num_panels // columns)
    canvas = Figure(figsize=(5.5 * columns, 4.0 * rows), layout="constrained")
    panels = iter(canvas.subplots(rows, columns, squeeze=False).flat)
    for figure in report.figures:
        _draw_figure(next(panels), figure)
        if figure in compared:
            _draw_compared(next(panels), figure)
    if report.over_time:
        _draw_throughput(next(panels), report)
        _draw_usage(next(panels), report)
    for unused in panels:
        unused.set_visible(False)
    canvas.suptitle(report.title)
    canvas.savefig(path, dpi=110)


def _draw_figure(axes: "Axes", figure: OverflowFigure) -> None:
    mean, low, high = (_pivot(figure, lambda point, end=end: point.overhead_s[end]) for end in range(3))
    mean.plot(ax=axes, style=_markers(figure), markersize=4, logy=figure.number == 3)
    for mode, line in zip(mean, axes.lines, strict=True):
        axes.fill_between(mean.index, low[mode], high[mode], color=line.get_color(), alpha=0.15, linewidth=0)
    if figure.number in LOGARITHMIC:
        axes.set_xscale("log", base=2)
    _label(axes, f"Figure {figure.number}: {figure.title}", figure.axis, "overhead, s")


def _draw_compared(axes: "Axes", figure: OverflowFigure) -> None:
    """The same against the first mode, where the curves lie on each other."""
    first = figure.modes[0]
    mean = _pivot(figure, lambda point: point.overhead_s.mean)
    mean = mean[mean[first] > 0]
    over = 100 * (mean.div(mean[first], axis=0) - 1)
    over.plot(ax=axes, style=_markers(figure), markersize=4)
    _label(axes, f"Figure {figure.number}: against {first}", figure.axis, "overhead, %")


def _draw_throughput(axes: "Axes", report: OverflowReport) -> None:
    for mode, run in report.over_time.items():
        width = run.seconds / NUM_BINS
        steps = _steps(run, report.pool_pages)
        bins = (steps.at_s // width).clip(upper=NUM_BINS).rename("bin")
        binned = steps.pivot_table(values=["prompt_tokens", "decode_tokens"], index=bins, aggfunc="sum")
        binned = binned.reindex(range(NUM_BINS + 1), fill_value=0)[["prompt_tokens", "decode_tokens"]] / width
        binned.index = width * (binned.index + 0.5)
        binned.columns = [f"{mode}: prompt", f"{mode}: decode"]
        binned.plot(ax=axes, style=["-", ":"], linewidth=1.0)
    _label(axes, "Figure 6: throughput over time", "seconds", "tokens per second")


def _draw_usage(axes: "Axes", report: OverflowReport) -> None:
    for mode, run in report.over_time.items():
        steps = _steps(run, report.pool_pages)
        axes.plot(steps.at_s, 100 * steps.usage, label=mode, linewidth=0.8)
    _label(axes, "Figure 6: pool usage over time", "seconds", "pages of running sequences, % of the pool")


def _markers(figure: OverflowFigure) -> list[str]:
    return [f"{'osD^vPX'[number % 7]}-" for number in range(len(figure.modes))]


def _label(axes: "Axes", title: str, axis: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel=axis, ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
