"""The report of `python -m studies overflow`: tables in Markdown, and a picture with a panel for every figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from jinfercept.sim.plots import check_drawing
from jinfercept.sim.reports import Range
from studies.overflow.agreement import WITHIN, Agreement, agreement
from studies.overflow.batch_run import BatchRun, BatchStep
from studies.overflow.checks import Ways, crossover, trend_checks
from studies.overflow.figures import OverflowFigure, OverflowPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        found: Figures 2 to 5, as far as they were asked for.
        over_time: the runs of Figure 6 by mode; empty if it was not asked for.
        pool_pages: of these runs.
        ways: the modes that stand for the poster's two.
        simulated: the same figures in the simulator, for a measured report; empty for a simulated one.
    """

    title: str
    found: Sequence[OverflowFigure]
    over_time: Mapping[str, BatchRun]
    pool_pages: int
    ways: Ways
    simulated: Sequence[OverflowFigure] = ()


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(report: OverflowReport) -> str:
    """Every table of a report."""
    parts = [f"## {report.title}"]
    for figure in report.found:
        parts += _figure_parts(figure, report.ways)
    if report.over_time:
        parts += ["### Figure 6: throughput and pool usage over time", _over_time(report)]
    parts += ["### Trend checks", _checks(report)]
    if report.simulated:
        agreed = agreement(report.found, report.simulated, report.ways)
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
    rows = [
        [f"{x:,g}", *(text(cells[mode]) if mode in cells else "-" for mode in figure.modes)]
        for x, cells in figure.by_x.items()
    ]
    return _table([f"{what}, by {figure.axis}", *figure.modes], rows)


def _over_time(report: OverflowReport) -> str:
    rows = []
    for mode, run in report.over_time.items():
        usage = [step.used_pages / report.pool_pages for step in run.steps]
        prompts, decoded = (sum(tokens) for tokens in zip(*map(_tokens, run.steps), strict=True))
        rows.append(
            [
                mode,
                f"{run.seconds:.1f}",
                f"{prompts / run.seconds:,.0f}",
                f"{decoded / run.seconds:,.0f}",
                str(sum(step.prompt_tokens > 0 for step in run.steps)),
                str(run.counters.preemptions),
                f"{fmean(usage):.0%}",
                f"{max(usage):.0%}",
            ]
        )
    header = [
        "mode",
        "seconds",
        "prompt tokens/s",
        "decode tokens/s",
        "steps with prompts",
        "preemptions",
        "mean usage",
        "peak",
    ]
    return _table(header, rows)


def _tokens(step: BatchStep) -> tuple[int, int]:
    return step.prompt_tokens, step.decode_tokens


def _checks(report: OverflowReport) -> str:
    rows = []
    for check in trend_checks(report.found, report.over_time, report.ways):
        reason = f" ({check.why})" if check.why and not check.passed else ""
        figure = str(check.figure or "3-5")
        rows.append([figure, check.sentence, "pass" if check.passed else "FAIL", check.seen + reason])
    return _table(["figure", "finding", "", "seen"], rows)


def _agreement_table(agreed: Agreement) -> str:
    rows = [
        [
            f"{cell.figure}",
            f"{cell.x:,g}",
            cell.mode,
            _milliseconds(cell.measured_s),
            f"{1e3 * cell.simulated_s:,.1f}",
            "" if not cell.is_resolved else "yes" if cell.is_near else "no",
        ]
        for cell in agreed.cells
    ]
    return _table(["figure", "x", "mode", "measured, ms", "simulated, ms", f"within {WITHIN:.0%}"], rows)


def _milliseconds(spread: Range) -> str:
    mean, low, high = (1e3 * seconds for seconds in spread)
    text = f"{mean:,.0f}" if abs(mean) >= 100 else f"{mean:.1f}"
    return text if low == high else f"{text} ({low:,.0f} to {high:,.0f})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:" for _ in header[1:]]], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_report(path: str | Path, report: OverflowReport) -> None:
    """Draw a panel for every figure. Raises `ConfigError` as `sim.plots.check_drawing`."""
    check_drawing(path)
    from matplotlib.figure import Figure

    compared = [figure for figure in report.found if figure.number in COMPARED]
    num_panels = len(report.found) + len(compared) + 2 * bool(report.over_time)
    columns = min(3, max(1, num_panels))
    rows = -(-num_panels // columns)
    canvas = Figure(figsize=(5.5 * columns, 4.0 * rows), layout="constrained")
    panels = iter(canvas.subplots(rows, columns, squeeze=False).flat)
    for figure in report.found:
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
    for number, mode in enumerate(figure.modes):
        points = [(x, cells[mode].overhead_s) for x, cells in figure.by_x.items() if mode in cells]
        xs = [x for x, _ in points]
        [line] = axes.plot(
            xs, [spread.mean for _, spread in points], marker="osD^vPX"[number % 7], markersize=4, label=mode
        )
        lows, highs = ([getattr(spread, end) for _, spread in points] for end in ("low", "high"))
        axes.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    if figure.number in LOGARITHMIC:
        axes.set_xscale("log", base=2)
    if figure.number == 3:
        axes.set_yscale("log")
    axes.set_title(f"Figure {figure.number}: {figure.title}", fontsize="medium")
    axes.set_xlabel(figure.axis)
    axes.set_ylabel("overhead, s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def _draw_compared(axes: "Axes", figure: OverflowFigure) -> None:
    """The same against the first mode, where the curves lie on each other."""
    first = figure.modes[0]
    for number, mode in enumerate(figure.modes):
        points = [
            (x, 100 * (cells[mode].overhead_s.mean / cells[first].overhead_s.mean - 1))
            for x, cells in figure.by_x.items()
            if cells[first].overhead_s.mean > 0
        ]
        axes.plot(*zip(*points, strict=True), marker="osD^vPX"[number % 7], markersize=4, label=mode)
    axes.set_title(f"Figure {figure.number}: against {first}", fontsize="medium")
    axes.set_xlabel(figure.axis)
    axes.set_ylabel("overhead, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def _draw_throughput(axes: "Axes", report: OverflowReport) -> None:
    for mode, run in report.over_time.items():
        width = run.seconds / NUM_BINS
        for place, what in enumerate(("prompt", "decode")):
            binned = [0.0] * (NUM_BINS + 1)
            for step in run.steps:
                binned[min(NUM_BINS, int(step.at_s / width))] += _tokens(step)[place] / width
            at = [width * (number + 0.5) for number in range(len(binned))]
            axes.plot(at, binned, label=f"{mode}: {what}", linewidth=1.0, linestyle="-:"[place])
    axes.set_title("Figure 6: throughput over time", fontsize="medium")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens per second")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def _draw_usage(axes: "Axes", report: OverflowReport) -> None:
    for mode, run in report.over_time.items():
        usage = [100 * step.used_pages / report.pool_pages for step in run.steps]
        axes.plot([step.at_s for step in run.steps], usage, label=mode, linewidth=0.8)
    axes.set_title("Figure 6: pool usage over time", fontsize="medium")
    axes.set_xlabel("seconds")
    axes.set_ylabel("pages of running sequences, % of the pool")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
