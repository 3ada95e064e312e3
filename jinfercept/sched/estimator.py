"""Predicts how long an interception will last from how long it has lasted. Moves nothing, reads no clock.

Durations are learned by tool and by tenant; hints and true durations belong to single calls. A duration is censored, a lower
bound, if its call is in flight, timed out or was killed.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, final

from jinfercept.sched.durations import DurationHistory, Seen, recent
from jinfercept.sched.guards import make_choice
from jinfercept.sched.sequence import PendingCall, Sequence

MOST_TENANTS = 256
MOST_TOOLS = 64
"""Histories that `HistoryEstimator` keeps: tenants, and tools per tenant. Beyond them the least recently called goes."""


class Estimator(Protocol):
    """Predicts durations of interceptions. Calls with the same `name` and `tenant` are alike.

    Inherit from it, or write a class with all of its members. All calls come from one thread. A question about a call that
    has lasted `age_s` assumes that it has not ended at that age. The call may never have been `started`.
    """

    def started(self, call: PendingCall, at_s: float) -> None:
        """A call began, at a second of the engine's clock. Ignored unless overridden."""
        return

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        """A call ended. Ignored unless overridden.

        `call` is as in `started`. A call that does not end by itself, but by a timeout, a kill or an abort, is not `clean`:
        its duration is censored.
        """
        return

    @abstractmethod
    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        """Expected seconds until a call ends that has lasted `age_s` so far; may be infinite."""
        ...


def remaining_s(estimator: Estimator, sequence: Sequence, age_s: float) -> float:
    """Expected seconds until the last call of a paused sequence returns: the longest of its calls; without calls, its age."""
    awaited = sequence.awaited
    return max((estimator.remaining_s(call, age_s + call.head_start_s) for call in awaited), default=age_s)


@final
class ElapsedEstimator(Estimator):
    """The paper's estimate `T = now - t_call`: a call lasts as long again as it has lasted (InferCept §4.4)."""

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        # break-even ski rental: at most twice the cost of knowing the duration
        return age_s


@final
class _Tenant:
    __slots__ = ("pooled", "tools")

    def __init__(self) -> None:
        # by tool, the least recently called first; `pooled` has those of all tools together
        self.tools: dict[str, DurationHistory] = {}
        self.pooled = DurationHistory()


@final
class HistoryEstimator(Estimator):
    """Learns a distribution of durations per tool from its last calls; calls in flight count as censored.

    Tenants have separate histories, so that one tenant's calls change nothing for another. A tool without a history of its
    own is predicted by the pooled history of the tenant's tools. Without that, and for a call that has outlasted everything
    known, `ElapsedEstimator` answers. A hint counts as the duration until the call has outlasted it. `MOST_TENANTS` and
    `MOST_TOOLS` bound the memory.
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
        if call.expected_s is not None and call.expected_s > age_s:
            return call.expected_s - age_s
        if (tenant := self._tenants.get(call.tenant)) is not None:
            own = tenant.tools.get(call.name)
            history = own if own is not None and own.has_ended else tenant.pooled
            if history.has_ended and ((curve := history.curve).left(age_s) or curve.outlasted_s is not None):
                return curve.remaining_s(age_s)
        return self._elapsed.remaining_s(call, age_s)


ESTIMATORS: dict[str, Callable[[], Estimator]] = {"elapsed": ElapsedEstimator, "history": HistoryEstimator}
"""The estimators by the name that selects them. A simulation also has `sim.simulation.OracleEstimator`."""


type EstimatorChoice = str | Estimator | type[Estimator] | Callable[[], Estimator]
"""A name; a place, `path.py:Class` or `package.module:Class`; a class or a function, called once for every engine; or an
estimator, for one engine."""


def make_estimator(choice: EstimatorChoice, names: Mapping[str, Callable[[], Estimator]] = ESTIMATORS) -> Estimator:
    """Make an estimator, guarded unless it is built in. Raises `ConfigError` for an unknown name, or as `build_plugin`."""
    return make_choice("estimator", choice, names, Estimator, ESTIMATORS.values())
