"""The study of overflow: every figure in the simulator, its checks, and what a mode's link costs."""

from pathlib import Path

import pytest

from studies.__main__ import main
from studies.overflow.batch_run import (
    AUTO,
    OUR_RECOMPUTE,
    OUR_SWAP,
    RECOMPUTE_2024,
    SWAP_PAGEABLE,
    SWAP_PINNED,
    BatchRun,
    OverflowMode,
    at_once,
    shared,
    simulate,
)
from studies.overflow.checks import RECOMPUTE, SWAP, crossover, trend_checks
from studies.overflow.figures import OverflowFigure, OverflowPoint

SMALL = at_once(60, 40, 6)


@pytest.mark.slow
def test_the_quick_study_shows_every_figure_and_fails_only_where_it_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["overflow", "--quick", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "overflow.md").read_text()
    assert text in capsys.readouterr().out
    assert [f"Figure {number}" in text for number in (2, 3, 4, 5, 6)] == [True] * 5
    failed = [line for line in text.splitlines() if "| FAIL |" in line]
    assert len(failed) == 1
    assert "lowest at 30 % or 50 %" in failed[0]
    assert "by definition" in failed[0]


@pytest.mark.parametrize("mode", [RECOMPUTE_2024, SWAP_PINNED, OUR_RECOMPUTE, OUR_SWAP, AUTO])
def test_overflow_costs_time_and_moves_or_recomputes_what_the_mode_says(mode: OverflowMode) -> None:
    free, short = simulate(mode, SMALL), simulate(mode, shared(SMALL, 0.6))
    assert free.counters.preemptions == 0 < short.counters.preemptions
    assert short.seconds > free.seconds
    assert short.streams == free.streams
    assert (short.counters.recomputed > 0) == (mode.preemption == "recompute")
    assert (short.counters.copied_in > 0) == (mode.preemption != "recompute")
    assert free.peak_pages == SMALL.demand_pages
    assert short.peak_pages <= (shared(SMALL, 0.6).pool_pages or 0)
    assert short.seconds == simulate(mode, shared(SMALL, 0.6)).seconds, "a simulation is the same twice"


RUN = simulate(SWAP_PINNED, SMALL)


def figure(number: int, curves: dict[str, list[float]], xs: tuple[float, ...] = (10, 20, 40)) -> OverflowFigure:
    points = [
        OverflowPoint(x, mode, seconds, RUN.counters)
        for mode, curve in curves.items()
        for x, seconds in zip(xs, curve, strict=True)
    ]
    return OverflowFigure(number, "a title", "an axis", points)


def test_a_crossover_is_interpolated() -> None:
    crossing = figure(3, {"a": [3.0, 2.0, 1.0], "b": [1.0, 1.0, 2.0]})
    assert crossover(crossing, "a", "b") == 30.0
    assert crossover(crossing, "b", "a") is None
    assert crossover(figure(3, {"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}), "a", "b") == 10.0


def passed(result: OverflowFigure, over_time: dict[str, BatchRun] | None = None) -> list[bool]:
    return [check.passed for check in trend_checks([result], over_time or {})]


def test_the_checks_fail_where_the_curves_do_not_show_the_finding() -> None:
    recompute, swap, pageable = RECOMPUTE, SWAP, SWAP_PAGEABLE.name
    flat, falling = [1.0, 1.0, 1.05], [3.0, 2.0, 1.0]
    assert passed(figure(2, {recompute: flat, swap: falling, pageable: [4.0, 3.0, 2.0]})) == [True] * 3
    assert passed(figure(2, {recompute: falling, swap: flat, pageable: [0.5] * 3})) == [False] * 3
    assert passed(figure(4, {recompute: [1.0, 2.0, 4.0], swap: [1.5, 2.0, 3.0]})) == [True, True]
    assert passed(figure(4, {recompute: falling, swap: [4.0, 5.0, 6.0]})) == [False, False]
    assert passed(figure(5, {recompute: falling, swap: flat}, (10, 30, 40))) == [False, False]
    assert passed(figure(5, {recompute: [3.0, 1.0, 2.0], swap: [3.0, 2.0, 1.0]}, (10, 30, 50))) == [True, True]
