"""How a front talks to replicas: a protocol, which `ray_handle` implements."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from prometheus_client.metrics_core import Metric

from jinfercept.fleet.http_call import HttpCall, HttpReply
from jinfercept.fleet.ticket import Ticket
from jinfercept.sched.profile import Profile

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
        contexts: that it holds: tenant, key and tokens of each.
    """

    replica: str
    secret: bytes
    profile: Profile
    chunk_tokens: int
    contexts: Sequence[tuple[str, bytes, int]]


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

    async def reply(self, call: HttpCall, ticket: Ticket) -> HttpReply:
        """A whole response, for small ones."""
        ...

    async def metrics(self, ticket: Ticket) -> tuple[str, list[Metric]]: ...

    async def holds(
        self, kind: Literal["call", "response"], name: str, tenant: str | None, ticket: Ticket
    ) -> tuple[str, int]:
        """Name of a replica, and whether it has a waiting call or a stored response of a tenant: 0 if not, 2 if it generates
        the response now.
        """
        ...

    async def facts(self, ticket: Ticket) -> ReplicaFacts:
        """The facts that a front needs when it starts."""
        ...
