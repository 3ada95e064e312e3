"""How long a request with calls takes when it is alone, by the formulas of AsyncLM (arXiv 2412.07017), generalised to rounds.

With `G` the seconds in which a call is written and `E` those in which its tool works, the calls of a round last

    sync      ΣG + ΣE
    parallel  ΣG + max E
    async     max_i(Σ_{j≤i} G_j + E_i), and at least ΣG

where prose counts to the `G` of what follows it, the trap included. Rounds depend on each other: their seconds add up, those
of the prompt and of the answer too. Reading results is not in the formulas.
"""

from collections.abc import Callable
from itertools import accumulate

from jinfercept.sched.cost import CostModel
from jinfercept.sim.call_scripts import CallScript, WrittenRound

Written = Callable[[int], float]
"""Seconds from a request's arrival until it has generated so many tokens, if it never waits and reads no result."""


def formula_s(script: CallScript, written: Written) -> float:
    """Seconds from the request's arrival to its last token."""
    return written(script.generated) + sum(_waited_s(script, one, written) for one in script.ends())


def _waited_s(script: CallScript, one: WrittenRound, written: Written) -> float:
    """Seconds in which the request waits for the calls of a round."""
    if script.calls == "sync":
        return sum(call.seconds for _, call in one.calls)
    if script.calls == "parallel":
        return max(call.seconds for _, call in one.calls)
    last_s = max(written(end) + call.seconds for end, call in one.calls)
    return max(0.0, last_s - written(one.trap))


def priced(script: CallScript, cost: CostModel) -> Written:
    """`Written` for a request alone, by the prices of its steps: one for the whole prompt, then one for each token."""
    steps = (cost.step_s(1, script.prompt + number) for number in range(1, script.generated))
    ends = list(accumulate(steps, initial=cost.step_s(script.prompt, script.prompt)))
    return lambda num_tokens: ends[num_tokens - 1] if num_tokens else 0.0
