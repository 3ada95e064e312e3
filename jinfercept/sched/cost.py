"""The scheduler's estimate of a step's seconds; `sched.profile.Profile` is one."""

from typing import Protocol

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
