"""One line for every request: its id, what came of it, tokens and seconds. Also gives every answer its `x-request-id`."""

import asyncio
import logging
import re
import time
import uuid
from typing import Any, final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfercept.server.log_lines import FIELDS, key_values
from jinfercept.server.service import Service

log = logging.getLogger("jinfercept.server")

DETAILS = "jinfercept.details"
"""Where, in a request's scope, endpoints put what its line is to say besides."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SHOWN = 256
"""Characters of a method and of a path in a line."""
_QUIET = frozenset({"/health", "/ready", "/metrics", "/live", "/inbox"})
"""Asked all the time; their lines are at level debug."""


@final
class AccessLog:
    """An ASGI application around another one.

    Args:
        service: is told when requests begin and end.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        details: dict[str, Any] = {}
        scope[DETAILS] = details
        status = 499  # unless an answer begins: nobody is there to read it

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        self._service.entered()
        try:
            await self._app(scope, receive, send_named)
        except Exception:
            status = 500
            raise
        except asyncio.CancelledError:
            if not self._service.draining:
                raise
            details["cut_off"] = True  # by a second signal
        finally:
            self._service.left()
            method, path = scope["method"][:_SHOWN], scope["path"][:_SHOWN]
            line = {"request_id": name, "method": method, "path": path, "status": status}
            line |= details | {"seconds": round(time.monotonic() - began_s, 4)}
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", key_values(line), extra={FIELDS: line})
