"""The report of `python -m studies overflow`: tables in Markdown, and a picture with a panel for every figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from studies.answer import markdown_table
from studies.overflow.batch_run import OUR_RECOMPUTE, RECOMPUTE_2024, BatchRun
from studies.overflow.checks import crossover, trend_checks
from studies.overflow.figures import OverflowFigure, OverflowPoint
from studies.plots import check_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


NUM_BINS = 120
"""Points of a line over time."""
LOGARITHMIC = (2, 3)
"""Figures whose axis doubles from tick to tick."""

COMPARED = (4, 5)
"""Figures whose curves lie on each other, so that a second panel shows their differences."""


class OverflowReport(NamedTuple):
    """What a study found.

    Attributes:
        title: the simulated machine.
        figures: Figures 2 to 5, as far as they were asked for.
        over_time: the runs of Figure 6 by mode; empty if it was not asked for.
        pool_pages: of these runs.
    """

    title: str
    figures: Sequence[OverflowFigure]
    over_time: Mapping[str, BatchRun]
    pool_pages: int


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(report: OverflowReport) -> str:
    """Every table of a report."""
    parts = [f"## {report.title}"]
    for figure in report.figures:
        parts += _figure_parts(figure)
    if report.over_time:
        parts += ["### Figure 6: throughput and pool usage over time", _over_time(report)]
    parts += ["### Trend checks", _checks(report)]
    return "\n\n".join(parts) + "\n"


def _figure_parts(figure: OverflowFigure) -> Iterator[str]:
    yield f"### Figure {figure.number}: {figure.title}"
    yield _by_x(figure, lambda point: _milliseconds(point.overhead_s), "overhead, ms")
    if figure.number == 3:
        yield _crossovers(figure)
    if figure.number == 5:
        yield _by_x(figure, lambda point: str(point.counters.preemptions), "preemptions")
        yield _by_x(figure, lambda point: f"{point.moved_tokens:,}", "tokens moved, both ways")
        yield _by_x(figure, lambda point: f"{point.counters.recomputed:,}", "tokens recomputed")


def _crossovers(figure: OverflowFigure) -> str:
    texts = []
    for mode in figure.modes:
        if "swap" in mode:
            rival = (OUR_RECOMPUTE if mode.startswith("our ") else RECOMPUTE_2024).name  # under the same engine
            at = crossover(figure, mode, rival)
            texts.append(f"{mode} costs less than {rival} " + ("nowhere" if at is None else f"from {at:,.0f} on"))
    return "Crossover, evicted tokens: " + "; ".join(texts) + "."


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
        for check in trend_checks(report.figures, report.over_time)
    )
    return markdown_table(frame)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if abs(seconds) >= 0.1 else f"{1e3 * seconds:.1f}"


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
    overheads = _pivot(figure, lambda point: point.overhead_s)
    overheads.plot(ax=axes, style=_markers(figure), markersize=4, logy=figure.number == 3)
    if figure.number in LOGARITHMIC:
        axes.set_xscale("log", base=2)
    _label(axes, f"Figure {figure.number}: {figure.title}", figure.axis, "overhead, s")


def _draw_compared(axes: "Axes", figure: OverflowFigure) -> None:
    """The same against the first mode, where the curves lie on each other."""
    first = figure.modes[0]
    mean = _pivot(figure, lambda point: point.overhead_s)
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
