"""Estimators whose estimates are wrong by a factor, to study how much a policy depends on them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import ClassVar, final

from jinfercept.sched.estimator import Estimator
from jinfercept.sched.sequence import PendingCall
from jinfercept.sim.simulation import OracleEstimator
from jinfercept.sim.workload import MIXED_WEIGHTS

Factor = Callable[[PendingCall], float]
"""The factor of a call's duration, above 0."""


@final
class ScaledEstimator(Estimator):
    """Estimates durations as `factor` times those of another estimator at the start of the call.

    A call that outlasts its estimate is expected to return at once, for as long as it lasts.
    """

    def __init__(self, estimator: Estimator, factor: Factor) -> None:
        self._estimator, self._factor = estimator, factor

    def started(self, call: PendingCall, at_s: float) -> None:
        self._estimator.started(call, at_s)

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        self._estimator.observe(call, duration_s, clean)

    def duration_s(self, call: PendingCall, age_s: float) -> float:
        return max(age_s, self._factor(call) * self._estimator.duration_s(call, 0.0))

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return self.duration_s(call, age_s) - age_s

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        factor = self._factor(call)
        return self._estimator.survival(call, age_s / factor, horizon_s / factor)

    def hold_until_s(self, call: PendingCall, hold_cost_per_s: float, leave_cost: float) -> float:
        """τ of the other estimator, on a clock that runs `factor` times as fast."""
        factor = self._factor(call)
        return factor * self._estimator.hold_until_s(call, factor * hold_cost_per_s, leave_cost)


@dataclass(frozen=True)
class WrongOracle:
    """Makes oracles that are wrong by a factor.

    Attributes:
        factor: of durations; None: between 0.1 and 10, drawn for every call.
        tool: the one whose calls are wrong; None: all.
        draw: number of a draw of a factor for every tool, instead of `factor`.
    """

    factor: float | None = None
    tool: str | None = None
    draw: int | None = None
    reads_durations: ClassVar[bool] = True

    def __call__(self) -> Estimator:
        return ScaledEstimator(OracleEstimator(), self._factor)

    def _factor(self, call: PendingCall) -> float:
        if self.tool is not None and call.name != self.tool:
            return 1.0
        if self.factor is not None:
            return self.factor
        seed = repr(call.key) if self.draw is None else f"{self.draw} {call.name}"
        return 10 ** Random(seed).uniform(-1.0, 1.0)


def one_tool_wrong(tool: str, factor: float) -> str:
    """The name of the oracle in `WRONG_ORACLES` that is wrong about one tool by a factor of 0.1 or 10."""
    return f"oracle_{tool}_x{factor:g}"


WILD_TOOLS = tuple(f"oracle_wild_tools_{number}" for number in range(4))
WRONG_ORACLES: Mapping[str, WrongOracle] = {
    **{f"oracle_x{factor:g}": WrongOracle(factor) for factor in (0.1, 0.3, 3.0, 10.0)},
    "oracle_wild": WrongOracle(),
    **{one_tool_wrong(tool, factor): WrongOracle(factor, tool) for tool in MIXED_WEIGHTS for factor in (0.1, 10.0)},
    **{name: WrongOracle(draw=number) for number, name in enumerate(WILD_TOOLS)},
}
"""Oracles by their names in tables. A constant factor leaves the order of what is expected back; `oracle_wild` does not.
Some are wrong about one of InferCept's kinds of calls only, and `WILD_TOOLS` about each tool by a factor of its own."""
