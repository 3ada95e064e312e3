"""Overflow on the real engine: the simulator's plans, the same tokens, and nothing compiled inside the clock."""

import os
import time
from collections.abc import Iterable, Iterator

import pytest

from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sim.reports import Range
from studies.overflow.batch_run import (
    AUTO,
    OUR_RECOMPUTE,
    OUR_SWAP,
    OUR_SWAP_BY_PAGE,
    OUR_SWAP_PAGEABLE,
    BatchRequest,
    Overflow,
    OverflowMode,
    at_once,
    shared,
)
from studies.overflow.checks import Ways
from studies.overflow.command import measured_report
from studies.overflow.figures import OverflowFigure, OverflowPoint
from studies.overflow.real_engine import MODES, QUICK_EFFORT, SIZES, OverflowEngine, on_one_core
from studies.overflow.report import agreement, markdown
from tests.support.tiny_model import GOLDEN

TINY = SIZES._replace(
    page_sizes=(4,),
    evicted=(24,),
    lengths=(24,),
    batch=at_once(6, 18, 6, page_size=4),
    shares=(0.5,),
    seeds=1,
    repeats=1,
)
WAYS = Ways(OUR_RECOMPUTE.name, OUR_SWAP_BY_PAGE.name)


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


def figure(overheads: dict[str, list[Range]], preemptions: int = 1) -> OverflowFigure:
    points = [
        OverflowPoint(x, mode, spread, SchedulerCounters(preemptions=preemptions))
        for mode, spreads in overheads.items()
        for x, spread in enumerate(spreads)
    ]
    return OverflowFigure(5, "a title", "an axis", points)


def exactly(*seconds: float) -> list[Range]:
    return [Range(value, value, value) for value in seconds]


def test_agreement_counts_winners_and_near_overheads_and_leaves_out_what_is_not_decided() -> None:
    measured = figure({WAYS.recompute: exactly(1.0, 2.0), WAYS.swap: exactly(2.0, 1.0)})
    simulated = figure({WAYS.recompute: exactly(1.2, 2.0), WAYS.swap: exactly(2.0, 3.0)})
    agreed = agreement([measured], [simulated], WAYS)
    assert (agreed.same_winner, agreed.num_compared, agreed.num_undecided) == (1, 2, 0)
    assert (agreed.num_near, len(agreed.resolved)) == (3, 4)
    assert str(agreed).startswith("FAIL: the same winner in 1 of 2 comparisons")
    noisy = figure({WAYS.recompute: [Range(1.0, 0.5, 2.0)], WAYS.swap: [Range(1.2, 0.8, 1.5)]})
    undecided = agreement([noisy], [simulated], WAYS)
    assert undecided[1:] == (0, 0, 1)
    assert undecided.resolved == []
    assert "FAIL: overheads within 25% in 0 of 0 cells, beside 2" in str(undecided)
    none = figure({WAYS.recompute: exactly(1.0), WAYS.swap: exactly(2.0)}, 0)
    assert agreement([none], [simulated], WAYS).cells == []


def test_every_way_of_swapping_is_compared_with_recomputing() -> None:
    curves = {
        WAYS.recompute: exactly(2.0),
        WAYS.swap: exactly(1.0),
        OUR_SWAP.name: exactly(3.0),
        AUTO.name: exactly(0.5),
    }
    other = curves | {OUR_SWAP.name: exactly(1.0)}
    agreed = agreement([figure(curves)], [figure(other)], WAYS)
    assert (agreed.same_winner, agreed.num_compared) == (1, 2)


def test_one_core_is_left_again() -> None:
    if not hasattr(os, "sched_setaffinity"):
        return
    before = os.sched_getaffinity(0)
    with on_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
