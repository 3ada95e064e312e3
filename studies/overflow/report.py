"""The report of `python -m studies overflow`: tables in Markdown."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from studies.answer import markdown_table
from studies.overflow.batch_run import OUR_RECOMPUTE, RECOMPUTE_2024, BatchRun
from studies.overflow.checks import crossover, trend_checks
from studies.overflow.figures import OverflowFigure, OverflowPoint

if TYPE_CHECKING:
    from pandas import DataFrame


class OverflowReport(NamedTuple):
    """What a study found.

    Attributes:
        title: the simulated machine.
        figures: Figures 2 to 5.
        over_time: the runs of Figure 6 by mode.
        pool_pages: of these runs.
    """

    title: str
    figures: Sequence[OverflowFigure]
    over_time: Mapping[str, BatchRun]
    pool_pages: int


def markdown(report: OverflowReport) -> str:
    """Every table of a report."""
    parts = [f"## {report.title}"]
    for figure in report.figures:
        parts += _figure_parts(figure)
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
