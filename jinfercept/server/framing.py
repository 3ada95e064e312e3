"""Where one request ends and the next begins, as an ASGI application around the whole application.

An answer that is sent before the request's body was read ends the connection: what is left of the body cannot become a request.
Requests whose framing is ambiguous are refused.
"""

import asyncio
from contextlib import suppress
from typing import final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfercept.server.errors import ApiError

_DRAIN_S = 2.0
_DRAIN_BYTES = 2**26
"""Bounds for dropping the rest of a body after the answer, so that a client that writes all before it reads gets the answer."""


@final
class Framing:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        app = _refusal(scope["http_version"], headers) or self._app
        if "transfer-encoding" not in headers and headers.get("content-length", "0").strip("0") == "":
            await app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, "expect" in headers)
        try:
            await app(scope, exchange.receive, exchange.send)
        finally:
            await exchange.finish()


@final
class _Exchange:
    """A request with a body, and its answer.

    Args:
        waits: whether the client sends the body only after `100 Continue`, which the first `receive` sends.
    """

    def __init__(self, receive: Receive, send: Send, waits: bool) -> None:
        self._receive, self._send, self._waits = receive, send, waits
        self._unread = True
        self._status = 0
        self._held = False

    async def receive(self) -> Message:
        self._waits = False
        message = await self._receive()
        self._unread = self._unread and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._unread:
                MutableHeaders(scope=message)["connection"] = "close"
                self._held = True
        elif self._held:
            message = {**message, "more_body": True}
        await self._send(message)

    async def finish(self) -> None:
        """Ends an answer that was sent early, once the rest of the body is read, for a client that is not too slow (408)."""
        if not self._held:
            return
        if not self._waits and self._status != 408:
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await self._drain()
        await self._send({"type": "http.response.body"})

    async def _drain(self) -> None:
        dropped = 0
        while self._unread and dropped < _DRAIN_BYTES:
            dropped += len((await self.receive()).get("body", b""))


def _refusal(version: str, headers: Headers) -> ASGIApp | None:
    """The answer to a request of another protocol, or of two lengths (RFC 9112, 6.1); None: it is served."""
    if not version.startswith("1."):
        error = ApiError.bad(f"HTTP/{version} is not served: send HTTP/1.1")
    elif "transfer-encoding" in headers and "content-length" in headers:
        error = ApiError.bad("the request has both Transfer-Encoding and Content-Length: send one of them")
    else:
        return None
    return JSONResponse(error.body, error.status_code, {"connection": "close"})
