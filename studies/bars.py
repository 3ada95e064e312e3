"""Groups of bars, a panel of a picture."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
