"""Estimates that are wrong on purpose, by a factor: how much a policy depends on good ones. For simulations only."""

from collections.abc import Callable, Hashable
from random import Random
from typing import final

from jinfercept.sched.estimator import Estimator, OracleEstimator

Factor = Callable[[Hashable], float]
"""By what the duration of a call, known by its key, is multiplied; above 0."""


@final
class Distorted:
    """Takes a call to last `factor` times as long as another estimator believes when the call begins.

    It learns nothing from being wrong: a call that outlasts its estimate is expected back at any moment.
    """

    def __init__(self, estimator: Estimator, factor: Factor) -> None:
        self._estimator, self._factor = estimator, factor

    def started(self, call_key: Hashable, name: str, at_s: float, hint_s: float | None = None) -> None:
        self._estimator.started(call_key, name, at_s, hint_s)

    def observe(self, name: str, duration_s: float, clean: bool = True, call_key: Hashable = None) -> None:
        self._estimator.observe(name, duration_s, clean, call_key)

    def duration_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        return max(age_s, self._factor(call_key) * self._estimator.duration_s(name, 0.0, call_key))

    def remaining_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        return self.duration_s(name, age_s, call_key) - age_s

    def survival(self, name: str, age_s: float, horizon_s: float, call_key: Hashable = None) -> float:
        factor = self._factor(call_key)
        return self._estimator.survival(name, age_s / factor, horizon_s / factor, call_key)

    def hold_until_s(self, name: str, hold_cost_per_s: float, leave_cost: float, call_key: Hashable = None) -> float:
        """The other's τ on a clock that runs `factor` times as fast."""
        factor = self._factor(call_key)
        return factor * self._estimator.hold_until_s(name, factor * hold_cost_per_s, leave_cost, call_key)


def _wild(call_key: Hashable) -> float:
    return 10 ** Random(repr(call_key)).uniform(-1.0, 1.0)


DISTORTED: dict[str, Callable[[], Estimator]] = {
    "oracle_x0.1": lambda: Distorted(OracleEstimator(), lambda key: 0.1),
    "oracle_x0.3": lambda: Distorted(OracleEstimator(), lambda key: 0.3),
    "oracle_x3": lambda: Distorted(OracleEstimator(), lambda key: 3.0),
    "oracle_x10": lambda: Distorted(OracleEstimator(), lambda key: 10.0),
    "oracle_wild": lambda: Distorted(OracleEstimator(), _wild),
}
"""The oracle's durations times a constant, or times a factor of each call's own between 0.1 and 10 (`oracle_wild`), by the
name that selects them in a simulation. A constant factor leaves the order of what is expected back; the last does not."""
