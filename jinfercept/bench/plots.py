"""Pictures of reports: latency against load, and groups of bars. Knows no policies, only curves and bars with names.

matplotlib is imported where something is drawn, and is an extra: `check_drawing` says so before the work begins.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinfercept.bench.reports import Range
from jinfercept.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
"""The same colour for a policy in every picture; those without one get what matplotlib gives."""


FORMATS = (".png", ".svg", ".pdf")
"""What names of pictures end with."""


class Curve(NamedTuple):
    """A line through (rate, latency) points.

    Attributes:
        name: in the legend; None: not there.
        points: requests per second and ms per token, with its range over seeds, by ascending rate.
        colour: None: the next one.
        reference: thin and dashed: somebody else's numbers.
    """

    name: str | None
    points: Sequence[tuple[float, Range]]
    colour: str | None = None
    reference: bool = False


class Curves(NamedTuple):
    """A panel of curves, latency on a logarithmic axis."""

    title: str
    curves: Sequence[Curve]
    threshold: float | None = None


class Bars(NamedTuple):
    """A panel of stacked bars.

    Attributes:
        title: over the panel.
        unit: on the axis.
        bars: for each bar its parts by name.
    """

    title: str
    unit: str
    bars: Mapping[str, Mapping[str, float]]


Panel = Curves | Bars


def check_drawing(path: str | Path) -> None:
    """Raise `ConfigError` if matplotlib is not installed, or if there is no picture by such a name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib", got="no such package", fix="pip install 'jinfercept[bench]'")
    if Path(path).suffix not in FORMATS:
        raise ConfigError("not the name of a picture", got=path, fix=f"end it with {', '.join(FORMATS)}")


def draw(path: str | Path, rows: Sequence[Sequence[Panel]]) -> None:
    """Draw rows of panels into one picture. Raises `ConfigError` as `check_drawing` does."""
    check_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5 * max(map(len, rows)), 4.5 * len(rows)), layout="constrained")
    for part, panels in zip(figure.subfigures(len(rows), squeeze=False)[:, 0], rows, strict=True):
        for axes, panel in zip(part.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.set_title(panel.title)
            axes.grid(alpha=0.3)
            if isinstance(panel, Curves):
                _draw_curves(axes, panel)
            else:
                _draw_bars(axes, panel)
    figure.savefig(path, dpi=120)


def _draw_curves(axes: "Axes", panel: Curves) -> None:
    for curve in panel.curves:
        if not curve.points:
            continue
        rates = [rate for rate, _ in curve.points]
        style: dict[str, Any] = (
            {"linestyle": "--", "linewidth": 0.9, "alpha": 0.7} if curve.reference else {"marker": "."}
        )
        [line] = axes.plot(
            rates,
            [latency.mean for _, latency in curve.points],
            label=curve.name or "_",
            color=curve.colour,
            **style,
        )
        lows, highs = ([getattr(latency, end) for _, latency in curve.points] for end in ("low", "high"))
        if lows != highs:
            axes.fill_between(rates, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    if panel.threshold is not None:
        axes.axhline(panel.threshold, color="black", linewidth=0.6, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("normalized latency, ms per token")
    if any(curve.name for curve in panel.curves):
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_bars(axes: "Axes", panel: Bars) -> None:
    names = list(panel.bars)
    parts = list(dict.fromkeys(part for bar in panel.bars.values() for part in bar))
    bottoms = [0.0] * len(names)
    for part in parts:
        heights = [panel.bars[name].get(part, 0.0) for name in names]
        axes.bar(range(len(names)), heights, bottom=bottoms, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize="small")
    axes.set_ylabel(panel.unit)
    if len(parts) > 1:
        axes.legend(fontsize="small")
