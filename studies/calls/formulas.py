"""How long a request with calls takes when it is alone, by the formulas of AsyncLM (arXiv 2412.07017), generalised to rounds.

With `G` the seconds in which a call is written and `E` those in which its tool works, the calls of a round last

    sync      ΣG + ΣE
    parallel  ΣG + max E
    async     max_i(Σ_{j≤i} G_j + E_i), and at least ΣG

where prose counts to the `G` of what follows it, the trap included. Rounds depend on each other: their seconds add up, those
of the prompt and of the answer too. Reading results is not in the formulas.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

from jinfercept.calls import CallMode
from jinfercept.sched.cost import CostModel
from studies.calls.scripts import CallScript, WrittenRound

Written = Callable[[int], float]
"""Seconds from a request's arrival until it has generated so many tokens, if it never waits and reads no result."""


def formula_s(script: CallScript, written: Written) -> float:
    """Seconds from a request's arrival to its last token."""
    return formula_of_s(script.calls, script.written_rounds(), script.generated, written)


def formula_of_s(mode: CallMode, rounds: Iterable[WrittenRound], generated: int, written: Written) -> float:
    """Seconds from a request's arrival to its last token, in any vocabulary.

    Args:
        mode: when its calls run.
        rounds: where its calls and traps stand.
        generated: number of its tokens.
        written: when they are written.
    """
    return written(generated) + sum(_waited_s(mode, written_round, written) for written_round in rounds)


def _waited_s(mode: CallMode, written_round: WrittenRound, written: Written) -> float:
    """Seconds in which the request waits for the calls of a round."""
    if mode == "sync":
        return sum(seconds for _, seconds in written_round.calls)
    if mode == "parallel":
        return max((seconds for _, seconds in written_round.calls), default=0.0)
    last_s = max((written(end) + seconds for end, seconds in written_round.calls), default=0.0)
    return max(0.0, last_s - written(written_round.trap))


def priced(script: CallScript, cost: CostModel) -> Written:
    """`Written` for a request alone, by the prices of its steps: one for the whole prompt, then one for each token."""
    steps = (cost.step_s(1, script.prompt + number) for number in range(1, script.generated))
    ends = list(accumulate(steps, initial=cost.step_s(script.prompt, script.prompt)))
    return lambda num_tokens: ends[num_tokens - 1] if num_tokens else 0.0
