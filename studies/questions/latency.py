"""Latency by policy and load: columns of a table, and grids of cells."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jinfercept.sim.reports import Range, latency_ms
from jinfercept.sim.run_stats import Report
from jinfercept.sim.tables import TextTable, number_text
from studies.plots import HeatMap

LATENCY_COLUMNS: Sequence[str] = ("mean", "p50", "p99", "goodput/s", "left")
"""Normalized latency as InferCept defines it, ms per token; requests within limits per second of arrivals; unfinished ones."""


def latency_cells(report: Report) -> list[str]:
    """The texts of `LATENCY_COLUMNS`."""
    latency = report["normalized_latency_paper_ms_per_token"]
    times = [number_or_dash(latency[part]) for part in ("mean", "p50", "p99")]
    return [*times, f"{goodput(report):.2f}", str(report["unfinished"])]


def num_good(report: Report) -> float:
    """Requests that finished within the report's limits."""
    return report["goodput_per_s"] * report["simulated_s"]


def goodput(report: Report) -> float:
    """Requests that finished within the report's limits, per second of arrivals: a long last call does not lessen it."""
    return num_good(report) / report["duration_s"]


def useful_tokens_per_s(report: Report) -> float:
    """Tokens generated for requests that finished, per second in which the device worked: what is generated for clients that
    never come back, recomputed or waited for lessens it."""
    return report["useful_tokens"] / (report["step_s"]["measured"] or 1.0)


def mean_ms(report: Report) -> float:
    """Mean normalized latency, ms per token; infinite for a run without requests that come back."""
    latency = latency_ms(report)
    return float("inf") if latency is None else latency


def limits_text(report: Report) -> str:
    """The limits of goodput, for a title."""
    limits = report["limits"]
    return f"goodput: first token within {limits['first_token_s']:g} s and {1e3 * limits['per_token_s']:g} ms per token"


def point(value: float) -> Range:
    """A value of one seed, to be drawn."""
    return Range(value, value, value)


def number_or_dash(value: float | None) -> str:
    """A number as in tables."""
    return "-" if value is None else number_text(value)


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
        return sorted(self.rows[row], key=lambda column: mean_token_ms(self.rows[row][column]))

    def as_good(self, row: str) -> list[str]:
        """The columns within `TIE` of the best one of a row, best first."""
        ranked = self.ranked(row)
        least = mean_token_ms(self.rows[row][ranked[0]])
        return [column for column in ranked if mean_token_ms(self.rows[row][column]) <= TIE * least]

    def ratio(self, row: str, column: str) -> float:
        """The mean latency of a cell over that of the row's `base`."""
        base = self.base or self.ranked(row)[0]
        return mean_token_ms(self.rows[row][column]) / mean_token_ms(self.rows[row][base])

    def worst(self, column: str) -> tuple[float, str] | None:
        """The largest `ratio` of a column, and its row; None if no row has the column."""
        return max(((self.ratio(name, column), name) for name, row in self.rows.items() if column in row), default=None)


def mean_token_ms(report: Report) -> float:
    """Mean latency, ms per generated token."""
    return report["normalized_latency_ms_per_token"]["mean"]


def good_share(report: Report) -> float:
    """Share of the requests within the limits: goodput without the seconds in which the last conversations end."""
    return report["goodput_per_s"] * report["simulated_s"] / report["requests"]


def latency_text(report: Report) -> str:
    """Mean, p50, p99 and goodput."""
    latency = report["normalized_latency_ms_per_token"]
    shown = [number_text(float(f"{latency[key]:.3g}")) for key in ("mean", "p50", "p99")]
    return " / ".join([*shown, f"{good_share(report):.0%}"])
