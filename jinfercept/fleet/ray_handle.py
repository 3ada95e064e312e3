"""Replicas behind a handle of Ray Serve. Imports Ray."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, final

import grpc
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from jinfercept.fleet.http_call import HttpCall, HttpReply, ReplicaLostError
from jinfercept.fleet.replicas import Messages
from jinfercept.fleet.routing import NoReplicaError
from jinfercept.fleet.ticket import Ticket


@final
class RayReplicas:
    """See `Replicas`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True, method_name="answer")

    async def answer(self, call: HttpCall, ticket: Ticket) -> AsyncGenerator[Messages]:
        with _errors():
            response: Any = _alone(lambda: self._stream.remote(call, ticket=ticket))
            try:
                async for messages in response:
                    yield messages
            finally:
                response.cancel()

    async def _ask(self, method: str, ticket: Ticket, *args: Any) -> Any:
        with _errors():
            return await _alone(lambda: self._handle.options(method_name=method).remote(*args, ticket=ticket))

    async def reply(self, call: HttpCall, ticket: Ticket) -> HttpReply:
        return await self._ask("reply", ticket, call)

    async def metrics(self, ticket: Ticket) -> Any:
        return await self._ask("metrics", ticket)

    async def holds(self, kind: Any, name: str, tenant: str | None, ticket: Ticket) -> Any:
        return await self._ask("holds", ticket, kind, name, tenant)

    async def facts(self, ticket: Ticket) -> Any:
        return await self._ask("facts", ticket)


def _alone[T](call: Callable[[], T]) -> T:
    """Make a call outside of the HTTP request that an ingress works on.

    Ray Serve gives the calls of one request one id, and its router finds a waiting call by that id: of two at once it would
    find one only. These calls are cancelled here, so nothing is lost.
    """
    return Context().run(call)


@contextmanager
def _errors() -> Iterator[None]:
    """Raises Ray's errors as those of `Replicas`."""
    try:
        yield
    except DeploymentUnavailableError as error:
        raise NoReplicaError(str(error)) from error
    except (RayActorError, RequestCancelledError, grpc.RpcError) as error:
        raise ReplicaLostError(str(error)) from error
