"""What a step costs in seconds, as the scheduler believes it. Numbers come from a profile; nothing here measures."""

from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """Prices a step before it runs."""

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        """Seconds of a step with so many query tokens whose rows read so many context tokens."""
        ...

    def link_tokens(self, seconds: float) -> int:
        """Tokens of KV that the host link moves one way in so many seconds."""
        ...


@dataclass(frozen=True, slots=True)
class AffineCost:
    """`step_s = fixed_s + per_query_s · query tokens + per_context_s · context tokens`; a link of constant speed.

    The defaults are the constants of the InferCept authors' code for GPT-J-6B on one A100 (27.8 ms and 605.5 link tokens
    for a saturated iteration of 384 query tokens), with context reading free as there.
    """

    fixed_s: float = 0.010
    per_query_s: float = 0.0463e-3
    per_context_s: float = 0.0
    link_tokens_per_s: float = 605.5 / 0.0278

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        return self.fixed_s + self.per_query_s * query_tokens + self.per_context_s * context_tokens

    def link_tokens(self, seconds: float) -> int:
        return int(self.link_tokens_per_s * seconds)
