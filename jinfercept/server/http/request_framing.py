"""ASGI middleware for HTTP message framing: the end of one request and the beginning of the next.

An answer that is sent before the body of its request is read closes the connection, so that the rest of the body is never
parsed as a request. Requests with ambiguous framing are refused.
"""

from typing import final
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfercept.protocols.errors import ApiError


@final
class RequestFraming:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["raw_path"].startswith((b"http://", b"https://")):
            scope = _origin_form(scope)
        headers = Headers(scope=scope)
        app = _refusal(scope["http_version"], headers) or self._app
        if "transfer-encoding" not in headers and headers.get("content-length", "0").strip("0") == "":
            await app(scope, receive, send)
            return
        unread = True

        async def receive_counted() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def send_closing(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await app(scope, receive_counted, send_closing)


def _origin_form(scope: Scope) -> Scope:
    """The scope of a request for `http://host/path`, which servers have to accept (RFC 9112, 3.2.2), with the path only.

    Its host is one more `Host`, so that both are checked.
    """
    host, _, rest = scope["raw_path"].partition(b"://")[2].partition(b"/")
    path, headers = b"/" + rest, [*scope["headers"], (b"host", host)]
    return {**scope, "raw_path": path, "path": unquote(path.decode("ascii")), "headers": headers}


def _refusal(version: str, headers: Headers) -> ASGIApp | None:
    """The answer to a request of another protocol version, or with two lengths (RFC 9112, 6.1); None: it is served."""
    if not version.startswith("1."):
        error = ApiError.bad(f"HTTP/{version} is not served: send HTTP/1.1")
    elif "transfer-encoding" in headers and "content-length" in headers:
        error = ApiError.bad("the request has both Transfer-Encoding and Content-Length: send one of them")
    else:
        return None
    return JSONResponse(error.body, error.status_code, {"connection": "close"})
