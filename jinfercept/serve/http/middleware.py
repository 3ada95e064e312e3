"""What a server's application and a fleet's front share: access log, check of hosts, CORS, answers to HEAD and to errors."""

from collections.abc import Container, Sequence
from typing import cast, final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfercept.errors import EngineError
from jinfercept.serve.access.key_limits import ServedState
from jinfercept.serve.http.access_log import AccessLog
from jinfercept.serve.http.allowed_hosts import AllowedHosts
from jinfercept.serve.protocols.anthropic.dialect import REQUEST_ID, anthropic_error, speaks_anthropic
from jinfercept.serve.protocols.encoding import EncodedReply
from jinfercept.serve.protocols.errors import ApiError, invalid_body

_BASE_URLS = (
    "; fix: the base URL of OpenAI's clients ends in /v1, that of Anthropic's does not; /openapi.json has all routes"
)
_SHOWN = 256
"""Maximum characters of a method, a path, a host or an origin in a message."""


def add_handlers(app: FastAPI) -> None:
    """Add handlers that answer every error with OpenAI's error object, or with the error object of Anthropic's protocol."""
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(EngineError, _answer_failure)
    app.add_exception_handler(Exception, _answer_failure)


def error_response(request: HTTPConnection, error: ApiError) -> EncodedReply:
    """The response to a request, in the shape of its protocol."""
    body = error.body
    if speaks_anthropic(request.scope):
        request_id = request.scope.get(REQUEST_ID)
        body = anthropic_error(error.status_code, error.detail, error.param, request_id, error.details)
    return EncodedReply(body, error.status_code, error.headers)


async def _answer(request: Request, error: Exception) -> EncodedReply:
    error = cast(HTTPException, error)
    if not isinstance(error, ApiError):
        message = f"{error.detail}: {request.method[:_SHOWN]} {request.url.path[:_SHOWN]}"
        message += _BASE_URLS if error.status_code == 404 else ""
        error = ApiError(error.status_code, message, headers=error.headers)
    if error.status_code == 429:
        request.app.state.refused[error.code or ""] += 1
    return error_response(request, error)


async def _answer_invalid(request: Request, error: Exception) -> EncodedReply:
    problems = cast(RequestValidationError, error).errors()
    wrong = invalid_body([{**problem, "loc": problem["loc"][1:]} for problem in problems])
    return error_response(request, wrong)


async def _answer_failure(request: Request, error: Exception) -> EncodedReply:
    return error_response(request, ApiError.failed(error))


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


def add_middleware(app: FastAPI, service: ServedState, shown: Sequence[str] = ()) -> None:
    """Log and count all requests of an application, refuse those for other hosts, let web pages of allowed origins use it, and
    answer HEAD as GET.

    Args:
        shown: further headers of responses that web pages may read.
    """
    options = service.options
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
    app.add_middleware(AccessLog, service=service)


@final
class HostCheck:
    """Refuses what a web page of another site may send to a server without keys: requests for other hosts, forms, and
    WebSockets.

    A browser asks before it sends a page's request with a JSON body or a header of its own to another site (CORS). It does not
    ask before a POST without a body, or with that of a form, nor before a WebSocket. A request that names no host, as HTTP/1.0
    allows, is served: no web page sends one.

    Args:
        origins: of web pages that may use the server, `*` for all.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, origins: Container[str]) -> None:
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and (error := self._refusal(scope)) is not None:
            await error_response(HTTPConnection(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, is_socket = Headers(scope=scope), scope["type"] == "websocket"
        for host in headers.getlist("host"):
            if not self._hosts.allows(host):
                return misdirected(host)
        origin = headers.get("origin")
        if (
            origin is None
            or not (is_socket or scope["method"] == "POST")
            or "*" in self._origins
            or origin in self._origins
        ):
            return None
        if origin.partition("://")[2].lower() == headers.get("host", "").lower():
            return None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json" and not is_socket:
            return None
        message = f"web pages of {origin[:_SHOWN]!r} may not use this server; fix: --allowed-origins names their origin"
        return ApiError(403, message, code="origin_not_allowed")


def misdirected(host: str) -> ApiError:
    """Status 421, for a request that names another host."""
    message = (
        f"this server is not reached as {host[:_SHOWN]!r}: use localhost or an IP address, or start the server with "
        "--allowed-hosts NAME"
    )
    return ApiError(421, message, code="host_not_allowed")
