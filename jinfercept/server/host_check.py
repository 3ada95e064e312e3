"""Middleware that refuses requests for hosts by which clients do not reach this server.

Starlette's `TrustedHostMiddleware` cuts IPv6 addresses at their first colon, has no rule for addresses, and answers in plain
text.
"""

from typing import final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jinfercept.server.allowed_hosts import AllowedHosts
from jinfercept.server.errors import ApiError, error_response

_SHOWN = 256
"""Maximum characters of a host in a message."""


@final
class HostCheck:
    """ASGI middleware. A request that names no host, as HTTP/1.0 allows, is served: no web page sends one.

    Args:
        app: the wrapped application.
        hosts: the allowed hosts.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                host = value.decode("latin-1")
                if name == b"host" and not self._hosts.allows(host):
                    await error_response(Request(scope), misdirected(host))(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def misdirected(host: str) -> ApiError:
    """Status 421, for a request that names another host."""
    message = (
        f"this server is not reached as {host[:_SHOWN]!r}: use localhost or an IP address, or start the server with "
        "--allowed-hosts NAME"
    )
    return ApiError(421, message, code="host_not_allowed")
