"""Forecasts of an interception's remaining seconds, for decision records.

A query may change an estimator (`HistoryEstimator` updates its curve lazily), so records query an estimator of their own, to
which an `EstimatorTee` forwards what the policy's estimator learns.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, final

from jinfercept.sched.estimator import Estimator, remaining_s, survival
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles of the predicted remaining seconds that a forecast holds."""

_SHORTEST_S, _LONGEST_S, _HALVINGS = 1e-5, 1e5, 12  # quantiles to 0.6 %


class Forecast(NamedTuple):
    """Predicted remaining seconds of an interception at an age: their mean, and one number for each of `QUANTILES`."""

    age_s: float
    remaining_s: float
    quantiles_s: tuple[float, ...]


def forecast(estimator: Estimator, sequence: Sequence, age_s: float) -> Forecast:
    """The forecast for an intercepted sequence at an age in seconds."""
    quantiles = []
    low = 0.0
    for quantile in QUANTILES:
        low = _quantile_s(estimator, sequence, age_s, quantile, max(low, _SHORTEST_S))
        quantiles.append(low)
    return Forecast(age_s, remaining_s(estimator, sequence, age_s), tuple(quantiles))


def _quantile_s(estimator: Estimator, sequence: Sequence, age_s: float, quantile: float, low_s: float) -> float:
    """Remaining seconds by which the calls return with a probability, by bisection on a logarithmic scale; 0 if too short."""
    high_s, probability = _LONGEST_S, 1.0 - quantile
    if survival(estimator, sequence, age_s, low_s) <= probability:
        return low_s if low_s > _SHORTEST_S else 0.0
    for _ in range(_HALVINGS):
        middle_s = (low_s * high_s) ** 0.5
        if survival(estimator, sequence, age_s, middle_s) <= probability:
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


@final
class EstimatorTee:
    """An estimator for the scheduler: answers as `primary`, forwards starts and ends of calls to both, keeps asked durations.

    Args:
        primary: the policy's estimator.
        secondary: an estimator of the same kind, queried by decision records.
    """

    def __init__(self, primary: Estimator, secondary: Estimator, before_end: Callable[[], None] = lambda: None) -> None:
        self._primary, self._secondary, self._before_end = primary, secondary, before_end
        self._ended: dict[Hashable, CallDuration | None] = {}

    def keep(self, call_keys: Iterable[Hashable]) -> None:
        """Keep the durations of these calls in flight, once they end, until they are taken."""
        self._ended.update(dict.fromkeys(call_keys))

    def take_ended(self, call_key: Hashable) -> CallDuration | None:
        """The duration of a call that was to be kept, once; None if it has not ended."""
        return self._ended.pop(call_key, None)

    def started(self, call: PendingCall, at_s: float) -> None:
        self._primary.started(call, at_s)
        self._secondary.started(call, at_s)

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        self._before_end()
        if call.key in self._ended:
            self._ended[call.key] = CallDuration(duration_s, clean)
        self._primary.observe(call, duration_s, clean)
        self._secondary.observe(call, duration_s, clean)

    def duration_s(self, call: PendingCall, age_s: float) -> float:
        return self._primary.duration_s(call, age_s)

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return self._primary.remaining_s(call, age_s)

    def seconds_per_return(self, call: PendingCall, age_s: float) -> float:
        return self._primary.seconds_per_return(call, age_s)

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        return self._primary.survival(call, age_s, horizon_s)

    def hold_until_s(self, call: PendingCall, hold_cost_per_s: float, leave_cost: float) -> float:
        return self._primary.hold_until_s(call, hold_cost_per_s, leave_cost)
