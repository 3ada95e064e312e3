"""How long an interception will last, as a function of how long it has lasted. Moves nothing, reads no clock.

A call is known by the name of its tool, and by a key of its own to whoever gives one: hints and true durations belong to
single calls. Censored means seen to last at least so long, without an end: a call in flight, a time-out, a kill.
"""

import math
from collections.abc import Callable, Hashable
from typing import Protocol, final

from jinfercept.sched.durations import Curve, History, Seen
from jinfercept.sched.sequence import Sequence

TRUST = 1 / 64
"""λ of `HistoryEstimator` unless another is asked for: as small as the smallest age that it weighs against leaving at once.
On InferCept's six tools it costs 1.07 times the optimum after 3 calls and 1.03 after 20, at worst 65 times; 0.1 would cost
1.10 and 1.08, at worst 11 times."""


class Estimator(Protocol):
    """Predicts durations of interceptions, by the name of the tool and, where it is known, the call's own key.

    Queries about a call that has lasted `age_s` assume that it has not ended at that age.
    """

    def started(self, call_key: Hashable, name: str, at_s: float, hint_s: float | None = None) -> None:
        """A call of the tool `name` began.

        Args:
            call_key: tells it from all other calls in flight.
            name: the tool.
            at_s: when, on the engine's clock.
            hint_s: how long it will last, if the caller says so.
        """
        ...

    def observe(self, name: str, duration_s: float, clean: bool = True, call_key: Hashable = None) -> None:
        """A call ended after so many seconds.

        Args:
            name: the tool.
            duration_s: how long it lasted.
            clean: it ended by itself; False for a time-out, a kill or an abort, where it might have lasted longer.
            call_key: as given to `started`, if it was.
        """
        ...

    def duration_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        """Expected total seconds of a call that has lasted `age_s` so far: T_int of InferCept's equation (2)."""
        ...

    def remaining_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        """Expected seconds still to come of a call that has lasted `age_s` so far."""
        ...

    def survival(self, name: str, age_s: float, horizon_s: float, call_key: Hashable = None) -> float:
        """Probability that a call that has lasted `age_s` lasts longer than `horizon_s` more."""
        ...

    def hold_until_s(self, name: str, hold_cost_per_s: float, leave_cost: float, call_key: Hashable = None) -> float:
        """τ: the age until which to hold the context, and leave then if the call has not returned.

        Args:
            hold_cost_per_s: c > 0, waste of a second of holding.
            leave_cost: B >= 0, waste of leaving, paid once.
        """
        ...


def remaining_s(estimator: Estimator, sequence: Sequence, age_s: float) -> float:
    """Expected seconds until the last of a paused sequence's calls has returned: the longest of them."""
    return max((estimator.remaining_s(call.name, age_s, call.key) for call in sequence.calls), default=age_s)


@final
class ElapsedEstimator:
    """The paper's estimate `T = now - t_call`: a call will last as long again as it has lasted (InferCept §4.4).

    This is break-even ski rental: at most twice the cost of knowing. As a distribution it is the one whose expected rest is
    its age at every age: Pareto's, with exponent 2.
    """

    def started(self, call_key: Hashable, name: str, at_s: float, hint_s: float | None = None) -> None:
        """Nothing is learned."""

    def observe(self, name: str, duration_s: float, clean: bool = True, call_key: Hashable = None) -> None:
        """Nothing is learned."""

    def duration_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        """The age: what the paper puts for T_int."""
        return age_s

    def remaining_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        return age_s

    def survival(self, name: str, age_s: float, horizon_s: float, call_key: Hashable = None) -> float:
        return (age_s / (age_s + horizon_s)) ** 2 if horizon_s else 1.0

    def hold_until_s(self, name: str, hold_cost_per_s: float, leave_cost: float, call_key: Hashable = None) -> float:
        return leave_cost / hold_cost_per_s


@final
class OracleEstimator:
    """Knows: `hint_s` of `started` is the truth, and every query names its call. For simulations only."""

    def __init__(self) -> None:
        self._durations: dict[Hashable, float] = {}

    def started(self, call_key: Hashable, name: str, at_s: float, hint_s: float | None = None) -> None:
        assert hint_s is not None, "an oracle is told the truth"
        self._durations[call_key] = hint_s

    def observe(self, name: str, duration_s: float, clean: bool = True, call_key: Hashable = None) -> None:
        self._durations.pop(call_key, None)

    def duration_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        assert call_key in self._durations, "an oracle answers for calls that it was told of"
        return max(age_s, self._durations[call_key])

    def remaining_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        return self.duration_s(name, age_s, call_key) - age_s

    def survival(self, name: str, age_s: float, horizon_s: float, call_key: Hashable = None) -> float:
        return float(self.remaining_s(name, age_s, call_key) > horizon_s)

    def hold_until_s(self, name: str, hold_cost_per_s: float, leave_cost: float, call_key: Hashable = None) -> float:
        """For ever if holding to the end costs no more than leaving, else not at all."""
        return math.inf if hold_cost_per_s * self.duration_s(name, 0.0, call_key) <= leave_cost else 0.0


