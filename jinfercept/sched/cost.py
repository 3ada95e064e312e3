"""The prices of steps and transfers that the scheduler plans with (`Profile` is one implementation), and the link budget of a
step."""

from bisect import bisect_left
from typing import NamedTuple, Protocol

from jinfercept.sched.plan import StepPlan


class CostModel(Protocol):
    """Prices a step before it runs."""

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        """Seconds of a step whose rows read `context_tokens` tokens of KV."""
        ...

    def link_tokens(self, seconds: float) -> int:
        """Tokens of KV that the host link moves one way in this time."""
        ...

    def plan_s(self, plan: StepPlan) -> float:
        """Seconds of a plan's compute."""
        ...

    def swap_s(self, num_tokens: int) -> float:
        """T_swap: seconds to move the KV of these tokens one way over an idle link, in the largest copies possible."""
        ...

    def copies_s(self, num_tokens: int) -> float:
        """The part of `swap_s` that grows with the number of copies, not with their bytes."""
        ...

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """T_recompute: seconds of the steps that recompute a context, in chunks of at most `chunk_tokens`."""
        ...

    def disk_s(self, num_tokens: int) -> float:
        """T_disk: seconds to read the KV of these tokens from the disk tier into host memory; infinite without a disk tier."""
        ...


IDLE_STEP_S = 0.010
"""Seconds of a step that only transfers: short, so that an arrival interrupts it."""

_UNLIMITED = 1 << 60


class StepBudget(NamedTuple):
    """Sizes of steps, and of the transfers that their compute hides."""

    cost: CostModel
    buckets: tuple[int, ...]  # query tokens of the executables, ascending
    page_size: int  # tokens of the smallest transfer
    waits_for_link: bool  # the step waits for its transfers, which then have no budget

    def bucket(self, query_tokens: int) -> int:
        """Query tokens of the smallest executable that holds these; 0 for none."""
        return self.buckets[bisect_left(self.buckets, query_tokens)] if query_tokens else 0

    def link_tokens(self, query_tokens: int, context_tokens: int) -> int:
        """Tokens that the link moves while these query tokens compute (InferCept §4.1), or in `IDLE_STEP_S` without any."""
        if self.waits_for_link:
            return _UNLIMITED
        seconds = IDLE_STEP_S
        if query_tokens:
            seconds = self.cost.step_s(self.bucket(query_tokens), context_tokens)
        return max(self.cost.link_tokens(seconds), self.page_size)
