"""Predicts how long an interception lasts from how long it has lasted. Moves nothing, reads no clock.

Durations are learned by tool and by tenant; hints and true durations belong to single calls. A censored duration is a lower
bound: that of a call in flight, or of one that timed out or was killed.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, final

from jinfercept.sched.durations import DurationHistory, Seen, SharedHistory, SurvivalCurve, recent
from jinfercept.sched.guards import make_choice
from jinfercept.sched.sequence import PendingCall, Sequence

MOST_TENANTS = 256
MOST_TOOLS = 64
MOST_SHARED = 256
"""Histories that `HistoryEstimator` keeps: tenants, tools per tenant, and server tools with a shared history. Beyond them the
least recently called one is dropped."""


class Estimator(Protocol):
    """Predicts durations of interceptions. Calls with the same `name` and `tenant` are alike.

    A class of your own inherits from it, or has all of its members. All calls come from one thread. Queries about a call that
    has lasted `age_s` assume that it has not ended at that age; a call may be asked about that was never `started`.
    """

    def started(self, call: PendingCall, at_s: float) -> None:
        """A call began at `at_s` on the engine's clock. Ignored unless overridden."""
        return

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        """A call ended. Ignored unless overridden.

        Args:
            call: as given to `started`, if it was given.
            clean: it ended by itself; False for a timeout, a kill or an abort: the duration is censored.
        """
        return

    @abstractmethod
    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        """Expected seconds still to come of a call that has lasted `age_s` so far; may be infinite."""
        ...

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        """Probability that a call that has lasted `age_s` lasts longer than `horizon_s` more.

        Unless overridden, 0 or 1: as if `remaining_s` were certain.
        """
        return float(self.remaining_s(call, age_s) > horizon_s)


def survival(estimator: Estimator, sequence: Sequence, age_s: float, horizon_s: float) -> float:
    """Probability that any call that a paused sequence waits for lasts longer than `horizon_s` more.

    `1 - prod(1 - S_i(a_i + t) / S_i(a_i))`: the pause lasts until the last call returns. Calls may have begun before it.

    Args:
        age_s: seconds since the pause began.
        horizon_s: t.
    """
    returned = 1.0
    for call in sequence.awaited:
        returned *= 1.0 - estimator.survival(call, age_s + call.head_start_s, horizon_s)
    return 1.0 - returned


def remaining_s(estimator: Estimator, sequence: Sequence, age_s: float) -> float:
    """Expected seconds until the last call of a paused sequence returns; as many as it has waited if it has no calls.

    Several calls of one turn begin together: the longest expectation stands for the last return. Asynchronous calls have ages
    of their own: their last return is expected after the integral of `survival`.
    """
    awaited = sequence.awaited
    longest_s = max((estimator.remaining_s(call, age_s + call.head_start_s) for call in awaited), default=age_s)
    if len(awaited) < 2 or not any(call.head_start_s for call in awaited) or not 0 < longest_s < math.inf:
        return longest_s
    total_s, before_s, before = 0.0, 0.0, 1.0
    for halves in range(-8, 9):
        at_s = longest_s * 2.0 ** (halves / 2)
        probability = survival(estimator, sequence, age_s, at_s)
        total_s += (at_s - before_s) * (before + probability) / 2
        before_s, before = at_s, probability
    return max(longest_s, total_s)


@final
class ElapsedEstimator(Estimator):
    """The paper's estimate `T = now - t_call`: a call will last as long again as it has lasted (InferCept §4.4).

    This is break-even ski rental: at most twice the cost of knowing. As a distribution it is the one whose expected rest is
    its age at every age: Pareto's, with exponent 2.
    """

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return age_s

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        return (age_s / (age_s + horizon_s)) ** 2 if horizon_s else 1.0


@final
class _Tenant:
    """Durations of one tenant's calls: by tool, the least recently called first, and of all tools together."""

    __slots__ = ("pooled", "tools")

    def __init__(self) -> None:
        self.tools: dict[str, DurationHistory] = {}
        self.pooled = DurationHistory()


