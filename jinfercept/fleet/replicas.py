"""How a front talks to replicas: its tables, requests as values, tickets that choose a replica, and what a replica answers.

Ray passes keyword arguments of a call unchanged to the request router of the same process, and pickled to the replica. So a
ticket brings the router the front's tables, and a replica nothing.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

from starlette.types import Scope

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.routing import NoReplicaError, ReplicaState, Route, Router
from jinfercept.sched.profile import Profile

MOST_RESPONSES = 100_000

type Reports = Mapping[str, Mapping[str, Any]]
"""Last routing stats of the running replicas, by their names."""


class Totals(NamedTuple):
    """Counts since the front began, of requests that generate: by replica and reason, prompt tokens and those found.

    `retried` are the lost requests that another replica was given.
    """

    routed: Counter[tuple[str, str]]
    prompt_tokens: Counter[str]
    found_tokens: Counter[str]
    lost: int = 0
    retried: int = 0


@final
class Routes:
    """Chooses replicas by price. Thread-safe: Ray's router may run in a thread of its own.

    `names` are the running replicas, as of the last request.
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
        with self._lock:
            self._read(reports)
            if prefer in reports:
                return Route(prefer, "session", 0, 0.0)
            try:
                return self._router.route(hint, self._members, self._now())
            except NoReplicaError:  # all of them drain or are full: their own answer says so
                return Route(min(reports), "load", 0, 0.0)

    def taken(self, hint: RoutingHint, chosen: Route, replica: str) -> Route:
        with self._lock:
            if replica != chosen.replica:
                self._router.failed(hint, chosen.replica)
                chosen = Route(replica, "moved", 0, chosen.price_s)
            return chosen

    def finished(self, hint: RoutingHint, route: Route, details: dict[str, Any], response_key: bytes | None) -> None:
        """Note the end of a request that generates, with the fields of its log line."""
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
        with self._lock:
            self._router = router

    def _read(self, reports: Reports) -> None:
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


_KEPT = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "client", "server"),
)


class HttpCall(NamedTuple):
    scope: Mapping[str, Any]  # of ASGI, with the values that can be pickled
    body: bytes = b""  # decoded, so that the request has no `content-encoding`

    @property
    def path(self) -> str:
        return self.scope["path"]

    @classmethod
    def of(cls, scope: Scope, request_id: str, body: bytes = b"") -> "HttpCall":
        replaced = (b"content-encoding", b"x-request-id")
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"] if name not in replaced]
        headers.append((b"x-request-id", request_id.encode("latin-1")))
        return cls({name: scope[name] for name in _KEPT if name in scope} | {"headers": headers, "root_path": ""}, body)


class HttpReply(NamedTuple):
    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case, and values
    body: bytes


class ReplicaLostError(Exception):
    """A replica ended while it worked on a request."""


class IncomingRequest(NamedTuple):
    call: HttpCall
    hint: RoutingHint
    prefer: str  # the replica that answers if it runs; "": any
    salt: str
    background: bool


@final
class Ticket:
    """One attempt to have a request answered, by the replica `prefer` if it runs; by price if that is ""."""

    def __init__(self, table: Routes, hint: RoutingHint, prefer: str = "") -> None:
        self._table, self.hint, self._prefer = table, hint, prefer
        self._chosen: Route | None = None
        self.route: Route | None = None  # to the replica that has taken the request

    @property
    def chosen(self) -> str:
        return self._chosen.replica if self._chosen is not None else ""

    def choose(self, reports: Reports) -> str:
        """The name of a replica among the running ones. Decides again if it is called again for other replicas."""
        if self._chosen is None or self._chosen.replica not in reports:
            self._chosen = self._table.choose(self.hint, self._prefer, reports)
        return self._chosen.replica

    def taken(self, replica: str) -> None:
        if self._chosen is not None:
            self.route = self._table.taken(self.hint, self._chosen, replica)

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()  # a replica gets `False`, and no table


DETAILS = "jinfercept.details"
"""Type of the last message of an answer: fields of its log line, in `details`. The first message with a status has some too."""

type Messages = Sequence[Mapping[str, Any]]
"""ASGI messages of a response, some of them together."""


class ReplicaFacts(NamedTuple):
    """Facts of a replica that a front needs when it starts.

    `chunk_tokens` are the most prompt tokens of a step, `pool_tokens` those of its pools together.
    """

    secret: bytes
    profile: Profile
    chunk_tokens: int
    pool_tokens: int


class Replicas(Protocol):
    """The running replicas of one application. A ticket chooses one of them.

    Raises, by every method:
        ReplicaLostError: the replica ended meanwhile.
        NoReplicaError: no replica runs.
    """

    def answer(self, call: HttpCall, ticket: Ticket) -> AsyncGenerator[Messages]:
        """The response to a request as it is made; the first item is empty, and says that a replica has begun. Closing the
        generator ends the request at the replica, as a closed connection does.
        """
        ...

    async def ask(self, method: str, ticket: Ticket, *arguments: Any) -> Any:
        """What a method of the replica's `ReplicaApp` returns: `reply`, `metrics`, `has_call` or `facts`."""
        ...
