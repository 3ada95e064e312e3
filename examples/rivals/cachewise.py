"""CacheWise's eviction by predicted reuse and its order by cached prefixes (Tiwari et al., arXiv 2606.16824).

The context whose tool is expected to run longest from now on is lost first, by what calls of the same tool have lasted so far.
Of the waiting requests the one with the longest prefix in a cache starts next, and of equal ones the first that came.
"""

from bisect import bisect_right, insort
from math import inf

from examples.rivals.host_tier import HostTier, Rank
from jinfercept.sched.orders import Order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.sequence import PendingCall, Sequence

MOST_DURATIONS = 1000
"""Durations that are kept of a tool."""


class PredictedReuse(HostTier):
    """Loses the context with the longest expected time to its next use first; of equal ones that which paused first."""

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self.durations: dict[str, list[float]] = {}  # ascending, by tool

    def returned(self, sequence: Sequence, seconds: float) -> None:
        for call in sequence.calls:
            durations = self.durations.setdefault(call.name, [])
            insort(durations, seconds)
            if len(durations) > MOST_DURATIONS:
                del durations[len(durations) // 2]

    def rank(self, sequence: Sequence, now: float) -> Rank:
        age_s = now - sequence.paused_s
        expected_s = max((self.rest_s(call, age_s) for call in sequence.awaited), default=inf)
        return (-expected_s, sequence.paused_s)

    def rest_s(self, call: PendingCall, age_s: float) -> float:
        """Expected seconds from now to the end of a call that has lasted so long: the mean over the longer ones; as long again
        where there were none."""
        durations = self.durations.get(call.name, [])
        longer = durations[bisect_right(durations, age_s) :]
        return sum(longer) / len(longer) - age_s if longer else age_s


class LongestPrefix(Order):
    """The request with the most tokens on the device or the host first, then by arrival."""

    def key(self, sequence: Sequence, now: float) -> float:
        residency = sequence.context.residency(sequence.max_computed)
        return sequence.arrival_s / 1e9 - (residency.device + residency.host)
