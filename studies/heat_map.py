"""A panel of numbers in rows and columns as colours."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
