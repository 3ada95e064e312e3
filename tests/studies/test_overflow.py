"""The study of overflow: every figure in the simulator, its checks, and what a mode's link costs."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sim.reports import Range
from studies.__main__ import main
from studies.overflow.batch_run import (
    AUTO,
    COPY_S,
    MACHINE,
    OUR_RECOMPUTE,
    OUR_SWAP,
    OUR_SWAP_BY_PAGE,
    OUR_SWAP_PAGEABLE,
    RECOMPUTE_2024,
    SWAP_COALESCED,
    SWAP_PAGEABLE,
    SWAP_PINNED,
    BatchRequest,
    BatchRun,
    BatchStep,
    Overflow,
    OverflowMode,
    at_once,
    linked,
    shared,
    simulate,
)
from studies.overflow.checks import Ways, crossover, trend_checks
from studies.overflow.command import measured_report
from studies.overflow.figures import (
    QUICK,
    OverflowFigure,
    OverflowPoint,
    OverflowStudy,
    fastest_s,
    overhead_s,
)
from studies.overflow.real_engine import MODES, QUICK_EFFORT, SIZES, OverflowEngine, on_one_core
from studies.overflow.report import agreement, markdown
from tests.support.tiny_model import GOLDEN

WAYS = Ways(RECOMPUTE_2024.name, SWAP_PINNED.name)
SMALL = at_once(60, 40, 6)


@pytest.mark.slow
def test_the_quick_study_shows_every_figure_and_fails_only_where_it_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["overflow", "--quick", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "overflow.md").read_text()
    assert text in capsys.readouterr().out
    assert [f"Figure {number}" in text for number in (2, 3, 4, 5, 6)] == [True] * 5
    assert (tmp_path / "overflow.png").stat().st_size > 10_000
    failed = [line for line in text.splitlines() if "| FAIL |" in line]
    assert len(failed) == 1
    assert "lowest at 30 % or 50 %" in failed[0]
    assert "by definition" in failed[0]


def test_a_figure_that_the_poster_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overflow", "--figure", "1"]) == 2
    assert "no such figure; got 1; fix: 2, 3, 4, 5 or 6" in capsys.readouterr().err


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
        OverflowPoint(x, mode, Range(seconds, seconds, seconds), RUN.counters)
        for mode, curve in curves.items()
        for x, seconds in zip(xs, curve, strict=True)
    ]
    return OverflowFigure(number, "a title", "an axis", points)


def run_of(*steps: tuple[float, int]) -> BatchRun:
    """A run whose steps take so many seconds; those with equal numbers have the same plans."""
    ends = accumulate(seconds for seconds, _ in steps)
    return RUN._replace(steps=[BatchStep(end, number, 0, 0, 0) for end, (_, number) in zip(ends, steps, strict=True)])


def test_an_overhead_counts_the_fastest_run_of_each_step_behind_those_that_both_pools_share() -> None:
    free = [run_of((9.0, 1), (2.0, 2)), run_of((1.0, 1), (3.0, 2))]
    short = [run_of((5.0, 1), (7.0, 3), (1.0, 2)), run_of((1.0, 1), (4.0, 3), (2.0, 2))]
    assert overhead_s(free, short) == pytest.approx(4.0 + 1.0 - 2.0)
    assert overhead_s(free, free) == 0.0
    assert fastest_s(free) == pytest.approx(1.0 + 2.0)


def test_both_pools_are_served_in_turns() -> None:
    served = list[tuple[str, bool, int]]()

    def run(mode: OverflowMode, overflow: Overflow, seed: int) -> BatchRun:
        served.append((mode.preemption, overflow.pool_pages is None, seed))
        return simulate(mode, overflow)

    sizes = QUICK._replace(batch=SMALL, shares=(0.6,), seeds=2, repeats=2)
    OverflowStudy(run, sizes, (OUR_RECOMPUTE, OUR_SWAP), (), run).figure_5(lambda cell: None)
    turn = [("recompute", True), ("recompute", False), ("swap", False)]
    assert served == [(*batch, seed) for seed in (0, 1) for _ in range(2) for batch in turn]


def test_a_crossover_is_interpolated() -> None:
    crossing = figure(3, {"a": [3.0, 2.0, 1.0], "b": [1.0, 1.0, 2.0]})
    assert crossover(crossing, "a", "b") == 30.0
    assert crossover(crossing, "b", "a") is None
    assert crossover(figure(3, {"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}), "a", "b") == 10.0


def passed(result: OverflowFigure, over_time: dict[str, BatchRun] | None = None) -> list[bool]:
    return [check.passed for check in trend_checks([result], over_time or {}, WAYS)]


def test_the_checks_fail_where_the_curves_do_not_show_the_finding() -> None:
    recompute, swap, pageable = WAYS.recompute, WAYS.swap, SWAP_PAGEABLE.name
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
    noisy = figure(5, both | {AUTO.name: [1.0, 1.0, 1.0]})
    points = [
        point._replace(overhead_s=Range(1.1, 0.9, 1.3)) if point.mode == AUTO.name else point for point in noisy.points
    ]
    [within] = [check for check in trend_checks([noisy._replace(points=points)], {}, WAYS) if check.figure == 0]
    assert within.passed
    assert "over 2 % in 3, in 3 of these by less than what the seeds differ by" in within.seen


def test_throughput_over_time_is_told_by_its_prompts_and_its_usage() -> None:
    runs = {mode.name: simulate(mode, shared(SMALL, 0.5)) for mode in (RECOMPUTE_2024, SWAP_PINNED)}
    checks = trend_checks([], runs, WAYS)
    assert [check.figure for check in checks] == [6, 6, 6]
    assert checks[0].passed
    same = trend_checks([], dict.fromkeys(runs, RUN), WAYS)
    assert [check.passed for check in same] == [False, True, False]


def test_a_profile_of_another_machine_serves_too() -> None:
    other = simulate(OUR_SWAP, SMALL, "roofline-llama-13b-a100")
    assert other.seconds != RUN.seconds
    assert replace(other.counters, plans=0).computed == 6 * 99


TINY = SIZES._replace(
    page_sizes=(4,),
    evicted=(24,),
    lengths=(24,),
    batch=at_once(6, 18, 6, page_size=4),
    shares=(0.5,),
    seeds=1,
    repeats=1,
)
ENGINE_WAYS = Ways(OUR_RECOMPUTE.name, OUR_SWAP_BY_PAGE.name)


@pytest.fixture(scope="module")
def engine() -> Iterator[OverflowEngine]:
    with OverflowEngine(
        str(GOLDEN / "llama_yarn"), TINY, effort=QUICK_EFFORT, clock=time.process_time, max_num_batched_tokens=32
    ) as engine:
        yield engine


@pytest.mark.slow
def test_every_mode_makes_the_simulators_plans_and_the_tokens_of_a_pool_for_all(engine: OverflowEngine) -> None:
    check_modes(engine, MODES)
    assert engine.setup(OUR_SWAP_BY_PAGE, 4).shape.staging_pages == 1
    assert engine.setup(OUR_SWAP, 4).shape.staging_pages > 1


@pytest.mark.slow
def test_pageable_memory_changes_neither_plans_nor_tokens(engine: OverflowEngine) -> None:
    check_modes(engine, [OUR_SWAP_PAGEABLE])


def check_modes(engine: OverflowEngine, modes: Iterable[OverflowMode]) -> None:
    short = shared(TINY.batch, 0.5)
    for mode in modes:
        free, run, priced = (
            engine.run(mode, TINY.batch, 0),
            engine.run(mode, short, 0),
            engine.simulated(mode, short, 0),
        )
        assert run.streams == free.streams
        assert free.counters.preemptions == 0 < run.counters.preemptions
        assert run.counters == priced.counters
        assert priced.seconds > 0
        if mode.preemption == "auto":  # measured prices decide between the two
            assert run.counters.recomputed + run.counters.copied_out > 0
        else:
            assert (run.counters.recomputed > 0) == (mode.preemption == "recompute")


@pytest.mark.slow
def test_other_prompts_are_other_tokens(engine: OverflowEngine) -> None:
    case = Overflow((BatchRequest(5, 8),), 4, None)
    assert engine.run(OUR_SWAP, case, 0).streams != engine.run(OUR_SWAP, case, 1).streams


def test_the_measured_report_has_the_simulators_numbers_beside(engine: OverflowEngine) -> None:
    text = markdown(measured_report(engine, TINY, "tiny", [5, 6]))
    assert "## Measured: tiny" in text
    assert "Agreement of the simulator" in text
    assert text.count("| 5 | 50 |") == len(MODES)


def figure_of_engine(overheads: dict[str, list[Range]], preemptions: int = 1) -> OverflowFigure:
    points = [
        OverflowPoint(x, mode, spread, SchedulerCounters(preemptions=preemptions))
        for mode, spreads in overheads.items()
        for x, spread in enumerate(spreads)
    ]
    return OverflowFigure(5, "a title", "an axis", points)


def exactly(*seconds: float) -> list[Range]:
    return [Range(value, value, value) for value in seconds]


def test_agreement_counts_winners_and_near_overheads_and_leaves_out_what_is_not_decided() -> None:
    measured = figure_of_engine({ENGINE_WAYS.recompute: exactly(1.0, 2.0), ENGINE_WAYS.swap: exactly(2.0, 1.0)})
    simulated = figure_of_engine({ENGINE_WAYS.recompute: exactly(1.2, 2.0), ENGINE_WAYS.swap: exactly(2.0, 3.0)})
    agreed = agreement([measured], [simulated], ENGINE_WAYS)
    assert (agreed.same_winner, agreed.num_compared, agreed.num_undecided) == (1, 2, 0)
    assert (agreed.num_near, len(agreed.resolved)) == (3, 4)
    assert str(agreed).startswith("FAIL: the same winner in 1 of 2 comparisons")
    noisy = figure_of_engine({ENGINE_WAYS.recompute: [Range(1.0, 0.5, 2.0)], ENGINE_WAYS.swap: [Range(1.2, 0.8, 1.5)]})
    undecided = agreement([noisy], [simulated], ENGINE_WAYS)
    assert undecided[1:] == (0, 0, 1)
    assert undecided.resolved == []
    assert "FAIL: overheads within 25% in 0 of 0 cells, beside 2" in str(undecided)
    none = figure_of_engine({ENGINE_WAYS.recompute: exactly(1.0), ENGINE_WAYS.swap: exactly(2.0)}, 0)
    assert agreement([none], [simulated], ENGINE_WAYS).cells == []


def test_every_way_of_swapping_is_compared_with_recomputing() -> None:
    curves = {
        ENGINE_WAYS.recompute: exactly(2.0),
        ENGINE_WAYS.swap: exactly(1.0),
        OUR_SWAP.name: exactly(3.0),
        AUTO.name: exactly(0.5),
    }
    other = curves | {OUR_SWAP.name: exactly(1.0)}
    agreed = agreement([figure_of_engine(curves)], [figure_of_engine(other)], ENGINE_WAYS)
    assert (agreed.same_winner, agreed.num_compared) == (1, 2)


def test_one_core_is_left_again() -> None:
    if not hasattr(os, "sched_setaffinity"):
        return
    before = os.sched_getaffinity(0)
    with on_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
