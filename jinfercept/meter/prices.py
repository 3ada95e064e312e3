"""What a plan costs in seconds by the machine's profile: its compute, the transfers that it waits for, its recomputation."""

from typing import NamedTuple, final

from jinfercept.sched.cost import CostModel
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.plan_builder import PlannedStep


class Price(NamedTuple):
    """Seconds of a plan: its compute, and the transfers that its compute does not hide."""

    compute_s: float
    stall_s: float


@final
class Prices:
    """Prices plans under a cost model.

    Args:
        cost: seconds of compute and of transfers.
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
        """Seconds by which recomputed tokens lengthen the plan's compute.

        The growth `T_fwd(n) - T_fwd(n - recomputed)` over a step that computes only the other query tokens. Without other query
        tokens there would be no step: all of its compute counts.
        """
        plan, recomputed = planned.plan, planned.recomputed_tokens
        query_tokens = plan.num_tokens
        if recomputed == query_tokens:
            return self(plan).compute_s
        return self._cost.step_s(query_tokens, 0) - self._cost.step_s(query_tokens - recomputed, 0)

    def _stall_s(self, plan: StepPlan, compute_s: float) -> float:
        moved = len(plan.offload) + len(plan.fetch)
        link_s = moved * self._page_s + self._copies_s(plan) if moved and not self._free_transfers else 0.0
        return link_s if self._synchronous else max(0.0, link_s - compute_s)

    def _copies_s(self, plan: StepPlan) -> float:
        """Seconds of the plan's copies beside those of their bytes: no copy carries pages of both directions."""
        return sum(self._cost.copies_s(self._page_size * len(pages)) for pages in (plan.offload, plan.fetch))
