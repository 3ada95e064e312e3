"""One decision about a paused context, and what the waste equations say of it. Numbers in, numbers out; no clock, no file."""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

from jinfercept.meter.pause_account import PauseAccount
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
class WasteEquations:
    """The waste equations with one machine's numbers.

    Args:
        known: what the policy knows of the machine.
        synchronous: steps wait for transfers.
    """

    def __init__(self, known: PolicyInputs, *, synchronous: bool) -> None:
        self._known, self._synchronous = known, synchronous

    def chunk(self, running_queries: int) -> int:
        """Tokens that one step recomputes beside so many query tokens."""
        return chunk_tokens(self._known.saturation, running_queries, self._known.page_size)

    def waste(self, case: DecisionCase) -> Waste:
        """Equations (2), (4) and (3) for all that is on the device; (2) is not a number without an expected return."""
        rest_s = math.nan if case.remaining_s is None else case.remaining_s
        return Waste(
            preserve_waste(rest_s, case.context),
            chunked_discard_waste(case.context, case.others, case.chunk, self._known.forward_s),
            swap_waste(case.context, case.others, self._known.cost.swap_s),
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
            token_s += swap_waste(clean, case.others, self._known.cost.swap_s)
        return token_s
