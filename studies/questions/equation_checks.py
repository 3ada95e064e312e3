"""The waste equations against what happened: decision records of runs in which a policy does only what one equation prices."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinfercept.sched.policy import Action
from jinfercept.sched.profile import Profile
from jinfercept.sched.waste import discard_waste

Line = Mapping[str, Any]
"""A decision or an outcome, as `sim.record_lines` writes them."""


class Equation(NamedTuple):
    """An equation of InferCept, and the policy that does what it prices to every intercepted context.

    Attributes:
        number: in the paper.
        what: it does.
        policy: its name.
        actions: of decision records, that do this.
    """

    number: int
    what: str
    policy: str
    actions: tuple[str, ...]


_DROPS, _SWAPS, _KEEPS = (Action.DROP.value, Action.LOSE.value), (Action.SWAP.value,), ("keep",)

EQUATIONS = (
    Equation(1, "drop, recompute at once", "improved_discard", _DROPS),
    Equation(2, "keep", "preserve", _KEEPS),
    Equation(3, "swap, while the batch waits", "swap", _SWAPS),
    Equation(4, "drop, recompute in chunks", "chunked_discard", _DROPS),
    Equation(5, "the least of them", "min_waste", ()),
)
"""(5) is priced at the first decision that drops a page: what min_waste does to the rest it decides anew at every step."""


class EquationCheck(NamedTuple):
    """What an equation predicts for an intercepted context, and what it wasted, in token·seconds.

    Attributes:
        predicted: at the decision; the part of (2) from there on.
        actual: `PauseCost.token_s`.
    """

    predicted: float
    actual: float


def check_equation(equation: Equation, path: Path, profile: Profile) -> list[EquationCheck]:
    """The interceptions of a run's decision records that returned and were treated as the equation prices.

    Args:
        equation: of the run's policy.
        path: of the records.
        profile: of the run.
    """
    first: dict[tuple[str, int], Line] = {}
    equation_checks = list[EquationCheck]()
    for line in _lines(path):
        key = line["request"], line["interception"]
        if line["type"] == "decision":
            if line["action"] in equation.actions and line["state"] == "intercepted":
                first.setdefault(key, line)
        elif line["returned"]:
            if equation.number == 5:
                equation_checks.append(EquationCheck(line["predicted_token_s"], line["actual_token_s"]))
            elif decision := first.pop(key, None):
                equation_checks.append(EquationCheck(_predicted(equation, decision, profile), line["actual_token_s"]))
    return equation_checks


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        next(file)  # the run
        yield from map(json.loads, file)


def _predicted(equation: Equation, decision: Line, profile: Profile) -> float:
    waste, context = decision["waste"], decision["context"]
    values: Mapping[int, Callable[[], float]] = {
        1: lambda: discard_waste(context, decision["others"], lambda tokens: profile.step_s(tokens, 0)),
        2: lambda: waste["preserve"],
        3: lambda: waste["swap"],
        4: lambda: waste["discard"],
    }
    return values[equation.number]()


def ratio_of_sums(checks: Sequence[EquationCheck]) -> float | None:
    """Actual over predicted waste of all interceptions together; None if nothing was predicted."""
    predicted = sum(check.predicted for check in checks)
    return sum(check.actual for check in checks) / predicted if predicted > 0 else None


def ratios(checks: Sequence[EquationCheck]) -> Mapping[str, float | None]:
    """Deciles, median and mean of actual over predicted waste, where something was predicted."""
    ordered = sorted(check.actual / check.predicted for check in checks if check.predicted > 0)
    if not ordered:
        return dict.fromkeys(("p10", "p50", "p90", "mean"))
    last = len(ordered) - 1
    return {f"p{part}": ordered[round(last * part / 100)] for part in (10, 50, 90)} | {"mean": fmean(ordered)}
