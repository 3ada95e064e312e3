"""The waste that InferCept's equations predict for a paused context."""

import math
from typing import NamedTuple, final

from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.sequence import State
from jinfercept.sched.waste import Waste, chunk_tokens, chunked_discard_waste, preserve_waste, swap_waste


class DecisionCase(NamedTuple):
    """The inputs of a decision.

    Attributes:
        at_s: seconds of the engine's clock.
        state: the sequence's.
        remaining_s: predicted seconds until the return; None for a context that waits to run: (2) does not apply.
        context: C, tokens on the device that no other context shares.
        others: C_other, context tokens of the running sequences.
        chunk: tokens that a recomputation computes in one step.
        state_tokens: tokens that take as much memory as the context's state of recurrent layers.
    """

    at_s: float
    state: State
    remaining_s: float | None
    context: int
    others: int
    chunk: int
    state_tokens: int = 0


@final
class WasteEquations:
    """The waste equations of `sched.waste` for one machine.

    Args:
        inputs: cost model, saturation point and page size.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._inputs = inputs

    def chunk(self, running_queries: int) -> int:
        """Tokens that a step recomputes beside the query tokens of the running sequences."""
        return chunk_tokens(self._inputs.saturation, running_queries, self._inputs.page_size)

    def waste(self, case: DecisionCase) -> Waste:
        """Equations (2), (4) and (3) for the tokens on the device; (2) is NaN without a predicted return."""
        rest_s = math.nan if case.remaining_s is None else case.remaining_s
        return Waste(
            preserve_waste(rest_s, case.context + case.state_tokens),
            chunked_discard_waste(case.context, case.others, case.chunk, self._inputs.forward_s, case.state_tokens),
            swap_waste(case.context, case.others, self._inputs.cost.swap_s),
        )
