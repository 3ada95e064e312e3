"""Pictures of studies: panels of curves, of bars, and of numbers as colours."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from jinfercept.errors import ConfigError
from jinfercept.sim.reports import Range

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
"""Suffixes of plot files."""


def check_drawing(path: str | Path) -> None:
    """Raise `ConfigError` if matplotlib is not installed, or if there is no picture by such a name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib", got="no such package", fix="pip install 'jinfercept[plots]'")
    if Path(path).suffix not in FORMATS:
        raise ConfigError("unknown kind of picture", got=path, fix=f"end it with {', '.join(FORMATS)}")


COLOURS: Mapping[str, str] = {
    "discard": "#d62728",
    "improved_discard": "#ff7f0e",
    "chunked_discard": "#e377c2",
    "preserve": "#8c564b",
    "swap": "#9467bd",
    "budgeted_swap": "#c5b0d5",
    "heuristic_preserve": "#bcbd22",
    "min_waste": "#1f77b4",
    "lru": "#7f7f7f",
    "lru_host": "#17becf",
    "copy_ahead": "#2ca02c",
    "bound": "#000000",
    "free_pause": "#555555",
}
"""Colour of a policy in every plot; the others get matplotlib's next one."""

REFERENCE: Mapping[str, Any] = {"linestyle": ":", "linewidth": 1.2, "alpha": 0.8}
"""Style of reference curves."""


class Panel(Protocol):
    """A part of a picture."""

    @property
    def title(self) -> str:
        """Stands over it."""
        ...

    def draw(self, axes: "Axes") -> None:
        """Draw all but the title."""
        ...


class PlottedCurve(NamedTuple):
    """A line through points, such as (rate, latency).

    Attributes:
        name: in the legend; None: none.
        points: requests per second and ms per token, with its range over seeds, by ascending rate.
        colour: None: the next one.
        reference: drawn thin and dotted: published numbers.
    """

    name: str | None
    points: Sequence[tuple[float, Range]]
    colour: str | None = None
    reference: bool = False


