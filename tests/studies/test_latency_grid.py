"""Grids of reports: ratios to the best or to a base, ties, empty cells."""

import pytest

from jinfercept.sim.run_stats import Report
from studies.questions.latency_grid import LatencyGrid, good_share, latency_text


def report(mean: float) -> Report:
    latency = {"mean": mean, "p50": mean / 2, "p99": 10 * mean}
    return {"normalized_latency_ms_per_token": latency, "goodput_per_s": 1.5, "simulated_s": 20.0, "requests": 40}


ROWS = {"a": {"x": report(10.0), "y": report(10.1), "z": report(40.0)}, "b": {"y": report(30.0)}}
GRID = LatencyGrid("Policies", ("machine", "policy"), ("w", "x", "y", "z"), ROWS)


def test_a_cell_says_mean_median_tail_and_goodput() -> None:
    assert good_share(report(1.0)) == 0.75
    assert latency_text(report(12.345)) == "12.3 / 6.17 / 123 / 75%"


def test_the_best_of_a_row_its_ties_and_the_worst_of_a_column() -> None:
    assert GRID.ranked("a") == ["x", "y", "z"]
    assert GRID.as_good("a") == ["x", "y"]
    assert GRID.ratio("a", "z") == 4.0
    assert GRID.worst("y") == (pytest.approx(1.01), "a")
    assert GRID.worst("w") is None


def test_columns_without_a_report_are_not_shown_and_empty_cells_are() -> None:
    table, shown = GRID.table(), GRID.heat_map()
    assert list(table.columns) == ["machine", "x", "y", "z"]
    assert table.rows[1][1] == ""
    assert list(shown.rows) == ["b", "a"], "the first row of the table is on top of the map"
    assert shown.values[1] == [1.0, pytest.approx(1.01), 4.0]
    assert shown.values[0] == [None, 1.0, None]


def test_a_base_takes_the_place_of_the_best() -> None:
    shown = GRID._replace(rows={"a": ROWS["a"]}, base="z").heat_map()
    assert shown.values == [[0.25, pytest.approx(0.2525), 1.0]]
