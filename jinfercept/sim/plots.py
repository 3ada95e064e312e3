"""A plot of latency against load. matplotlib is imported where something is drawn, and is an extra."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinfercept.errors import ConfigError
from jinfercept.sim.reports import Range

FORMATS = (".png", ".svg", ".pdf")
"""Suffixes of plot files."""


def check_drawing(path: str | Path) -> None:
    """Raise `ConfigError` if matplotlib is not installed, or if there is no picture by such a name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib", got="no such package", fix="pip install 'jinfercept[plots]'")
    if Path(path).suffix not in FORMATS:
        raise ConfigError("unknown kind of picture", got=path, fix=f"end it with {', '.join(FORMATS)}")


def draw_latencies(path: str, title: str, curves: Mapping[str, Sequence[tuple[float, Range]]]) -> None:
    """Draw curves of (requests per second, ms per token), each with its range over seeds. Raises as `check_drawing`."""
    check_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        rates, ranges = zip(*points, strict=True)
        means, lows, highs = zip(*ranges, strict=True)
        [line] = axes.plot(rates, means, "o-", label=name)
        axes.fill_between(rates, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(
        title=title, xlabel="requests per second", ylabel="mean normalized latency, ms/token (InferCept's definition)"
    )
    axes.grid(alpha=0.3)
    if curves:
        axes.set_yscale("log")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
