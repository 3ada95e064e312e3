"""What steps took and what device memory they wasted: the one account behind reports and metrics.

Waste is device memory that is held without use, times the seconds for which it is held, in token·seconds. Whole pages count. A
step's seconds divide into three: it waits for transfers, it is longer for recomputation, and the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

from jinfercept.kv.manager import KVManager
from jinfercept.sched.plan import StepPlan, StepResult
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.profile import CostModel
from jinfercept.sched.sequence import Sequence


class Price(NamedTuple):
    """Seconds of a plan: its compute, and the transfers that its compute does not hide."""

    compute_s: float
    stall_s: float


@final
class Prices:
    """Prices plans under a cost model.

    Args:
        page_size: tokens that a copied page carries, empty places included.
        synchronous: compute hides no transfer; every step waits for its own.
        free_transfers: transfers cost nothing (a bound, for simulations).
    """

    def __init__(self, cost: CostModel, page_size: int, *, synchronous: bool, free_transfers: bool = False) -> None:
        self._cost = cost
        self._page_size = page_size
        self._free_transfers = free_transfers
        self._page_s = 0.0 if free_transfers else cost.swap_s(page_size) - cost.copies_s(page_size)
        self._synchronous = synchronous
        self._priced: tuple[StepPlan | None, Price] = None, Price(0.0, 0.0)

    def __call__(self, plan: StepPlan) -> Price:
        if plan is not self._priced[0]:  # the runner, the ledger and the report price one plan after another
            compute_s = self._cost.plan_s(plan) if plan.chunks else 0.0
            self._priced = plan, Price(compute_s, self._stall_s(plan, compute_s))
        return self._priced[1]

    def recompute_s(self, planned: PlannedStep) -> float:
        """Seconds by which recomputed tokens lengthen the plan's compute."""
        plan, recomputed = planned.plan, planned.recomputed_tokens
        query_tokens = plan.num_tokens
        if recomputed == query_tokens:
            # without other query tokens there would be no step: all of its compute counts
            return self(plan).compute_s
        return self._cost.step_s(query_tokens, 0) - self._cost.step_s(query_tokens - recomputed, 0)

    def _stall_s(self, plan: StepPlan, compute_s: float) -> float:
        moved = len(plan.offload) + len(plan.fetch)
        link_s = moved * self._page_s + self._copies_s(plan) if moved and not self._free_transfers else 0.0
        return link_s if self._synchronous else max(0.0, link_s - compute_s)

    def _copies_s(self, plan: StepPlan) -> float:
        # beside the seconds of their bytes; no copy carries pages of both directions
        return sum(self._cost.copies_s(self._page_size * len(pages)) for pages in (plan.offload, plan.fetch))


class StepSeconds(NamedTuple):
    """The seconds of one step."""

    total_s: float  # measured, without the seconds in which the step before it still ran
    stall_s: float  # of these, waiting for transfers
    recompute_s: float  # of these, by which recomputation made the step longer

    @property
    def rest_s(self) -> float:
        return self.total_s - self.stall_s - self.recompute_s


@final
class StepTimer:
    """Divides the seconds of an engine's steps, which come in order."""

    def __init__(self, prices: Prices, now: float) -> None:
        self._prices, self._last_s = prices, now

    def divide(self, planned: PlannedStep, result: StepResult, now: float) -> StepSeconds:
        """The seconds of a step whose result arrives now."""
        total_s = min(result.elapsed_s, now - self._last_s)  # steps overlap when the next is planned before one is read
        self._last_s = now
        # no clock sees why a step took its time: these are the profile's prices of the plan, at most what the step took
        plan = planned.plan
        stall_s = min(total_s, self._prices(plan).stall_s) if plan.offload or plan.fetch else 0.0
        recompute_s = min(total_s - stall_s, self._prices.recompute_s(planned)) if planned.recomputed_tokens else 0.0
        return StepSeconds(total_s, stall_s, recompute_s)


@dataclass(slots=True)
class WasteTotals:
    """Waste by its cause, in token·seconds. No second of a page counts twice, unless several contexts share the page."""

    preserve: float = 0.0  # pages of paused contexts, at all times, between steps too
    # Pages of running contexts, while a step is longer for recomputation; in the rest of that step, pages of the
    # contexts that are recomputed.
    recompute: float = 0.0
    stall: float = 0.0  # pages of running contexts, while a step waits for its transfers
    # In the rest of a step, pages of running contexts that have no token in it and lack more than one: what they wait
    # for is on its way from the host.
    fetch: float = 0.0


@final
class Ledger:
    """Adds up what an engine's steps waste. `running` is a live view of its running sequences."""

    def __init__(self, kv: KVManager, prices: Prices, running: Iterable[Sequence], now: float) -> None:
        self.waste = WasteTotals()  # until the last step or settlement
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
        """Add what paused contexts waste since the last settlement. Call it after every iteration, and before reading."""
        # pages that the iteration's plan dropped count no more; contexts that its tokens paused count from now on
        self._num_paused = num_paused = self._kv.num_paused
        self.waste.preserve += num_paused * self._kv.page_size * (now - self._settled_s)
        self._settled_s = now


def _num_pages(sequences: Iterable[Sequence]) -> int:
    return sum([sequence.context.num_pages for sequence in sequences])
