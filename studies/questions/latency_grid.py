"""Reports in rows and columns: as a table of latencies, as a heat map, and the best of each row."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jinfercept.sim.run_stats import Report
from jinfercept.sim.tables import TextTable, number_text
from studies.heat_map import HeatMap

LATENCY_CELL = "mean / p50 / p99, ms per generated token / requests within the limits"
"""What a cell of a table shows."""
TIE = 1.02
"""Means within so many times the least one count as equal: one seed tells no more."""


class LatencyGrid(NamedTuple):
    """Reports of simulations.

    Attributes:
        title: of the table and the map.
        names: of the rows and of the columns.
        order: of the columns; those without a report are not shown.
        rows: reports by column, by the name of the row.
        base: the column to compare with; None: the best one of each row.
    """

    title: str
    names: tuple[str, str]
    order: Sequence[str]
    rows: Mapping[str, Mapping[str, Report]]
    base: str | None = None

    @property
    def columns(self) -> list[str]:
        """Those with a report."""
        return [column for column in self.order if any(column in row for row in self.rows.values())]

    def table(self) -> TextTable:
        """The latencies."""
        columns = self.columns
        cells = [
            [name, *(latency_text(row[column]) if column in row else "" for column in columns)]
            for name, row in self.rows.items()
        ]
        return TextTable(f"{self.title}: {LATENCY_CELL}.", [self.names[0], *columns], cells)

    def heat_map(self) -> HeatMap:
        """Means over the row's least one, or over that in the column `base`; what is as good has a frame."""
        values = [
            [self.ratio(name, column) if column in row else None for column in self.columns]
            for name, row in list(self.rows.items())[::-1]
        ]
        base = "the best of the row" if self.base is None else f'that of "{self.base}"'
        title = f"{self.title}: mean latency over {base}"
        most = max((value for row in values for value in row if value is not None), default=1.0)
        columns = [column.replace("_", "\n").replace(" ", "\n", 1) for column in self.columns]
        return HeatMap(title, self.names, list(self.rows)[::-1], columns, values, min(most, 4.0), (0.0, TIE))

    def ranked(self, row: str) -> list[str]:
        """The columns of a row by mean latency, best first."""
        return sorted(self.rows[row], key=lambda column: mean_ms(self.rows[row][column]))

    def as_good(self, row: str) -> list[str]:
        """The columns within `TIE` of the best one of a row, best first."""
        ranked = self.ranked(row)
        least = mean_ms(self.rows[row][ranked[0]])
        return [column for column in ranked if mean_ms(self.rows[row][column]) <= TIE * least]

    def ratio(self, row: str, column: str) -> float:
        """The mean latency of a cell over that of the row's `base`."""
        base = self.base or self.ranked(row)[0]
        return mean_ms(self.rows[row][column]) / mean_ms(self.rows[row][base])

    def worst(self, column: str) -> tuple[float, str] | None:
        """The largest `ratio` of a column, and its row; None if no row has the column."""
        return max(((self.ratio(name, column), name) for name, row in self.rows.items() if column in row), default=None)


def mean_ms(report: Report) -> float:
    """Mean normalized latency, ms per generated token."""
    return report["normalized_latency_ms_per_token"]["mean"]


def good_share(report: Report) -> float:
    """Share of the requests within the limits: goodput without the seconds in which the last conversations end."""
    return report["goodput_per_s"] * report["simulated_s"] / report["requests"]


def latency_text(report: Report) -> str:
    """Mean, p50, p99 and goodput."""
    latency = report["normalized_latency_ms_per_token"]
    shown = [number_text(float(f"{latency[key]:.3g}")) for key in ("mean", "p50", "p99")]
    return " / ".join([*shown, f"{good_share(report):.0%}"])
