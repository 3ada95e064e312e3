"""The waste equations against what happened: records of runs in which a policy does only what one equation prices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from jinfercept.sched.policy import Action
from jinfercept.sched.profile import Profile
from jinfercept.sched.waste import Waste, discard_waste
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import RunWatch
from jinfercept.sim.sweep import SweepRun
from studies.pause_records import KEEP, DecisionCase, PauseRecord, PauseRecords


class Equation(NamedTuple):
    """An equation of InferCept, and the policy that does what it prices to every intercepted context.

    Attributes:
        number: in the paper.
        what: it does.
        policy: its name.
        actions: that do this.
    """

    number: int
    what: str
    policy: str
    actions: tuple[str, ...]


_DROPS, _SWAPS, _KEEPS = (Action.DROP.value, Action.LOSE.value), (Action.SWAP.value,), (KEEP,)

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


def check_equation(equation: Equation, records: Iterable[PauseRecord], profile: Profile) -> list[EquationCheck]:
    """The interceptions of a run that returned and were treated as the equation prices.

    Args:
        equation: of the run's policy.
        profile: of the run.
    """
    equation_checks = list[EquationCheck]()
    for record in records:
        decided = next((record.decided[action] for action in record.decided if action in equation.actions), None)
        if record.returned and equation.number == 5:
            equation_checks.append(EquationCheck(record.predicted_token_s, record.cost.token_s))
        elif record.returned and decided is not None:
            equation_checks.append(EquationCheck(_predicted(equation, *decided, profile), record.cost.token_s))
    return equation_checks


def _predicted(equation: Equation, case: DecisionCase, waste: Waste, profile: Profile) -> float:
    if equation.number == 1:
        return discard_waste(case.context, case.others, lambda tokens: profile.step_s(tokens, 0))
    return {2: waste.preserve, 3: waste.swap, 4: waste.discard}[equation.number]


CHECKS = "equation_checks"


@dataclass(frozen=True)
class RecordedRun(SweepRun):
    """A run whose report has the checks of an equation as `CHECKS`."""

    equation: Equation

    def play(self, progress: Callable[[float], None] = lambda done: None, watch: RunWatch | None = None) -> Report:
        records = list[PauseRecords]()
        report = super().play(
            progress, lambda log, _, inputs, stalls: records.append(PauseRecords(log, inputs, stalls))
        )
        for of_run in records:
            of_run.close()
            report[CHECKS] = check_equation(self.equation, of_run.ended, self.simulation.profile)
        return report


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
