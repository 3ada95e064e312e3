"""The front's tables: the router, the replicas' last reports, which replica made a response, and what was decided."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.routing import NoReplicaError, ReplicaState, Route, Router

MOST_RESPONSES = 100_000

type Reports = Mapping[str, Mapping[str, Any]]
"""Last routing stats of the running replicas, by their names."""


class Totals(NamedTuple):
    """Counts since the front began.

    Attributes:
        routed: requests that generate, by replica and reason.
        prompt_tokens, found_tokens: of all answered requests, and those that the replicas held.
        lost: requests whose replica ended.
        retried: of these, the ones that another replica was given.
    """

    routed: Counter[tuple[str, str]]
    prompt_tokens: Counter[str]
    found_tokens: Counter[str]
    lost: int = 0
    retried: int = 0


@final
class Routes:
    """Chooses replicas. Thread-safe: Ray's router may run in a thread of its own.

    Args:
        router: decides by price.
        now: a monotonic clock in seconds.

    Attributes:
        names: of the running replicas, as of the last request.
    """

    def __init__(self, router: Router, now: Callable[[], float] = time.monotonic) -> None:
        self._router, self._now = router, now
        self._lock = threading.Lock()
        self._members: tuple[ReplicaState, ...] = ()
        self._numbers: dict[str, Any] = {}
        self._responses: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.names: tuple[str, ...] = ()
        self.totals = Totals(Counter(), Counter(), Counter())

    def choose(self, hint: RoutingHint, prefer: str, reports: Reports) -> Route:
        """The replica for a request: `prefer` if it runs, else by price."""
        with self._lock:
            self._read(reports)
            if prefer in reports:
                return Route(prefer, "session", 0, 0.0)
            try:
                return self._router.route(hint, self._members, self._now())
            except NoReplicaError:  # all of them drain or are full: their own answer says so
                return Route(min(reports), "load", 0, 0.0)

    def taken(self, hint: RoutingHint, chosen: Route, replica: str) -> Route:
        """Note which replica has taken a request."""
        with self._lock:
            if replica != chosen.replica:
                self._router.failed(hint, chosen.replica)
                chosen = Route(replica, "moved", 0, chosen.price_s)
            return chosen

    def finished(self, hint: RoutingHint, route: Route, details: dict[str, Any], response_key: bytes | None) -> None:
        """Note the end of a request that generates.

        Args:
            details: fields of its log line: `prompt_tokens`, `cached_tokens`, `completion_tokens`.
        """
        prompt, cached, replica = details.get("prompt_tokens", 0), details.get("cached_tokens"), route.replica
        with self._lock:
            self.totals.routed[replica, route.reason] += 1
            self.totals.prompt_tokens[replica] += prompt
            self.totals.found_tokens[replica] += cached or 0
            if cached is None and response_key is None:
                self._router.failed(hint, replica)
                return
            output = details.get("completion_tokens", 0)
            self._router.finished(hint, replica, prompt, output, response_key=response_key)

    def lost(self, hint: RoutingHint, replica: str, retried: bool) -> None:
        """Note that a replica ended while it worked on a request."""
        with self._lock:
            totals = self.totals
            self.totals = totals._replace(lost=totals.lost + 1, retried=totals.retried + retried)
            self._router.failed(hint, replica)

    def made(self, tenant: str, response_id: str, replica: str) -> None:
        with self._lock:
            self._responses[tenant, response_id] = replica
            self._responses.move_to_end((tenant, response_id))
            if len(self._responses) > MOST_RESPONSES:
                self._responses.popitem(last=False)

    def maker(self, tenant: str, response_id: str) -> str:
        """The replica that made a response of a tenant; "": unknown, as for a response of another tenant."""
        with self._lock:
            return self._responses.get((tenant, response_id), "")

    def use(self, router: Router) -> None:
        """Decide by another router from now on."""
        with self._lock:
            self._router = router

    def _read(self, reports: Reports) -> None:
        """Take over new reports, and forget the replicas that are gone."""
        numbers = {name: report.get("number") for name, report in reports.items()}
        if numbers == self._numbers:
            return
        for name in self._numbers.keys() - numbers.keys():
            self._router.forget_replica(name)
            for count in (self.totals.prompt_tokens, self.totals.found_tokens):
                count.pop(name, None)
            for key in [key for key in self.totals.routed if key[0] == name]:
                del self.totals.routed[key]
        old = {state.name: state for state in self._members}
        members = list[ReplicaState]()
        for name, report in reports.items():
            state = old.get(name)
            if state is None or numbers[name] != self._numbers.get(name):
                state = ReplicaState(name, report.get("queue_s", 0.0), report.get("accepts", True), self._now())
            members.append(state)
        self._members, self._numbers, self.names = tuple(members), numbers, tuple(numbers)
