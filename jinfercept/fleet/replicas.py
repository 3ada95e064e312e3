"""How a front talks to replicas: requests as plain values, tickets that choose a replica, and what a replica answers.

Ray passes keyword arguments of a call unchanged to the request router of the same process, and pickled to the replica. So a
ticket brings the router the front's tables, and a replica nothing.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

from starlette.types import Scope

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.routes import Reports, Routes
from jinfercept.fleet.routing import Route
from jinfercept.sched.profile import Profile
from jinfercept.serve.routes.guarded_route import FRAME

_KEPT = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "client", "server", FRAME),
)


class HttpCall(NamedTuple):
    scope: Mapping[str, Any]  # of ASGI, with the values that can be pickled
    body: bytes = b""  # decoded, so that the request has no `content-encoding`

    @property
    def path(self) -> str:
        return self.scope["path"]

    @classmethod
    def of(cls, scope: Scope, request_id: str, body: bytes = b"") -> "HttpCall":
        """The request of a scope, named by `request_id`."""
        replaced = (b"content-encoding", b"x-request-id")
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"] if name not in replaced]
        headers.append((b"x-request-id", request_id.encode("latin-1")))
        return cls({name: scope[name] for name in _KEPT if name in scope} | {"headers": headers, "root_path": ""}, body)


class HttpReply(NamedTuple):
    """A whole response of a replica."""

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case, and values
    body: bytes


class ReplicaLostError(Exception):
    """A replica ended while it worked on a request."""


class IncomingRequest(NamedTuple):
    """A request that was read."""

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
        """The replica that was chosen last; "": none."""
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
        """Pickles nothing: a replica gets `False`."""
        return bool, ()


DETAILS = "jinfercept.details"
"""Type of the last message of an answer: fields of its log line, in `details`. The first message with a status has some too."""

type Messages = Sequence[Mapping[str, Any]]
"""ASGI messages of a response, some of them together."""


class ReplicaFacts(NamedTuple):
    """Facts of a replica that a front needs when it starts.

    Attributes:
        secret: of the fleet's keys.
        profile: prices of recomputation.
        chunk_tokens: most prompt tokens of a step.
        pool_tokens: of its pools together.
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
