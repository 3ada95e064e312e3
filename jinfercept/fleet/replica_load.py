"""What a router counts: the queue of each replica since its last report.

Reads no clock: time arrives as `now`.
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import Any, final

from jinfercept.fleet.known_prefixes import Holder

PLACED_HALF_LIFE_S = 300.0
"""Seconds after which a conversation that was placed counts half."""
TARGET_DEMAND = 0.8
"""Share of the device's KV pool that is demanded on average when the number of replicas is right."""


@dataclass(slots=True)
class ReplicaState:
    """The latest report of a replica.

    Attributes:
        queue_s: seconds until it would begin with a request that arrives now.
        accepts: whether it takes requests; not while it starts, drains or is dead.
        at_s: time of the report.
    """

    name: str
    queue_s: float = 0.0
    accepts: bool = True
    at_s: float = -inf


@final
class DecayedCount:
    """A count that halves every `PLACED_HALF_LIFE_S`."""

    __slots__ = ("_at", "_count")

    def __init__(self) -> None:
        self._count, self._at = 0.0, 0.0

    def at(self, now: float) -> float:
        return self._count * 0.5 ** ((now - self._at) / PLACED_HALF_LIFE_S) if self._count else 0.0

    def add(self, now: float) -> None:
        self._count, self._at = self.at(now) + 1.0, now


@final
class ReplicaLoad:
    """The work of a replica: what it reported, and what was sent there since, worked off as time passes.

    Attributes:
        holder: the replica in the table of prefixes.
        in_flight: requests without an end.
        placed: conversations that began here.
    """

    __slots__ = ("_queue_at", "_queue_s", "_reported_at", "holder", "in_flight", "placed")

    def __init__(self, holder: Holder) -> None:
        self.holder, self.in_flight, self.placed = holder, 0, DecayedCount()
        self._queue_s, self._queue_at, self._reported_at = 0.0, -inf, -inf

    def queue_s(self, state: ReplicaState, now: float) -> float:
        """Seconds that a request waits which arrives now."""
        if state.at_s > self._reported_at:
            self._queue_s, self._queue_at, self._reported_at = state.queue_s, state.at_s, state.at_s
        return self._left_s(now)

    def send(self, seconds: float, now: float) -> None:
        """Count a request with so many seconds of work."""
        self.in_flight += 1
        self._queue_s, self._queue_at = self._left_s(now) + seconds, now

    def _left_s(self, now: float) -> float:
        return max(0.0, self._queue_s - (now - self._queue_at)) if self._queue_s else 0.0


def replicas_by_memory(context: Any) -> tuple[int, dict[str, Any]]:
    """The number of replicas for Ray Serve: demanded memory · time over that of one replica's pool, at `TARGET_DEMAND`.

    Args:
        context: `ray.serve.config.AutoscalingContext`; Ray averages `memory_demand` of each replica over the look-back period.

    Returns:
        The number, which Ray keeps within the deployment's bounds, and no state.
    """
    demands = (context.aggregated_metrics or {}).get("memory_demand", {})
    if len(demands) < context.current_num_replicas or not demands:
        return context.target_num_replicas, {}
    return max(1, ceil(sum(demands.values()) / TARGET_DEMAND - 1e-9)), {}
