"""ASGI middleware in Ray's HTTP proxy: request headers that Ray itself reads cannot fail there, nor change how it serves.

Ray's proxy decodes some headers as UTF-8 and answers status 500 without an error object where it cannot. Others switch off its
notice of clients that disconnect, set its time-outs, or name a model for its multiplexing.
"""

from typing import final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

_OF_RAY = (b"serve-multiplexed-model-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled")
_REQUEST_ID = b"x-request-id"


@final
class ProxyHeaders:
    """Removes headers of requests that only Ray reads and all but the last `x-request-id`, and has the values as UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            scope = {**scope, "headers": readable_headers(scope["headers"])}
        await self._app(scope, receive, send)


def readable_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers that Ray's proxy can read. A value that is not UTF-8 is read as Latin-1; such a `x-request-id` is left out.

    Args:
        headers: names in lower case, and values.
    """
    pairs = [(name, _as_utf8(value)) for name, value in headers if name.replace(b"_", b"-") not in _OF_RAY]
    names = [value for name, value in headers if name == _REQUEST_ID][-1:]
    pairs = [(name, value) for name, value in pairs if name != _REQUEST_ID]
    return pairs + [(_REQUEST_ID, value) for value in names if value.isascii()]


def proxy_middleware() -> list[Middleware]:
    """Called by Ray's proxies when they start, if `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function."""
    return [Middleware(ProxyHeaders)]


def _as_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value
