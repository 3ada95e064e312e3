"""`/v1/responses` as a WebSocket: a connection over which a client creates one response after another.

Every frame of the client is a request of its own, which the whole application answers as it answers one over HTTP: with the
same checks, limits, log lines and traces. The events of the answer are frames.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import CloseCode

from jinfercept.serve.http.access_log import DETAILS
from jinfercept.serve.protocols.anthropic.dialect import authorizations
from jinfercept.serve.protocols.encoding import encode
from jinfercept.serve.protocols.errors import ApiError, shutting_down
from jinfercept.serve.routes.guarded_route import FRAME, SMALL_BYTES, parsed
from jinfercept.serve.routes.response_run import MEMORY
from jinfercept.serve.service import KEY, Service, service_of
from jinfercept.serve.state.store import SocketMemory

router = APIRouter()

_MOST_REQUESTS = 16
"""Requests of one connection that run or wait for those before them. Their frames have together as many bytes as a body may."""
_KEPT = ("asgi", "client", "http_version", "path", "raw_path", "root_path", "server", "state")
"""Parts of the scope of the handshake that its requests have too."""
_OWN_HEADERS = (b"connection", b"content-encoding", b"content-type", b"sec-websocket-key", b"upgrade", b"x-request-id")
"""Headers of the handshake alone."""


@router.websocket("/v1/responses")
async def create_responses(socket: WebSocket) -> None:
    """Create responses over a WebSocket. A handshake that is refused has the answer of a request over HTTP."""
    service = service_of(socket)
    tenant = service.keys.check(*authorizations(socket.scope))
    socket.scope[DETAILS] |= {"key": service.keys.name(tenant)} if tenant else {}
    if service.draining:
        raise shutting_down()
    connection = _Connection(socket, service, tenant)
    service.sockets.open(tenant, connection.drain)
    try:
        await connection.run()
    finally:
        service.sockets.close(connection.drain)


@final
class _Connection:
    """An open WebSocket. Its requests are answered one after another."""

    def __init__(self, socket: WebSocket, service: Service, tenant: str) -> None:
        self._socket, self._service, self._tenant = socket, service, tenant
        self._memory = SocketMemory(service.state.last)
        self._requests: dict[asyncio.Task[None], int] = {}  # that run or wait, with the bytes of their frames
        self._turn = asyncio.Lock()
        self._gone = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        await self._socket.accept()
        try:
            while not self._gone.is_set() and (message := await self._socket.receive())["type"] == "websocket.receive":
                await self._take(message)
                await asyncio.sleep(0)  # connections take turns, however many frames each has sent
        finally:
            self._gone.set()
            if self._closing is not None:
                self._closing.cancel()
            if self._requests:
                await asyncio.wait(self._requests)
            self._memory.close()

    def drain(self) -> None:

        async def close() -> None:
            while self._requests:
                await asyncio.wait(self._requests)
            with suppress(WebSocketDisconnect, RuntimeError):  # the client was faster
                await self._socket.close(CloseCode.SERVICE_RESTART, "the server is shutting down")

        self._closing = asyncio.ensure_future(close())

    # -- a request -----------------------------------------------------------------------------------------------------

    async def _take(self, message: Message) -> None:
        """Begin with the request of a frame, or refuse it."""
        try:
            if (text := message.get("text")) is None:
                raise ApiError.bad("a frame is JSON text; got bytes", code="invalid_json")
            if await self._read(frame := text.encode()) == "response.processed":  # Codex says what it has read
                return
            waiting, most_bytes = len(self._requests), self._service.options.max_body_size
            if waiting >= _MOST_REQUESTS or (waiting and sum(self._requests.values()) + len(frame) > most_bytes):
                reason = f"{waiting} requests of this connection run or wait; fix: wait for one to end"
                raise ApiError(429, reason, code="queue_full", headers={"Retry-After": "1"})
        except ApiError as error:
            await self._send_error(error.status_code, error.body["error"], (error.headers or {}).get("Retry-After"))
            return
        task = asyncio.ensure_future(self._answer(frame))
        self._requests[task] = len(frame)
        task.add_done_callback(self._requests.pop)

    async def _read(self, frame: bytes) -> str:
        """Type of an event. The rest is read again when it is answered: as objects it has 25 times its bytes."""
        if len(frame) <= SMALL_BYTES:
            return _read_event(frame)
        request = Request(self._scope({KEY: self._tenant}), self._left)
        return await self._service.prepare(request, lambda: _read_event(frame), num_bytes=len(frame))

    async def _answer(self, frame: bytes) -> None:
        """Have the application answer a request, behind those before it."""
        scope = self._scope({FRAME: True, MEMORY: self._memory})
        body: list[Message] = [{"type": "http.request", "body": frame}]
        status, retry = 0, None

        async def receive() -> Message:
            return body.pop() if body else await self._left()

        async def send(message: Message) -> None:
            nonlocal status, retry
            if message["type"] == "http.response.start":
                status, retry = message["status"], Headers(raw=message["headers"]).get("retry-after")
            elif status == 200:
                await self._send_event(message["body"])
            else:
                await self._send_error(status, json.loads(message["body"])["error"], retry)

        async with self._turn:
            with suppress(Exception):  # it is answered, and logged
                if not self._gone.is_set():
                    await self._socket.app(scope, receive, send)

    async def _left(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def _scope(self, more: Mapping[str, Any]) -> Scope:
        """The scope of a request: that of the handshake, as a POST of JSON, and what it has of its own."""
        scope = self._socket.scope
        headers = [pair for pair in scope["headers"] if pair[0] not in _OWN_HEADERS]
        return {name: scope[name] for name in _KEPT} | {
            "type": "http",
            "scheme": "http",
            "method": "POST",
            "query_string": b"",
            "headers": [*headers, (b"content-type", b"application/json")],
            **more,
        }

    # -- frames --------------------------------------------------------------------------------------------------------

    async def _send_event(self, event: bytes) -> None:
        """Send a server-sent event. One without a name is the error with which a stream has failed; comments keep alive."""
        name, _, data = event.partition(b"data: ")
        if name.startswith(b"event: "):
            await self._send(data[:-2])
        elif data:
            await self._send_error(500, json.loads(data.partition(b"\n")[0])["error"])

    async def _send_error(self, status: int, error: dict[str, Any], retry: str | None = None) -> None:
        more = {"headers": {"retry-after": retry}} if retry is not None else {}
        await self._send(encode({"type": "error", "status": status, "error": error | more}))

    async def _send(self, data: bytes) -> None:
        try:
            await self._socket.send_text(data.decode())
        except (WebSocketDisconnect, RuntimeError):  # of a connection that is lost, and that is closed
            self._gone.set()


def _read_event(frame: bytes) -> str:
    """Type of a client's event. Raises 400 for what is no event that a client may send."""
    event = parsed(frame)
    if not isinstance(event, dict) or (kind := event.get("type")) is None:
        raise ApiError.bad("a frame is an object, with type: response.create", "type")
    if kind not in ("response.create", "response.processed"):
        raise ApiError.bad(f"events of type {f'{kind}'[:80]!r} are not supported; fix: response.create", "type")
    for name, fix in (("background", "POST /v1/responses"), ("stream_id", "open a connection for each stream")):
        if event.get(name):
            raise ApiError.bad(f"{name} is not supported over a WebSocket; fix: {fix}", name)
    return kind
