"""Continuum's time to live, and its order of programs (Li et al., arXiv 2511.02230; CacheTTL from its fourth version on).

A context that waits for a tool is pinned for a time to live: the τ of most `P(X ≤ τ)·B − τ`, for the tool's durations X so far
and the benefit B of a return that finds its context: the seconds of loading or computing it, and the mean wait for room of
returns that did not. Programs whose contexts are pinned go first, the others by the arrival of their first request.
"""

import math
from bisect import bisect_right, insort
from collections import deque

from examples.rivals.host_tier import HostTier, Rank, device_pages
from jinfercept.sched.orders import Order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.sequence import Sequence, State

ENOUGH = 100
"""Durations that a distribution needs (section 4.2): a tool's, else those of all tools, else the cold start's."""
WINDOW = 100
"""Waits that the mean is of. The paper does not say."""
UNPINNED = 1e12
"""Seconds that a program without a pinned context arrives later than one with it."""


class TimeToLive(HostTier):
    """Pins a context for a time to live; afterwards it is lost before any that is pinned, the one that expired first first.

    A pinned context does not give way to a request that would start, as long as any sequence runs.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self.until_s: dict[str, float] = {}
        self.durations: dict[str, list[float]] = {}  # sorted, by tool
        self.all_durations: list[float] = []
        self.waits: deque[float] = deque(maxlen=WINDOW)  # of returns whose contexts had been evicted
        self.evicted: dict[str, float] = {}  # sequences that wait to run without their contexts, and since when

    def pause(self, sequence: Sequence, now: float) -> None:
        super().pause(sequence, now)
        if sequence.state is State.INTERCEPTED:
            self.until_s[sequence.id] = sequence.paused_s + self.ttl_s(sequence)

    def resume(self, sequence: Sequence, now: float) -> None:
        super().resume(sequence, now)
        self.until_s.pop(sequence.id, None)
        returned_s = self.evicted.pop(sequence.id, None)
        if returned_s is not None and sequence.state is State.RUNNING:
            self.waits.append(now - returned_s)

    def returned(self, sequence: Sequence, seconds: float) -> None:
        if sequence.context.residency(sequence.max_computed).device < sequence.max_computed:
            self.evicted[sequence.id] = self.now
        for call in sequence.calls:
            if call.kind != "reader":
                insort(self.durations.setdefault(call.name, []), seconds)
                insort(self.all_durations, seconds)

    def ttl_s(self, sequence: Sequence) -> float:
        """The time to live of a context that has just paused; 0 where no tool is called."""
        tools = [call.name for call in sequence.awaited if call.kind != "reader"]
        if not tools:
            return 0.0
        tokens, cost = len(sequence.tokens), self.inputs.cost
        reload_s = cost.recompute_s(tokens, self.inputs.saturation)
        if self.pools.host_total:
            reload_s = min(reload_s, cost.swap_s(tokens))
        benefit_s = reload_s + (sum(self.waits) / len(self.waits) if self.waits else 0.0)
        return max(self.best_ttl_s(tool, benefit_s) for tool in tools)

    def best_ttl_s(self, tool: str, benefit_s: float) -> float:
        durations = self.durations.get(tool, [])
        if len(durations) <= ENOUGH:
            durations = self.all_durations
        if len(durations) <= ENOUGH:  # the tool is taken to last a second in the mean, exponentially
            return math.log(benefit_s) if benefit_s > 1.0 else 0.0
        candidates = range(bisect_right(durations, benefit_s))  # a longer one costs more than it can bring
        gains = [(benefit_s * (index + 1) / len(durations) - durations[index], index) for index in candidates]
        gain, index = max(gains, default=(0.0, 0))
        return durations[index] if gain > 0.0 else 0.0

    def rank(self, sequence: Sequence, now: float) -> Rank:
        until_s = self.until_s[sequence.id]
        return (float(until_s > now), until_s)

    def admits(self, sequence: Sequence, now: float) -> bool:
        """Whether the device has slots for the sequence beside the running ones and the pinned contexts."""
        self.plan(now)
        own = sequence.id in self.paused and device_pages(sequence)
        pinned = sum([device_pages(other) for other in self.paused.values() if self._is_pinned(other, now)])
        running = sum(
            [self._pages(other) for other in self.write_through.running.values() if other.state is State.RUNNING]
        )
        return self._pages(sequence) - own + running + pinned <= self.pools.total or not pinned

    def _is_pinned(self, sequence: Sequence, now: float) -> bool:
        return sequence.state is State.INTERCEPTED and self.until_s[sequence.id] > now

    def _pages(self, sequence: Sequence) -> int:
        """Pages of a sequence with its next token, and one more."""
        return sequence.length // self.inputs.page_size + 2


class ProgramOrder(Order):
    """Programs whose contexts are on the device first; then by the first request of each."""

    def __init__(self) -> None:
        self.first_s: dict[str, float] = {}

    def key(self, sequence: Sequence, now: float) -> float:
        first_s = self.first_s.setdefault(sequence.session, sequence.arrival_s)
        computed = sequence.max_computed
        pinned = computed > 0 and sequence.context.residency(computed).device >= computed
        return first_s if pinned else first_s + UNPINNED