@final
class HistoryEstimator:
    """Learns a distribution of durations per tool from its last calls; what has not ended counts as censored.

    While a tool has no history, the pooled one of all tools stands in; while there is none at all, or a call has outlasted
    everything known, `ElapsedEstimator` does. A caller's hint is believed until the call has outlasted it.

    Args:
        trust: λ in (0, 1]. Holding by `hold_until_s` costs at most `1 + 1/λ` times the optimum, whatever the durations, the
            history and the hints are; a smaller λ follows the history further.
    """

    def __init__(self, trust: float = TRUST) -> None:
        assert 0.0 < trust <= 1.0
        self._trust = trust
        self._tools: dict[str, History] = {}
        self._pooled = History()
        self._hints: dict[Hashable, float] = {}
        self._elapsed = ElapsedEstimator()

    def started(self, call_key: Hashable, name: str, at_s: float, hint_s: float | None = None) -> None:
        if hint_s is not None:
            self._hints[call_key] = hint_s
        self._pooled.start(call_key, at_s)
        self._tools.setdefault(name, History()).start(call_key, at_s)

    def observe(self, name: str, duration_s: float, clean: bool = True, call_key: Hashable = None) -> None:
        self._hints.pop(call_key, None)
        seen = Seen(duration_s, not clean)
        self._pooled.end(call_key, seen)
        self._tools.setdefault(name, History()).end(call_key, seen)

    def duration_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        return age_s + self.remaining_s(name, age_s, call_key)

    def remaining_s(self, name: str, age_s: float, call_key: Hashable = None) -> float:
        """Mean of `x - age` over the durations `x > age`; the age itself if nothing is known to have lasted longer."""
        hint_s = self._hint_s(call_key, age_s)
        if hint_s is not None:
            return hint_s - age_s
        curve = self._curve(name)
        known = curve.left(age_s) or curve.outlasted_s is not None
        return curve.remaining_s(age_s) if known else self._elapsed.remaining_s(name, age_s)

    def survival(self, name: str, age_s: float, horizon_s: float, call_key: Hashable = None) -> float:
        hint_s = self._hint_s(call_key, age_s)
        if hint_s is not None:
            return float(age_s + horizon_s < hint_s)
        curve = self._curve(name)
        left = curve.left(age_s)
        return curve.left(age_s + horizon_s) / left if left else self._elapsed.survival(name, age_s, horizon_s)

    def hold_until_s(self, name: str, hold_cost_per_s: float, leave_cost: float, call_key: Hashable = None) -> float:
        """The τ of least expected cost `c·E[min(X, τ)] + B·P(X > τ)` among 0 and `(B/c)·2^j`, j = -6 … 1, kept within
        `[λB/c, B/(λc)]`. One sample that never ends is added, so that a short history does not hold for long."""
        even_s = leave_cost / hold_cost_per_s
        hint_s = self._hint_s(call_key, 0.0)
        curve = self._curve(name)
        if hint_s is not None:
            tau_s = math.inf if hint_s <= even_s else 0.0
        elif curve.num_seen == 0:
            tau_s = even_s
        else:
            taus = (0.0, *(even_s * 2.0**j for j in range(-6, 2)))
            tau_s = min(taus, key=lambda tau: curve.num_seen * (curve.held_s(tau) + even_s * curve.left(tau)) + tau)
        return min(max(tau_s, self._trust * even_s), even_s / self._trust)

    def _curve(self, name: str) -> Curve:
        """The tool's own distribution as soon as one of its calls has ended, else everybody's."""
        own = self._tools.get(name)
        history = own if own is not None and own.has_ended else self._pooled
        return history.curve if history.has_ended else _NOTHING

    def _hint_s(self, call_key: Hashable, age_s: float) -> float | None:
        """What the caller said, unless the call has lasted longer already."""
        hint_s = self._hints.get(call_key)
        return hint_s if hint_s is not None and hint_s > age_s else None


_NOTHING = Curve.from_seen([])


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"elapsed": ElapsedEstimator, "history": HistoryEstimator}
"""The estimators by the name that selects them; a simulation has the `OracleEstimator` too."""
