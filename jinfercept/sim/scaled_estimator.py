"""Estimators whose estimates are wrong by a factor, to study how much a policy depends on them. For simulations only."""

from collections.abc import Callable
from random import Random
from typing import final

from jinfercept.sched.estimator import Estimator
from jinfercept.sched.sequence import PendingCall
from jinfercept.sim.oracle import OracleEstimator
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


def _wild(seed: str) -> float:
    return 10 ** Random(seed).uniform(-1.0, 1.0)


def _wrong(factor: Factor) -> Callable[[], Estimator]:
    return lambda: ScaledEstimator(OracleEstimator(), factor)


SCALED_ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "oracle_x0.1": _wrong(lambda call: 0.1),
    "oracle_x0.3": _wrong(lambda call: 0.3),
    "oracle_x3": _wrong(lambda call: 3.0),
    "oracle_x10": _wrong(lambda call: 10.0),
    "oracle_wild": _wrong(lambda call: _wild(repr(call.key))),
}
"""The oracle's durations times a constant, or times a factor of each call's own between 0.1 and 10 (`oracle_wild`), by the
name that selects them in a simulation. A constant factor leaves the order of what is expected back; the last does not."""


def one_tool_wrong(tool: str, factor: float) -> str:
    """The name of the oracle in `WRONG_TOOLS` that is wrong about one tool by a factor of 0.1 or 10."""
    return f"oracle_{tool}_x{factor:g}"


def _wrong_tool(tool: str, factor: float) -> Callable[[], Estimator]:
    return _wrong(lambda call: factor if call.name == tool else 1.0)


def _wild_tools(number: int) -> Callable[[], Estimator]:
    return _wrong(lambda call: _wild(f"{number} {call.name}"))


WILD_TOOLS = tuple(f"oracle_wild_tools_{number}" for number in range(4))
WRONG_TOOLS: dict[str, Callable[[], Estimator]] = {
    **{one_tool_wrong(tool, factor): _wrong_tool(tool, factor) for tool in MIXED_WEIGHTS for factor in (0.1, 10.0)},
    **{name: _wild_tools(number) for number, name in enumerate(WILD_TOOLS)},
}
"""The oracle's durations, wrong for one of InferCept's kinds of calls only; and wrong for each tool by a factor of its own
between 0.1 and 10 (`WILD_TOOLS`, four draws of the factors)."""
