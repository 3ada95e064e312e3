"""The estimator that knows how long every call lasts."""

import math
from collections.abc import Hashable
from typing import final

from jinfercept.sched.estimator import Estimator
from jinfercept.sched.sequence import PendingCall


@final
class OracleEstimator(Estimator):
    """Takes `expected_s` of a call for its true duration."""

    def __init__(self) -> None:
        self._durations: dict[Hashable, float] = {}

    def started(self, call: PendingCall, at_s: float) -> None:
        assert call.expected_s is not None, "an oracle needs the true duration"
        self._durations[call.key] = call.expected_s

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        self._durations.pop(call.key, None)

    def duration_s(self, call: PendingCall, age_s: float) -> float:
        assert call.key in self._durations, "an oracle knows only the calls that have started"
        return max(age_s, self._durations[call.key])

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return self.duration_s(call, age_s) - age_s

    def hold_until_s(self, call: PendingCall, hold_cost_per_s: float, leave_cost: float) -> float:
        """Infinity if holding to the end costs no more than leaving, else 0."""
        return math.inf if hold_cost_per_s * self.duration_s(call, 0.0) <= leave_cost else 0.0
