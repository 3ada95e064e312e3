"""What an estimator said about a pause while it lasted: for decision records. Asked beside the policy, never in its stead.

An estimator may answer differently for having been asked before (`HistoryEstimator` brings its curve up to date when
somebody wants it), so records ask one of their own, which an `EstimatorTee` keeps told.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, final

from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of the predicted remaining seconds."""

_SHORTEST_S, _LONGEST_S, _HALVINGS = 1e-5, 1e5, 12  # quantiles to 0.6 %


class Forecast(NamedTuple):
    """What was predicted for a pause at one of its ages: seconds still to come, as a mean and by `QUANTILES`."""

    age_s: float
    remaining_s: float
    quantiles_s: tuple[float, ...]


def forecast(estimator: Estimator, sequence: Sequence, age_s: float) -> Forecast:
    """The prediction for a paused sequence that has been intercepted for `age_s`."""
    quantiles = []
    low = 0.0
    for quantile in QUANTILES:
        low = _quantile_s(estimator, sequence, age_s, quantile, max(low, _SHORTEST_S))
        quantiles.append(low)
    return Forecast(age_s, remaining_s(estimator, sequence, age_s), tuple(quantiles))


def survival(estimator: Estimator, sequence: Sequence, age_s: float, horizon_s: float) -> float:
    """Probability that any of the sequence's calls lasts longer than `horizon_s` more."""
    returned = 1.0
    for call in sequence.calls:
        returned *= 1.0 - estimator.survival(call, age_s, horizon_s)
    return 1.0 - returned


def _quantile_s(estimator: Estimator, sequence: Sequence, age_s: float, quantile: float, low_s: float) -> float:
    """The time after which so much of the probability has returned: by halving on a logarithmic scale; 0 if too short."""
    high_s, left = _LONGEST_S, 1.0 - quantile
    if survival(estimator, sequence, age_s, low_s) <= left:
        return low_s if low_s > _SHORTEST_S else 0.0
    for _ in range(_HALVINGS):
        middle_s = (low_s * high_s) ** 0.5
        if survival(estimator, sequence, age_s, middle_s) <= left:
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


@final
class EstimatorTee:
    """An estimator that answers as `asked` does, tells `listener` all that it is told, and keeps how long calls lasted.

    It is the scheduler's; policies hold `asked` itself.

    Args:
        asked: answers.
        listener: is told, for somebody else to ask.
        before_end: called before `listener` is told of the end of a call.
    """

    def __init__(self, asked: Estimator, listener: Estimator, before_end: Callable[[], None] = lambda: None) -> None:
        self._asked, self._listener, self._before_end = asked, listener, before_end
        self._ended: dict[Hashable, CallDuration] = {}

    def take_ended(self, call_key: Hashable) -> CallDuration | None:
        """How a call ended, once."""
        return self._ended.pop(call_key, None)

    def started(self, call: PendingCall, at_s: float) -> None:
        self._asked.started(call, at_s)
        self._listener.started(call, at_s)

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        self._before_end()
        self._ended[call.key] = CallDuration(duration_s, clean)
        self._asked.observe(call, duration_s, clean)
        self._listener.observe(call, duration_s, clean)

    def duration_s(self, call: PendingCall, age_s: float) -> float:
        return self._asked.duration_s(call, age_s)

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return self._asked.remaining_s(call, age_s)

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        return self._asked.survival(call, age_s, horizon_s)

    def hold_until_s(self, call: PendingCall, hold_cost_per_s: float, leave_cost: float) -> float:
        return self._asked.hold_until_s(call, hold_cost_per_s, leave_cost)
