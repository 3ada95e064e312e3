"""Middleware that logs one line per HTTP request, and per WebSocket: id, status, tokens, seconds. Adds `x-request-id` to every
response.

Anthropic's clients read it as `request-id`.
"""

import asyncio
import logging
import re
import time
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfercept.serve.access.key_limits import ServedState
from jinfercept.serve.observe.log_lines import FIELDS, key_values
from jinfercept.serve.protocols.anthropic.dialect import REQUEST_ID, speaks_anthropic

if TYPE_CHECKING:
    from jinfercept.serve.observe.traces import RequestTrace

log = logging.getLogger("jinfercept.serve")

TRACE: "ContextVar[RequestTrace | None]" = ContextVar("jinfercept_trace", default=None)
"""The trace of the HTTP request that the current task serves; None while traces are off, and if it generates nothing."""

DETAILS = "jinfercept.details"
"""Key of a request's scope: a dict in which routes put further fields of its log line."""

PLACE = "place_at_door"
"""The place of a new conversation that waits for others: a field of the log line, and of the header `x-place-at-door`."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SHOWN = 256
"""Maximum characters of a method and of a path in a log line."""
_QUIET = frozenset({"/health", "/ready", "/metrics", "/live", "/inbox"})
"""Paths that monitors poll: their lines are logged at level debug."""


@final
class AccessLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, service: ServedState) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        is_socket = scope["type"] == "websocket"
        began_s = time.monotonic()
        header = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = header if _ID.fullmatch(header) else uuid.uuid4().hex
        details: dict[str, Any] = {"request_id": name}
        scope[DETAILS], scope[REQUEST_ID] = details, name
        TRACE.set(None)  # a pipelined request inherits the context of the one before it
        status = 499  # the client disconnects before the response starts

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = 101
            elif message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                if PLACE in details:
                    headers["x-place-at-door"] = f"{details[PLACE]}"
                if speaks_anthropic(scope):
                    headers["request-id"] = name
            await send(message)

        if not is_socket:  # a drain waits for requests, those of a WebSocket among them
            self._service.request_started()
        try:
            await self._app(scope, receive, send_named)
        except Exception:
            status = 500
            raise
        except asyncio.CancelledError:
            if not self._service.draining:
                raise
            details["cut_off"] = True  # its seconds at the end of the server are over
        finally:
            if not is_socket:
                self._service.request_ended()
            method, path = "GET" if is_socket else scope["method"][:_SHOWN], scope["path"][:_SHOWN]
            line = {"request_id": name, "method": method, "path": path, "status": status}
            line |= details | {"seconds": round(time.monotonic() - began_s, 4)}
            if (trace := TRACE.get()) is not None:
                trace.release(status)
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", key_values(line), extra={FIELDS: line})
