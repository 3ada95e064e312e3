"""The scheduler's estimate of a step's seconds, of which `sched.profile.Profile` is one, and what the link moves meanwhile."""

from bisect import bisect_left
from typing import NamedTuple, Protocol

from jinfercept.sched.plan import StepPlan


class CostModel(Protocol):
    """Prices a step before it runs."""

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        """Seconds of a step with so many query tokens whose rows read so many context tokens."""
        ...

    def link_tokens(self, seconds: float) -> int:
        """Tokens of KV that the host link moves one way in so many seconds."""
        ...

    def plan_s(self, plan: StepPlan) -> float:
        """Seconds of a plan's compute."""
        ...

    def swap_s(self, num_tokens: int) -> float:
        """T_swap: seconds to move the KV of so many tokens one way, behind nothing, in copies as large as they get."""
        ...

    def copies_s(self, num_tokens: int) -> float:
        """The part of `swap_s` that grows with the number of copies and not with their bytes."""
        ...

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """T_recompute: seconds of steps that recompute a context of so many tokens, in chunks of at most `chunk_tokens`."""
        ...

    def disk_s(self, num_tokens: int) -> float:
        """T_disk: seconds to read the KV of so many tokens from the disk tier into the host's memory; infinite without one."""
        ...


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
