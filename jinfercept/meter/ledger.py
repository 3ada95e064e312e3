"""What steps took and what device memory they wasted: the one account behind reports and metrics.

Waste is device memory that is held without use, times the seconds for which it is held, in token·seconds. Whole pages count,
as the pool has them. A step's seconds divide into three: it waits for transfers, it is longer for recomputation, and the rest.

    preserve   pages of paused contexts, at all times, between steps too
    stall      pages of running contexts, while a step waits for its transfers
    recompute  pages of running contexts, while a step is longer for recomputation; in the rest of that step, pages of the
               contexts that are recomputed
    fetch      in the rest of a step, pages of running contexts that have no token in it and lack more than one: what they
               wait for is on its way from the host

So no second of a page is counted twice, unless several contexts share the page. No clock sees why a step took its time: the
seconds of waiting and of recomputation are the profile's price of the plan, at most what the step took.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

from jinfercept.kv.manager import KVManager
from jinfercept.meter.prices import Prices
from jinfercept.sched.plan import StepResult
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.sequence import Sequence


class StepSeconds(NamedTuple):
    """The seconds of one step.

    Attributes:
        total_s: measured, without the seconds in which the step before it still ran.
        stall_s: of these, waiting for transfers.
        recompute_s: of these, by which recomputation made the step longer.
    """

    total_s: float
    stall_s: float
    recompute_s: float

    @property
    def rest_s(self) -> float:
        """Seconds without waiting and without recomputation."""
        return self.total_s - self.stall_s - self.recompute_s


@final
class StepTimer:
    """Divides the seconds of an engine's steps, which are given in order.

    Args:
        now: seconds of the engine's clock.
    """

    def __init__(self, prices: Prices, now: float) -> None:
        self._prices, self._last_s = prices, now

    def divide(self, planned: PlannedStep, result: StepResult, now: float) -> StepSeconds:
        """The seconds of a step whose result arrives now."""
        total_s = min(result.elapsed_s, now - self._last_s)  # steps overlap when the next is planned before one is read
        self._last_s = now
        plan = planned.plan
        stall_s = min(total_s, self._prices(plan).stall_s) if plan.offload or plan.fetch else 0.0
        recompute_s = min(total_s - stall_s, self._prices.recompute_s(planned)) if planned.recomputed_tokens else 0.0
        return StepSeconds(total_s, stall_s, recompute_s)


@dataclass(slots=True)
class WasteTotals:
    """Waste by its cause, in token·seconds; the module says what each is."""

    preserve: float = 0.0
    recompute: float = 0.0
    stall: float = 0.0
    fetch: float = 0.0


@final
class Ledger:
    """Adds up what an engine's steps waste.

    Args:
        kv: the engine's pages.
        running: its running sequences, as they are at any time.
        now: seconds of its clock.

    Attributes:
        waste: until the last step or settlement.
    """

    def __init__(self, kv: KVManager, prices: Prices, running: Iterable[Sequence], now: float) -> None:
        self.waste = WasteTotals()
        self._kv, self._running = kv, running
        self._timer = StepTimer(prices, now)
        self._settled_s, self._num_paused = now, kv.num_paused

    def step(self, planned: PlannedStep, result: StepResult, now: float) -> StepSeconds:
        """Add a step whose result arrives now; returns its seconds."""
        seconds = self._timer.divide(planned, result, now)
        waste, size = self.waste, self._kv.page_size
        moved_s = max(self._settled_s, now - seconds.total_s)  # when its plan moved pages
        waste.preserve += self._num_paused * size * (moved_s - self._settled_s)
        self._settled_s = moved_s
        self.settle(now)
        if seconds.stall_s or seconds.recompute_s:
            used = self._kv.occupancy().used * size
            waste.stall += used * seconds.stall_s
            waste.recompute += used * seconds.recompute_s
        if planned.recomputing:
            waste.recompute += _num_pages(planned.recomputing) * size * seconds.rest_s
        if awaits := [
            waiting for waiting in self._running if not waiting.planned and waiting.context.ready < waiting.length - 1
        ]:
            waste.fetch += _num_pages(awaits) * size * seconds.rest_s
        return seconds

    def settle(self, now: float) -> None:
        """Add what paused contexts have held since the last settlement.

        Call it after every iteration of the engine, with or without a step, and before reading. Pages that the iteration's plan
        has dropped are not paused any more, and contexts that its tokens have paused are so from now on.
        """
        self._num_paused = num_paused = self._kv.num_paused
        self.waste.preserve += num_paused * self._kv.page_size * (now - self._settled_s)
        self._settled_s = now


def _num_pages(sequences: Iterable[Sequence]) -> int:
    return sum([sequence.context.num_pages for sequence in sequences])
