"""The study of overflow: every figure in the simulator, its checks, and what a mode's link costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from jinfercept.sched.named_profiles import load_profile
from studies.__main__ import main
from studies.overflow.batch_run import (
    AUTO,
    COPY_S,
    MACHINE,
    OUR_RECOMPUTE,
    OUR_SWAP,
    RECOMPUTE_2024,
    SWAP_COALESCED,
    SWAP_PAGEABLE,
    SWAP_PINNED,
    BatchRequest,
    BatchRun,
    Overflow,
    OverflowMode,
    at_once,
    linked,
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


def test_a_link_of_2024_copies_every_layer_of_every_page_and_ours_everything_at_once() -> None:
    profile = load_profile(MACHINE)
    by_layer, pageable, whole = (linked(profile, mode, 16) for mode in (SWAP_PINNED, SWAP_PAGEABLE, SWAP_COALESCED))
    assert by_layer.copies_s(160) == pytest.approx(10 * 64 * COPY_S)
    assert whole.copies_s(160) == COPY_S
    assert whole.swap_s(1600) - COPY_S == pytest.approx(profile.swap_s(1600))
    assert pageable.swap_s(1600) > by_layer.swap_s(1600) > whole.swap_s(1600)


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


def test_a_pool_is_a_share_of_the_demand_and_holds_the_longest_request() -> None:
    overflow = Overflow((BatchRequest(10, 7), BatchRequest(30, 3)), 4, None)
    assert overflow.demand_pages == 4 + 8
    assert shared(overflow, 0.75).pool_pages == 9
    assert shared(overflow, 0.1).pool_pages == 9  # 33 tokens


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


def test_auto_has_to_be_as_good_as_the_better_way_in_every_cell() -> None:
    both = {RECOMPUTE_2024.name: [1.0] * 3, SWAP_PINNED.name: [1.0] * 3, OUR_RECOMPUTE.name: [2.0, 1.0, 1.0]}
    both |= {OUR_SWAP.name: [1.0, 1.0, 2.0]}
    assert passed(figure(5, both | {AUTO.name: [1.01, 0.9, 1.0]}))[-2:] == [True, True]
    assert passed(figure(5, both | {AUTO.name: [1.03, 0.5, 1.0]}))[-2:] == [False, True]
    assert passed(figure(5, both | {AUTO.name: [1.0, 2.0, 1.0]}))[-2:] == [False, False]


def test_throughput_over_time_is_told_by_its_prompts_and_its_usage() -> None:
    runs = {mode.name: simulate(mode, shared(SMALL, 0.5)) for mode in (RECOMPUTE_2024, SWAP_PINNED)}
    checks = trend_checks([], runs)
    assert [check.figure for check in checks] == [6, 6, 6]
    assert checks[0].passed
    same = trend_checks([], dict.fromkeys(runs, RUN))
    assert [check.passed for check in same] == [False, True, False]


def test_a_profile_of_another_machine_serves_too() -> None:
    other = simulate(OUR_SWAP, SMALL, "roofline-llama-13b-a100")
    assert other.seconds != RUN.seconds
    assert replace(other.counters, plans=0).computed == 6 * 99
