"""Ways to choose a replica: the router by price, and three that other fleets use, to compare it with.

`prefix_hash` sends prompts with the same first tokens to the same replica by consistent hashing, as prefix-aware load balancers
do; `prefix_hash_bounded` goes on along the ring past replicas that have more than 1.25 times the mean of requests in flight
(consistent hashing with bounded loads, as in KubeAI).
"""

from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import final

from benchmarks.simulated_fleet import RoutingPolicy, by_price
from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.replica_load import ReplicaState
from jinfercept.sched.profile import Profile

HASHED_TOKENS = 256
"""Tokens at the start of a prompt that `prefix_hash` reads."""
_POINTS = 64
_BOUND = 1.25


@final
class AtRandom:
    """A replica at random for every request."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> int:
        return int(self._random.random() * len(replicas))

    def finished(
        self, hint: RoutingHint, replica: int, prompt_tokens: int, new_tokens: int, cached_tokens: int
    ) -> None:
        """Nothing is learned."""


@final
class InTurns:
    """The replicas one after another (round robin)."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> int:
        self._next += 1
        return self._next % len(replicas)

    def finished(
        self, hint: RoutingHint, replica: int, prompt_tokens: int, new_tokens: int, cached_tokens: int
    ) -> None:
        """Nothing is learned."""


@final
class ByPrefixHash:
    """A consistent hash of a prompt's first `HASHED_TOKENS` tokens.

    Args:
        bounded: pass over replicas with more requests in flight than 1.25 times the mean.
    """

    def __init__(self, bounded: bool) -> None:
        self._bounded = bounded
        self._ring: list[tuple[int, int]] = []
        self._in_flight: list[int] = []

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> int:
        if len(self._in_flight) != len(replicas):
            points = ((f"{place} {point}", place) for place in range(len(replicas)) for point in range(_POINTS))
            self._ring = sorted((_hash(name.encode()), place) for name, place in points)
            self._in_flight = [0] * len(replicas)
        first = next((prefix for prefix in reversed(hint.prefixes) if prefix.tokens >= HASHED_TOKENS), hint.prefixes[0])
        start = bisect_left(self._ring, (_hash(first.key), 0))
        most = _BOUND * (sum(self._in_flight) + 1) / len(replicas)
        for step in range(len(self._ring)):
            place = self._ring[(start + step) % len(self._ring)][1]
            if not self._bounded or self._in_flight[place] + 1 <= max(1.0, most):
                break
        else:
            place = self._in_flight.index(min(self._in_flight))
        self._in_flight[place] += 1
        return place

    def finished(
        self, hint: RoutingHint, replica: int, prompt_tokens: int, new_tokens: int, cached_tokens: int
    ) -> None:
        self._in_flight[replica] -= 1


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


ROUTING_POLICIES: dict[str, Callable[[Profile, int], RoutingPolicy]] = {
    "router": by_price,
    "random": lambda profile, seed: AtRandom(seed),
    "round_robin": lambda profile, seed: InTurns(),
    "prefix_hash": lambda profile, seed: ByPrefixHash(bounded=False),
    "prefix_hash_bounded": lambda profile, seed: ByPrefixHash(bounded=True),
}
"""Makes a routing policy by its name, from the profile of the replicas and a seed."""
