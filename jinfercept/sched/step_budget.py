"""The bucket of a step, and the tokens of KV that the host link moves meanwhile. Plans nothing."""

from bisect import bisect_left
from typing import NamedTuple

from jinfercept.sched.cost import CostModel

IDLE_STEP_S = 0.010
"""Length of a step that only transfers: short, so that an arrival interrupts it."""

_UNLIMITED = 1 << 60


class StepBudget(NamedTuple):
    """Sizes of steps and of the transfers that their compute hides.

    Attributes:
        buckets: query tokens of the executables, ascending.
        page_size: tokens of the smallest transfer.
        waits_for_link: the step waits for its transfers, which therefore have no budget.
    """

    cost: CostModel
    buckets: tuple[int, ...]
    page_size: int
    waits_for_link: bool

    def bucket(self, query_tokens: int) -> int:
        """Query tokens of the smallest executable that runs so many; 0 for none."""
        return self.buckets[bisect_left(self.buckets, query_tokens)] if query_tokens else 0

    def link_tokens(self, query_tokens: int, context_tokens: int) -> int:
        """Tokens that the link moves while so many query tokens compute (InferCept §4.1), or in `IDLE_STEP_S` if none do."""
        if self.waits_for_link:
            return _UNLIMITED
        seconds = IDLE_STEP_S
        if query_tokens:
            seconds = self.cost.step_s(self.bucket(query_tokens), context_tokens)
        return max(self.cost.link_tokens(seconds), self.page_size)
