"""The middleware that a server's application and a fleet's front share: access log, check of hosts, CORS, answers to HEAD."""

from collections.abc import Sequence
from typing import final

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfercept.server.http.access_log import AccessLog, RequestCounter
from jinfercept.server.http.host_check import HostCheck
from jinfercept.server.options import ServerOptions

_NAMES = ("x-request-id", "request-id")


@final
class HeadRequests:
    """ASGI middleware around an application that knows no HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The client of a stream has its end at once, so that the application sees it disconnect."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)


def add_middleware(app: FastAPI, options: ServerOptions, counter: RequestCounter, shown: Sequence[str] = ()) -> None:
    """Log and count all requests of an application, refuse those for other hosts, let web pages of allowed origins use it, and
    answer HEAD as GET.

    Args:
        counter: counts the requests in progress.
        shown: further headers of responses that web pages may read.
    """
    app.add_middleware(HeadRequests)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=[*_NAMES, *shown],
        )
    if (hosts := options.hosts()) is not None:
        app.add_middleware(HostCheck, hosts=hosts, origins=options.allowed_origins)
    app.add_middleware(AccessLog, service=counter)
