"""Estimators whose estimates are wrong by a factor, to study how much a policy depends on them. For simulations only."""

from collections.abc import Callable, Hashable
from random import Random
from typing import final

from jinfercept.sched.estimator import Estimator, OracleEstimator
from jinfercept.sched.sequence import PendingCall

Factor = Callable[[Hashable], float]
"""The factor of a call's duration, above 0, from the call's key."""


@final
class ScaledEstimator:
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
        return max(age_s, self._factor(call.key) * self._estimator.duration_s(call, 0.0))

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return self.duration_s(call, age_s) - age_s

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        factor = self._factor(call.key)
        return self._estimator.survival(call, age_s / factor, horizon_s / factor)

    def hold_until_s(self, call: PendingCall, hold_cost_per_s: float, leave_cost: float) -> float:
        """τ of the other estimator, on a clock that runs `factor` times as fast."""
        factor = self._factor(call.key)
        return factor * self._estimator.hold_until_s(call, factor * hold_cost_per_s, leave_cost)


def _wild(call_key: Hashable) -> float:
    return 10 ** Random(repr(call_key)).uniform(-1.0, 1.0)


SCALED_ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "oracle_x0.1": lambda: ScaledEstimator(OracleEstimator(), lambda key: 0.1),
    "oracle_x0.3": lambda: ScaledEstimator(OracleEstimator(), lambda key: 0.3),
    "oracle_x3": lambda: ScaledEstimator(OracleEstimator(), lambda key: 3.0),
    "oracle_x10": lambda: ScaledEstimator(OracleEstimator(), lambda key: 10.0),
    "oracle_wild": lambda: ScaledEstimator(OracleEstimator(), _wild),
}
"""The oracle's durations times a constant, or times a factor of each call's own between 0.1 and 10 (`oracle_wild`), by the
name that selects them in a simulation. A constant factor leaves the order of what is expected back; the last does not."""
