"""How a simulated fleet chooses a replica: by the router of a real fleet, or by another policy with the same methods."""

from typing import Protocol, final

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.replica_load import ReplicaState
from jinfercept.fleet.routing import Router
from jinfercept.sched.profile import Profile


class RoutingPolicy(Protocol):
    """Chooses the replica of a request."""

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> tuple[int, str]:
        """The replica's place among `replicas`, and why."""
        ...

    def finished(
        self, hint: RoutingHint, replica: int, prompt_tokens: int, new_tokens: int, cached_tokens: int
    ) -> None:
        """A request has ended."""
        ...


@final
class ByPrice:
    """The router of a fleet.

    Args:
        router: its replicas are named by their places: "0", "1", ….
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> tuple[int, str]:
        route = self._router.route(hint, replicas, now)
        return int(route.replica), route.reason

    def finished(
        self, hint: RoutingHint, replica: int, prompt_tokens: int, new_tokens: int, cached_tokens: int
    ) -> None:
        self._router.finished(hint, str(replica), prompt_tokens, new_tokens, cached_tokens=cached_tokens)


def by_price(profile: Profile, seed: int) -> ByPrice:
    """The router of a fleet whose replicas have this profile."""
    return ByPrice(Router(profile, chunk_tokens=profile.saturation, seed=seed))
