"""Predicts how long an interception will last from how long it has lasted. Moves nothing, reads no clock.

Durations are learned by tool and by tenant; hints and true durations belong to single calls. A duration is censored, a lower
bound, if its call is in flight, timed out or was killed. It counts by Kaplan and Meier's estimate, as of the latest time at
which a call began or ended.
"""

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from itertools import accumulate
from typing import NamedTuple, Protocol, Self, final

from jinfercept.sched.plugins import make_choice
from jinfercept.sched.sequence import PendingCall, Sequence

RING = 256
"""Durations kept per tool."""

MOST_IN_FLIGHT = 2048
"""Calls in flight that a history counts. Beyond them it drops the oldest."""


class Seen(NamedTuple):
    """A duration in seconds, or a lower bound of one (`censored`). Of equal times, durations sort before bounds."""

    duration_s: float
    censored: bool


class SurvivalCurve(NamedTuple):
    """A distribution of durations X, as n atoms in ascending order. Every method costs O(log n)."""

    times: tuple[float, ...]  # of the atoms, in seconds
    mass: tuple[float, ...]  # entry k: the probability of the atoms from the k-th on; n + 1 entries
    moment: tuple[float, ...]  # entry k: the sum of probability · time of these atoms; n + 1 entries
    # the longest duration, if a censored one exceeds it, so that the last atom stands for durations beyond it; else None
    outlasted_s: float | None

    @classmethod
    def from_seen(cls, seen: list[Seen]) -> Self:
        """Kaplan and Meier's estimate from the values of each `Seen`, ascending."""
        times, weights, survival = [], [], 1.0
        for index, (duration_s, censored) in enumerate(seen):
            if not censored:
                weight = survival / (len(seen) - index)
                times.append(duration_s)
                weights.append(weight)
                survival -= weight
        outlasted_s = None
        if seen and seen[-1][1]:
            outlasted_s = times[-1] if times else 0.0
            # the mass beyond the longest duration is put at twice the longest censored one
            times.append(2.0 * seen[-1][0])
            weights.append(survival)
        mass = accumulate(reversed(weights), initial=0.0)
        moment = accumulate((w * x for w, x in zip(reversed(weights), reversed(times), strict=True)), initial=0.0)
        return cls(tuple(times), tuple(mass)[::-1], tuple(moment)[::-1], outlasted_s)

    def left(self, age_s: float) -> float:
        """P(X > age)."""
        return self.mass[bisect_right(self.times, age_s)]

    def remaining_s(self, age_s: float) -> float:
        """E[X - age | X > age], for an age with `left(age) > 0`, or for any age if `outlasted_s` is a number."""
        index = bisect_right(self.times, age_s)
        if self.outlasted_s is None:
            return max(0.0, self.moment[index] / self.mass[index] - age_s)
        tail_s = self.times[-1]
        # A call that has outlasted every known duration may never end. Its expected rest is twice the longest known age, and
        # grows with its own age: the longer such a call has run, the later it is expected, and later than calls that have
        # outlasted less.
        if age_s >= self.outlasted_s:
            return tail_s + age_s - self.outlasted_s
        ends, tail = self.moment[index] - self.moment[-2], self.mass[-2] * (self.outlasted_s + tail_s)
        return (ends + tail) / self.mass[index] - age_s


@final
class DurationHistory:
    """The last `RING` durations of one tool, and its calls in flight."""

    def __init__(self) -> None:
        self._ring: deque[Seen] = deque()
        self._sorted: list[Seen] = []
        self._running: dict[Hashable, float] = {}  # by call key: when it began
        self._now_s = 0.0
        self._curve = SurvivalCurve.from_seen([])
        self._num_changes = 0  # since the curve was made

    def start(self, call_key: Hashable, at_s: float) -> None:
        if len(self._running) == MOST_IN_FLIGHT:
            del self._running[next(iter(self._running))]
        self._running[call_key] = at_s
        self._pass(at_s)

    def end(self, call_key: Hashable, seen: Seen) -> None:
        """Count a call that has ended. One that `start` does not know counts with its duration only."""
        began_s = self._running.pop(call_key, None)
        if len(self._ring) == RING:
            del self._sorted[bisect_left(self._sorted, self._ring.popleft())]
        self._ring.append(seen)
        insort(self._sorted, seen)
        self._pass(self._now_s if began_s is None else began_s + seen.duration_s)

    @property
    def has_ended(self) -> bool:
        return bool(self._ring)

    @property
    def curve(self) -> SurvivalCurve:
        """The distribution, which lags behind by at most one change in 32."""
        if 32 * self._num_changes > len(self._ring):
            self._num_changes = 0
            # a call in flight counts with its age when a call of this tool last began or ended
            ages = [Seen(max(0.0, self._now_s - at_s), True) for at_s in reversed(self._running.values())]
            self._curve = SurvivalCurve.from_seen(sorted([*self._sorted, *ages]))
        return self._curve

    def _pass(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._num_changes += 1


def recent[K, V](entries: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The entry of a key, made if there is none and moved to the end. With over `most` entries the first one is dropped."""
    entry = entries.pop(key, None)
    if entry is None:
        entry = make()
        if len(entries) == most:
            del entries[next(iter(entries))]
    entries[key] = entry
    return entry


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
