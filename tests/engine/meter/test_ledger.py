"""How the seconds of a step divide, and what they waste, in numbers that can be worked out by hand."""

import pytest

from jinfercept.engine.meter.ledger import Ledger, Prices, StepSeconds, StepTimer
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import PageCopy
from jinfercept.sched.plan import Chunk, StepPlan, StepResult
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.sequence import PendingCall, Sequence
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SIZE, CopyEverything, SchedulerBench

COST = AffineCost(fixed_s=1.0, per_query_s=0.125, link_tokens_per_s=4.0)
COPY = PageCopy(1, 1)  # a second of the link


def planned(query_tokens: int, recomputed: int = 0, copies: int = 0) -> PlannedStep:
    chunks = (Chunk(0, 0, (1,) * query_tokens, (), None),) if query_tokens else ()
    return PlannedStep(StepPlan(0, query_tokens, chunks, offload=(COPY,) * copies), (), (), recomputed)


def divide(step: PlannedStep, elapsed_s: float, *, synchronous: bool = False, since_s: float = 100.0) -> StepSeconds:
    timer = StepTimer(Prices(COST, SIZE, synchronous=synchronous), 0.0)
    return timer.divide(step, StepResult((), elapsed_s), since_s)


def test_a_step_waits_for_what_its_compute_does_not_hide_or_for_all_of_its_transfers() -> None:
    step = planned(8, copies=3)
    assert divide(step, 5.0) == (5.0, 1.0, 0.0)
    assert divide(step, 5.0, synchronous=True) == (5.0, 3.0, 0.0)
    assert divide(planned(0, copies=3), 5.0) == (5.0, 3.0, 0.0)


def test_recomputation_is_the_growth_of_a_step_over_one_without_it_and_all_of_a_step_that_has_nothing_else() -> None:
    assert divide(planned(9, recomputed=8), 5.0) == (5.0, 0.0, 1.0)
    assert divide(planned(8, recomputed=8), 5.0) == (5.0, 0.0, 2.0)


def test_the_parts_of_a_step_are_no_longer_than_the_step_nor_than_the_time_since_the_last_one() -> None:
    step = planned(8, recomputed=8, copies=4)
    assert divide(step, 0.5, synchronous=True) == (0.5, 0.5, 0.0)
    assert divide(step, 5.0, synchronous=True) == (5.0, 4.0, 1.0)
    assert divide(step, 5.0, synchronous=True, since_s=3.0) == (3.0, 3.0, 0.0)
    assert divide(step, 5.0, synchronous=True).rest_s == 0.0


def test_paused_contexts_hold_their_pages_until_the_plan_that_drops_them_in_idle_seconds_too() -> None:
    desk = SchedulerBench(CopyEverything())
    ledger = Ledger(desk.kv, Prices(COST, SIZE, synchronous=False), desk.scheduler.running, 0.0)
    sequence = desk.prefilled("one", 11)  # three pages
    desk.scheduler.intercept(sequence, 1.0, (PendingCall("tool", "one"),))
    ledger.settle(0.0)
    desk.kv.drop(sequence.context, range(1, 3), device=True, host=False)
    ledger.step(planned(1), StepResult((), 2.0), 7.0)  # five idle seconds, then a step on one page
    assert ledger.waste.preserve == pytest.approx((3 * 5.0 + 1 * 2.0) * SIZE)
    ledger.settle(8.0)
    assert ledger.waste.preserve == pytest.approx((3 * 5.0 + 1 * 3.0) * SIZE)


def test_no_second_of_a_page_is_counted_twice() -> None:
    kv = KVManager(10, 10, SIZE)
    sequences = [Sequence(name, [len(name)] * 7, kv.open(name), max_tokens=9) for name in ("recomputed", "waits")]
    for sequence in sequences:
        kv.hold(sequence.context)
        kv.place(sequence.context, 0, 2 * SIZE)
    sequences[0].planned = True
    ledger = Ledger(kv, Prices(COST, SIZE, synchronous=True), sequences, 0.0)
    step = planned(9, recomputed=8, copies=2)
    ledger.step(PlannedStep(step.plan, (), (sequences[0],), 8), StepResult((), 5.0), 5.0)
    waste, pages = ledger.waste, 2 * SIZE
    assert (waste.stall, waste.recompute, waste.fetch) == (2 * pages * 2.0, 2 * pages * 1.0 + pages * 2.0, pages * 2.0)
    assert waste.stall + waste.recompute + waste.fetch == 2 * pages * 5.0
