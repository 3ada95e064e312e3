"""One paused context at a time: what holding it by a rule costs, over what it costs to know how long the call will last.

No engine, no other contexts but a constant number of others' tokens, no host link: a second of holding costs the context,
leaving costs one recomputation (equation (1)). Everything is in token·seconds.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from jinfercept.sched.estimator import ElapsedEstimator, Estimator, HistoryEstimator
from jinfercept.sched.sequence import PendingCall
from jinfercept.sched.waste import discard_waste


class ToolDurations(NamedTuple):
    """Calls of one tool: mean and standard deviation of their seconds, and the context tokens that wait."""

    mean_s: float
    deviation_s: float
    context: int


TABLE_1: Mapping[str, ToolDurations] = {
    "math": ToolDurations(9e-5, 6e-5, 1422),
    "qa": ToolDurations(0.69, 0.17, 1846),
    "ve": ToolDurations(0.09, 0.014, 2185),
    "chat": ToolDurations(28.6, 15.6, 753),
    "image": ToolDurations(20.03, 7.8, 1247),
    "tts": ToolDurations(17.24, 7.6, 1251),
}
"""Table 1 of the InferCept paper (arXiv 2402.01869)."""

OTHERS = 36_700
"""Context tokens of the other requests: with them, leaving costs as much as holding for about 1.75 s (paper's constants)."""

Hold = Callable[[Estimator, PendingCall, float, float], float]
"""τ from an estimator, a call of the tool, the cost of a second and the cost of leaving."""


class Rule(NamedTuple):
    """A way to decide how long to hold, and how many calls of each tool its estimator has seen before."""

    name: str
    make: Callable[[], Estimator]
    hold: Hold
    num_calls: int = 0


def by_estimator(estimator: Estimator, call: PendingCall, hold_cost_per_s: float, leave_cost: float) -> float:
    """Hold as long as the estimator says."""
    return estimator.hold_until_s(call, hold_cost_per_s, leave_cost)


RULES = (
    Rule("always preserve", ElapsedEstimator, lambda *_: float("inf")),
    Rule("always discard", ElapsedEstimator, lambda *_: 0.0),
    Rule("elapsed", ElapsedEstimator, by_estimator),
    Rule("history, 3 calls seen", HistoryEstimator, by_estimator, 3),
    Rule("history, 20 calls seen", HistoryEstimator, by_estimator, 20),
)


def held_cost(tau_s: float, duration_s: float, hold_cost_per_s: float, leave_cost: float) -> float:
    """Cost of holding until τ and leaving then, if the call has not returned."""
    return hold_cost_per_s * min(duration_s, tau_s) + (leave_cost if duration_s > tau_s else 0.0)


def cost_over_optimum(rule: Rule, forward_s: Callable[[int], float], rounds: int = 400) -> float:
    """Cost of a rule on Table 1's tools, each as likely, over the cost of knowing.

    Durations are Gamma distributed. Every round begins with a fresh estimator.

    Args:
        forward_s: T_fwd, seconds of an iteration by query tokens.
        rounds: calls of each tool that are counted; the same ones for every rule.
    """
    past, future = Random(0), Random(1)
    cost = optimum = 0.0
    for _ in range(rounds):
        estimator = rule.make()
        for name, tool in TABLE_1.items():
            for _ in range(rule.num_calls):
                estimator.observe(PendingCall(name), _draw(tool, past))
        for name, tool in TABLE_1.items():
            leave_cost = discard_waste(tool.context, OTHERS, forward_s)
            duration_s = _draw(tool, future)
            tau_s = rule.hold(estimator, PendingCall(name), tool.context, leave_cost)
            cost += held_cost(tau_s, duration_s, tool.context, leave_cost)
            optimum += min(tool.context * duration_s, leave_cost)
    return cost / optimum


def _draw(tool: ToolDurations, rng: Random) -> float:
    shape = (tool.mean_s / tool.deviation_s) ** 2
    return rng.gammavariate(shape, tool.mean_s / shape)
