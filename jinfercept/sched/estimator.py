"""Predicts how long an interception lasts from how long it has lasted. Moves nothing, reads no clock.

Durations are learned by tool and by tenant; hints and true durations belong to single calls. A censored duration is a lower
bound: that of a call in flight, or of one that timed out or was killed.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, final

from jinfercept.sched.durations import DurationHistory, Seen, recent
from jinfercept.sched.guards import make_choice
from jinfercept.sched.sequence import PendingCall, Sequence

MOST_TENANTS = 256
MOST_TOOLS = 64
"""Histories that `HistoryEstimator` keeps: tenants, and tools per tenant; beyond them the least recently called one goes."""


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


def remaining_s(estimator: Estimator, sequence: Sequence, age_s: float) -> float:
    """Expected seconds until the last call of a paused sequence returns; as many as it has waited if it has no calls.

    The longest expectation stands for the last return.
    """
    awaited = sequence.awaited
    return max((estimator.remaining_s(call, age_s + call.head_start_s) for call in awaited), default=age_s)


@final
class ElapsedEstimator(Estimator):
    """The paper's estimate `T = now - t_call`: a call will last as long again as it has lasted (InferCept §4.4).

    This is break-even ski rental: at most twice the cost of knowing.
    """

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return age_s


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

    Every tenant has histories of its own, so that its calls change nothing for another. While a tenant has no history of a
    tool, its pooled history of all its tools stands in; without any, `ElapsedEstimator`, which also answers for a call that has
    outlasted everything known. A hint counts as the duration until the call has outlasted it. Memory is bounded by
    `MOST_TENANTS` and `MOST_TOOLS`.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
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

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        """Mean of `x - age` over the durations `x > age`; the age itself if no known duration is longer."""
        if call.expected_s is not None and call.expected_s > age_s:
            return call.expected_s - age_s
        if (tenant := self._tenants.get(call.tenant)) is not None:
            own = tenant.tools.get(call.name)
            history = own if own is not None and own.has_ended else tenant.pooled
            if history.has_ended and ((curve := history.curve).left(age_s) or curve.outlasted_s is not None):
                return curve.remaining_s(age_s)
        return self._elapsed.remaining_s(call, age_s)


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
