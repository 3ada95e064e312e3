"""One decision about a paused context, and what the waste equations say of it. Numbers in, numbers out; no clock, no file."""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

from jinfercept.meter.outcome import PauseAccount
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Action
from jinfercept.sched.sequence import State
from jinfercept.sched.waste import Waste, choice, chunk_tokens, chunked_discard_waste, preserve_waste, swap_waste


class DecisionCase(NamedTuple):
    """What a decision was about.

    Attributes:
        at_s: when.
        state: of the sequence.
        remaining_s: expected until the return; None for a context that waits to run, which equation (2) is not about.
        context: C, its own tokens on the device.
        others: C_other, context of the running.
        chunk: tokens that a recomputation is assumed to do in one step.
    """

    at_s: float
    state: State
    remaining_s: float | None
    context: int
    others: int
    chunk: int


@dataclass(slots=True)
class Decision:
    """Moves of one context, of one kind and for one reason, while a plan is drafted; in tokens but for `pages`.

    Attributes:
        freed_clean: left the device and have a host copy.
        freed_dirty: left it and have none.
    """

    pause: PauseAccount
    case: DecisionCase
    action: Action
    why: str
    pages: int = 0
    tokens: int = 0
    copied: int = 0
    freed_clean: int = 0
    freed_dirty: int = 0


@final
class Costs:
    """The waste equations with one machine's numbers.

    Args:
        known: what the policy knows of the machine.
        synchronous: steps wait for transfers.
    """

    def __init__(self, known: PolicyInputs, *, synchronous: bool) -> None:
        self._known, self._synchronous = known, synchronous
        self._link_tokens_per_s = known.cost.link_tokens(1.0)

    def chunk(self, running_queries: int) -> int:
        """Tokens that one step recomputes beside so many query tokens."""
        return chunk_tokens(self._known.saturation, running_queries, self._known.page_size)

    def waste(self, case: DecisionCase) -> Waste:
        """Equations (2), (4) and (3) for all that is on the device; (2) is not a number without an expected return."""
        rest_s = math.nan if case.remaining_s is None else case.remaining_s
        return Waste(
            preserve_waste(rest_s, case.context),
            chunked_discard_waste(case.context, case.others, case.chunk, self._known.forward_s),
            swap_waste(case.context, case.others, self._swap_s),
        )

    def predicted(self, case: DecisionCase, clean: int, dirty: int) -> float:
        """Token·seconds from here on if of the context's tokens so many leave the device with a host copy, so many without.

        Equation (5) for what is still there, since it is decided anew every iteration; (4) for what goes without a copy; for
        what has one (3) if transfers are synchronous, else nothing.
        """
        rest = case._replace(context=case.context - clean - dirty)
        token_s = choice(self.waste(rest)).waste
        if dirty:
            token_s += self.waste(case._replace(context=dirty)).discard
        if clean and self._synchronous:
            token_s += swap_waste(clean, case.others, self._swap_s)
        return token_s

    def growth_s(self, query_tokens: int, recomputed: int) -> float:
        """Seconds by which a step was longer because so many of its query tokens were recomputed."""
        return self._known.forward_s(query_tokens) - self._known.forward_s(query_tokens - recomputed)

    def stall_s(self, plan: StepPlan) -> float:
        """Seconds that a step waits for the link. Priced, not measured: no clock can see what a step waits for."""
        link_s = self._swap_s(self.moved(plan))
        if self._synchronous or not plan.chunks:
            return link_s
        context = sum([chunk.start + len(chunk.tokens) for chunk in plan.chunks])
        return max(0.0, link_s - self._known.cost.step_s(plan.num_tokens, context))

    def moved(self, plan: StepPlan) -> int:
        """Tokens that a plan's transfers carry, empty places of pages included."""
        return (len(plan.offload) + len(plan.fetch)) * self._known.page_size

    def _swap_s(self, num_tokens: int) -> float:
        return num_tokens / self._link_tokens_per_s if self._link_tokens_per_s else math.inf
