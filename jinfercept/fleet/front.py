"""The front of a fleet: an ASGI application that checks keys, reads bodies, and has each request answered by one replica.

Keys, limits of bodies and error responses are those of `server/`; the replicas run the same server, and check everything again.
Requests that concern all replicas are in `fan_out`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, final

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jinfercept.fleet.conversations import RoutingHint, find_conversation, response_key
from jinfercept.fleet.relay import Relay, lost_error
from jinfercept.fleet.replicas import (
    HttpCall,
    IncomingRequest,
    Messages,
    ReplicaFacts,
    ReplicaLostError,
    Replicas,
    Routes,
    Ticket,
)
from jinfercept.fleet.routing import NoReplicaError, Router
from jinfercept.serve.access.key_limits import ServedState
from jinfercept.serve.http.access_log import DETAILS
from jinfercept.serve.http.middleware import add_handlers, add_middleware
from jinfercept.serve.http.request_body import disconnected, whole_body
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.protocols.anthropic.dialect import REQUEST_ID, authorizations
from jinfercept.serve.protocols.errors import ApiError, aborted, shutting_down

log = logging.getLogger("jinfercept.serve")

BEGIN_S = 10.0
"""Seconds in which a replica has to begin with a request."""
_DRAINED_S = 5
_COUNTED_S = 5.0
_DRAINED = "drained"
_RESPONSES = "/v1/responses"
_GENERATING = (
    *("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"),
    *(_RESPONSES, f"{_RESPONSES}/compact", "/v1/messages"),
)
_SMALL_BYTES = 2**14
_STORED = "/v1/responses/"


@final
class FleetFront(ServedState):
    """The front.

    Args:
        connect: connects to the replicas, on the event loop.
        model: name of the model in metrics.
        make_router: makes the router from what the first replica knows.
        begin_s: seconds in which a replica has to begin with a request; then another one is asked.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Replicas]],
        options: ServerOptions,
        model: str,
        make_router: Callable[[ReplicaFacts], Router] = lambda facts: Router(
            facts.profile, chunk_tokens=facts.chunk_tokens, pool_tokens=facts.pool_tokens
        ),
        begin_s: float = BEGIN_S,
    ) -> None:
        super().__init__(options)
        self.model = (*options.served_model_name, model)[0]
        self._connect, self._make_router, self._begin_s = connect, make_router, begin_s
        self._random = Random()
        self._replicas: Replicas | None = None
        self._facts: ReplicaFacts | None = None
        self._routes: Routes | None = None
        self._tasks = set[asyncio.Task[None]]()

    @property
    def replicas(self) -> Replicas:
        assert self._replicas is not None
        return self._replicas

    @property
    def routes(self) -> Routes:
        assert self._routes is not None
        return self._routes

    async def start(self) -> None:
        """Meet the replicas, and learn their prices. Raises `NoReplicaError`."""
        self._replicas = await self._connect()
        self._routes = Routes(Router(None))  # before any price is known
        facts: ReplicaFacts = await self.replicas.ask("facts", Ticket(self._routes, RoutingHint()))
        self._facts = facts
        self._routes.use(self._make_router(facts))

    async def drain(self, timeout_s: float) -> None:
        self.draining = True
        await self.until_idle(timeout_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel(_DRAINED)
        if tasks:
            await asyncio.wait(tasks, timeout=_DRAINED_S)

    # -- one request -----------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered by one replica."""
        request, details = Request(scope, receive), scope[DETAILS]
        try:
            incoming = await self.read(request)
        except ClientDisconnect:
            details["disconnected"] = True
            return
        call, hint = incoming.call, incoming.hint
        ended = asyncio.Event()
        has_left = False

        async def send_noting(message: Message) -> None:
            if not has_left:
                await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                ended.set()

        limited = call.path in _GENERATING
        if limited:
            self.limits.check(hint.tenant, 1, 0)
            self.limits.began(hint.tenant, 1, 0)
        self.request_started()
        answering = asyncio.ensure_future(self._answer(incoming, details, send_noting))
        self._tasks.add(answering)

        def uncount(answering: asyncio.Task[None]) -> None:
            self._tasks.discard(answering)
            if limited:
                used = (details.get(f"{part}_tokens", 0) for part in ("prompt", "completion"))
                self.limits.ended(hint.tenant, 1, sum(used))
            self.request_ended()

        answering.add_done_callback(uncount)
        leaving = asyncio.ensure_future(disconnected(receive))
        ending = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait((answering, leaving, ending), return_when=asyncio.FIRST_COMPLETED)
            if ended.is_set() and not incoming.background:  # what follows are the counts of the request
                await asyncio.wait((answering,), timeout=_COUNTED_S)
            if answering.done():
                answering.result()
            elif not ended.is_set():
                details["disconnected"] = True
        finally:
            has_left = True
            leaving.cancel()
            ending.cancel()
            if not answering.done() and not incoming.background:
                answering.cancel()
                with suppress(asyncio.CancelledError):
                    await answering

    async def read(self, request: Request) -> IncomingRequest:
        """A request with its body, and what its replica is chosen by.

        Raises:
            ClientDisconnect: the client closed the connection before the end of the body.
            ApiError: 401, 408, 413; 503 while the front drains.
        """
        scope, path = request.scope, request.url.path
        reads = request.method not in ("GET", "OPTIONS")
        tenant = ""
        if reads or path.startswith("/v1/"):
            tenant = self.check_key(request)
        if reads and self.draining and path in _GENERATING:
            raise shutting_down()
        body = await whole_body(request, self) if reads else b""
        call = HttpCall.of(scope, scope[REQUEST_ID], body)
        hint, fields = await self._hint(request, body, tenant)
        prefer = ""
        if path.startswith(_STORED):
            prefer = self.routes.maker(tenant, path.removeprefix(_STORED).partition("/")[0])
        elif path.startswith("/inbox/"):
            call_id, watched = path.removeprefix("/inbox/").partition("/")[0], self.keys.watched_by(tenant)
            replies = await self.ask_all(lambda ticket: self.replicas.ask("has_call", ticket, call_id, watched))
            prefer = max(replies, default="")
        salt = fields.get("cache_salt")
        background = path == _RESPONSES and fields.get("background") is True
        return IncomingRequest(call, hint, prefer, salt if isinstance(salt, str) else "", background)

    def plain_call(self, request: Request) -> HttpCall:
        return HttpCall.of(request.scope, request.scope[REQUEST_ID])

    def check_key(self, request: Request) -> str:
        """The tenant of a request. Raises 401."""
        tenant = self.keys.check(*authorizations(request.scope))
        if tenant:
            request.scope[DETAILS]["key"] = self.keys.name(tenant)
        return tenant

    async def _hint(self, request: Request, body: bytes, tenant: str) -> tuple[RoutingHint, Mapping[str, Any]]:
        headers = {name.lower(): value for name, value in request.headers.items()}

        def find() -> tuple[RoutingHint, Mapping[str, Any]]:
            try:
                parsed = from_json(body, allow_inf_nan=False) if body else None
            except ValueError:
                parsed = None
            fields = parsed if isinstance(parsed, dict) else {}
            assert self._facts is not None
            return (
                find_conversation(request.method, request.url.path, headers, fields, tenant, self._facts.secret),
                fields,
            )

        return find() if len(body) <= _SMALL_BYTES else await asyncio.to_thread(find)

    async def ask_all[T](self, ask: Callable[[Ticket], Awaitable[T]], timeout_s: float = 5.0) -> list[T]:
        """The answers of all replicas that answer in time."""
        names = self.routes.names

        async def ask_one(name: str) -> T | None:
            ticket = Ticket(self.routes, RoutingHint(), name)
            with suppress(ReplicaLostError, NoReplicaError, TimeoutError, ApiError):
                async with asyncio.timeout(timeout_s):
                    answer = await ask(ticket)
                    if ticket.route is not None and ticket.route.replica == name:
                        return answer
            return None

        answers = await asyncio.gather(*map(ask_one, names))
        return [answer for answer in answers if answer is not None]

    async def _answer(self, incoming: IncomingRequest, logged: dict[str, Any], send: Send) -> None:
        """Relay the answer of one replica, or of a second one if the first is lost before anything was sent.

        Of a response in the background it returns at the response's own end.
        """
        call, hint, prefer = incoming.call, incoming.hint, incoming.prefer

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(incoming, ticket, relay, logged)
            await send(message)

        for last in (False, True):
            ticket = Ticket(self.routes, hint, prefer)
            relay = Relay(call.path, ticket, send_noting)
            try:
                answer = await self._begun(call, ticket)
                if answer is not None:
                    await relay.run(answer)
                elif not last and (alternatives := [name for name in self.routes.names if name != ticket.chosen]):
                    prefer = self._random.choice(alternatives)
                    continue
                else:
                    message = "every replica is starting or full; fix: retry later"
                    raise ApiError(503, message, code="no_replica", headers={"Retry-After": "5"})
            except ReplicaLostError as error:
                retry = not last and not self.options.tools  # the server's tools may not run twice
                self.routes.lost(hint, ticket.chosen, retry)
                log.warning("replica %s has ended before its answer to %s", ticket.chosen, call.path[:256])
                if not retry:
                    raise lost_error() from error
                continue
            except asyncio.CancelledError as cancelled:
                if cancelled.args != (_DRAINED,):
                    raise
                await relay.fail(aborted())
            finally:
                self._count(incoming, ticket, relay, logged)
            return

    async def _begun(self, call: HttpCall, ticket: Ticket) -> AsyncGenerator[Messages] | None:
        """The response of a replica that has begun with a request; None: none has begun in time."""
        answer = self.replicas.answer(call, ticket)
        try:
            async with asyncio.timeout(self._begin_s):
                await anext(answer)
        except BaseException as error:
            with suppress(Exception):
                await answer.aclose()
            if isinstance(error, TimeoutError | NoReplicaError):
                return None
            raise
        return answer

    def _note(self, incoming: IncomingRequest, ticket: Ticket, relay: Relay, logged: dict[str, Any]) -> None:
        if (route := ticket.route) is not None:
            logged.update(relay.details)
            logged.update(replica=route.replica, route=route.reason)
            if incoming.call.path == _RESPONSES and "id" in relay.details:
                self.routes.made(incoming.hint.tenant, relay.details["id"], route.replica)

    def _count(self, incoming: IncomingRequest, ticket: Ticket, relay: Relay, logged: dict[str, Any]) -> None:
        self._note(incoming, ticket, relay, logged)
        if ticket.route is not None and incoming.call.path in _GENERATING:
            key = None
            if incoming.call.path == _RESPONSES and "id" in relay.details:
                assert self._facts is not None
                key = response_key(relay.details["id"], incoming.hint.tenant, self._facts.secret, incoming.salt)
            self.routes.finished(incoming.hint, ticket.route, relay.details, key)


async def _nothing() -> None:
    pass


def create_front(front: FleetFront, *routers: Any, end: Callable[[], Awaitable[None]] = _nothing) -> FastAPI:
    """The ASGI application of a front. Its lifespan meets the replicas.

    Args:
        front: answers what no router takes.
        routers: of requests that concern all replicas.
        end: called when the application ends.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        await front.start()
        watching = asyncio.create_task(front.watch_key_file())
        yield
        watching.cancel()
        await end()

    app = FastAPI(lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    app.state.front, app.state.refused = front, Counter[str]()
    add_handlers(app)
    for router in routers:
        app.include_router(router)
    app.router.routes.append(Route("/{path:path}", front))
    add_middleware(app, front, ("x-jinfercept-replica", "x-jinfercept-route"))
    return app