class CurvePanel(NamedTuple):
    """A panel of curves, latency on a logarithmic axis.

    Attributes:
        threshold: a horizontal line; None: none.
        span: least and largest value of that axis; None: as the curves need.
        ticks: texts of the horizontal axis at 0, 1, 2, …; empty: numbers.
    """

    title: str
    curves: Sequence[PlottedCurve]
    threshold: float | None = None
    unit: str = "mean normalized latency, ms/token\n(InferCept's definition)"
    span: tuple[float, float] | None = None
    axis: str = "requests per second"
    ticks: Sequence[str] = ()

    def draw(self, axes: "Axes") -> None:
        axes.grid(alpha=0.3)
        drawn = [curve for curve in self.curves if curve.points]
        ours = [curve for curve in drawn if not curve.reference]
        any_range = False
        for curve in drawn:
            rates = [rate for rate, _ in curve.points]
            style = REFERENCE if curve.reference else _style(ours.index(curve), len(ours))
            means = [latency.mean for _, latency in curve.points]
            [line] = axes.plot(rates, means, label=curve.name or "_", color=curve.colour, **style)
            lows, highs = ([getattr(latency, end) for _, latency in curve.points] for end in ("low", "high"))
            if lows != highs:
                any_range = True
                axes.fill_between(rates, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
        if self.threshold is not None:
            axes.axhline(self.threshold, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(self.axis)
        if self.ticks:
            axes.set_xticks(range(len(self.ticks)), list(self.ticks))
        axes.set_ylabel(self.unit)
        if drawn:
            _latency_axis(axes, self.span or [latency.mean for curve in drawn for _, latency in curve.points])
        if self.span is not None:
            axes.set_ylim(*self.span)
        if any(curve.name for curve in drawn):
            title = "shaded: range over seeds" if any_range else None
            axes.legend(fontsize="small", title=title, title_fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


class Bars(NamedTuple):
    """A panel of bars.

    Attributes:
        bars: for each bar its parts by name.
        beside: the parts stand beside each other, not on each other; then they may be negative.
    """

    title: str
    unit: str
    bars: Mapping[str, Mapping[str, float]]
    beside: bool = False

    def draw(self, axes: "Axes") -> None:
        """Draw the bars and the legend of their parts."""
        axes.grid(alpha=0.3)
        names = list(self.bars)
        parts = list(dict.fromkeys(part for bar in self.bars.values() for part in bar))
        bottoms, highest = [0.0] * len(names), 0.0
        width = 0.8 / len(parts) if self.beside and parts else 0.8
        for number, part in enumerate(parts):
            heights = [self.bars[name].get(part, 0.0) for name in names]
            shift = (number - (len(parts) - 1) / 2) * width if self.beside else 0.0
            axes.bar([place + shift for place in range(len(names))], heights, width, bottom=bottoms, label=part)
            highest = max(highest, *(bottom + height for bottom, height in zip(bottoms, heights, strict=True)))
            if not self.beside:
                bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize="small")
        axes.set_ylabel(self.unit)
        lowest = min((height for bar in self.bars.values() for height in bar.values()), default=0.0)
        if highest > 0 and lowest >= 0:
            axes.set_ylim(0, 1.08 * highest)
        if len(parts) > 1:
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def draw(path: str | Path, rows: Sequence[Sequence[Panel]]) -> None:
    """Draw rows of panels into one picture. Raises `ConfigError` as `check_drawing` does."""
    check_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5 * max(map(len, rows)), 4.5 * len(rows)), layout="constrained")
    for part, panels in zip(figure.subfigures(len(rows), squeeze=False)[:, 0], rows, strict=True):
        for axes, panel in zip(part.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.set_title(panel.title)
            panel.draw(axes)
    figure.savefig(path, dpi=120)


def _style(number: int, count: int) -> dict[str, Any]:
    """Of one of several lines that may lie on each other: the first are thick and light, the last thin."""
    share = number / max(count - 1, 1)
    return {
        "linewidth": 5.0 - 3.8 * share,
        "alpha": 0.5 + 0.5 * share,
        "linestyle": ("-", "-", "--", "-.")[number % 4],
        "marker": "osD^vPX<>*hdp"[number % 13],
        "markersize": 10 - 5 * share,
        "markerfacecolor": "none",
    }


def _latency_axis(axes: "Axes", values: Sequence[float]) -> None:
    """A logarithmic axis whose ticks are plain numbers, and several also where values are close to each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    close = max(values) < 6 * min(values)
    axes.yaxis.set_major_locator(MaxNLocator(6) if close else LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


class HeatMap(NamedTuple):
    """A panel of numbers in rows and columns, on a logarithmic scale of colours from 1 on, or around 1.

    Attributes:
        title: over the panel.
        names: of the vertical and of the horizontal axis.
        rows, columns: their values, from below and from the left.
        values: by row and column; None: an empty cell.
        most: the number of the darkest colour.
        framed: numbers from the first to the second have a frame.
        better: numbers may be below 1 too; green ones are better than 1, which is white. None: from 1 on, the more the greener.
    """

    title: str
    names: tuple[str, str]
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    most: float
    framed: tuple[float, float]
    better: Literal["more", "less"] | None = None

    def draw(self, axes: "Axes") -> None:
        """Draw a cell for each number, with the number in it."""
        from matplotlib.colors import LogNorm
        from matplotlib.patches import Rectangle

        most = max(self.most, 1.1)
        least = 1.0 if self.better is None else 1 / most
        numbers = [[math.nan if value is None else max(least, value) for value in row] for row in self.values]
        norm = LogNorm(least, most)
        colours = {None: "Greens", "more": "PRGn", "less": "PRGn_r"}[self.better]
        axes.imshow(numbers, norm=norm, cmap=colours, aspect="auto", origin="lower")

        def dark(value: float) -> bool:
            place = float(norm(value))
            return place > 0.6 if self.better is None else abs(place - 0.5) > 0.35

        for row, values in enumerate(self.values):
            for column, value in enumerate(values):
                if value is None:
                    continue
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="w" if dark(value) else "k")
                if self.framed[0] <= value <= self.framed[1]:
                    place = (column - 0.46, row - 0.46)
                    axes.add_patch(Rectangle(place, 0.92, 0.92, fill=False, edgecolor="#d62728", linewidth=2))
        axes.set_xticks(range(len(self.columns)), list(self.columns), fontsize="small")
        axes.set_yticks(range(len(self.rows)), list(self.rows))
        axes.set_ylabel(self.names[0])
        axes.set_xlabel(self.names[1])