@final
class HistoryEstimator(Estimator):
    """Learns a distribution of durations per tool from its last calls; calls in flight count as censored.

    Every tenant has histories of its own. While a tenant has no history of a tool, the first of these that there is stands in:
    for a tool that the server runs, the shared history of that tool; the tenant's pooled history of all its tools;
    `ElapsedEstimator`, which also answers for a call that has outlasted everything known. A tenant's calls change nothing for
    another but the shared histories, where it has a bounded share (`SharedHistory`). A hint counts as the duration until the
    call has outlasted it. Memory is bounded by `MOST_TENANTS`, `MOST_TOOLS` and `MOST_SHARED`.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._shared: dict[str, SharedHistory] = {}
        self._elapsed = ElapsedEstimator()

    def started(self, call: PendingCall, at_s: float) -> None:
        tenant = recent(self._tenants, call.tenant, _Tenant, MOST_TENANTS)
        tenant.pooled.start(call.key, at_s)
        recent(tenant.tools, call.name, DurationHistory, MOST_TOOLS).start(call.key, at_s)

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        tenant = recent(self._tenants, call.tenant, _Tenant, MOST_TENANTS)
        seen = Seen(duration_s, not clean)
        tenant.pooled.end(call.key, seen)
        recent(tenant.tools, call.name, DurationHistory, MOST_TOOLS).end(call.key, seen)
        if call.kind == "server_tool":
            recent(self._shared, call.name, SharedHistory, MOST_SHARED).end(call.tenant, seen)

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        """Mean of `x - age` over the durations `x > age`; the age itself if no known duration is longer."""
        hint_s = _hint_s(call, age_s)
        if hint_s is not None:
            return hint_s - age_s
        curve = self._curve(call)
        is_known = curve.left(age_s) or curve.outlasted_s is not None
        return curve.remaining_s(age_s) if is_known else self._elapsed.remaining_s(call, age_s)

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        hint_s = _hint_s(call, age_s)
        if hint_s is not None:
            return float(age_s + horizon_s < hint_s)
        curve = self._curve(call)
        share = curve.left(age_s)
        return curve.left(age_s + horizon_s) / share if share else self._elapsed.survival(call, age_s, horizon_s)

    def _curve(self, call: PendingCall) -> SurvivalCurve:
        """The distribution for a call: the first that the class names and that has durations."""
        tenant = self._tenants.get(call.tenant)
        own = tenant.tools.get(call.name) if tenant is not None else None
        if own is not None and own.has_ended:
            return own.curve
        shared = self._shared.get(call.name) if call.kind == "server_tool" else None
        if shared is not None:
            return shared.curve
        return tenant.pooled.curve if tenant is not None and tenant.pooled.has_ended else _NOTHING


def _hint_s(call: PendingCall, age_s: float) -> float | None:
    """The hint, unless the call has outlasted it."""
    return call.expected_s if call.expected_s is not None and call.expected_s > age_s else None


_NOTHING = SurvivalCurve.from_seen([])


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"elapsed": ElapsedEstimator, "history": HistoryEstimator}
"""The estimators by the name that selects them; a simulation has the `sim.oracle.OracleEstimator` too."""


type EstimatorChoice = str | Estimator | type[Estimator] | Callable[[], Estimator]
"""A name; a place, `path.py:Class` or `package.module:Class`; a class or a function, called once for every
engine; or an estimator, for one engine."""


def make_estimator(choice: EstimatorChoice, names: Mapping[str, Callable[[], Estimator]] = ESTIMATORS) -> Estimator:
    """Make an estimator; one that is not built in is guarded.

    Args:
        choice: see `EstimatorChoice`.
        names: the built-in ones.

    Raises:
        ConfigError: no estimator has the name, or as `build_plugin`.
    """
    return make_choice("estimator", choice, names, Estimator, ESTIMATORS.values())
