"""HTTP for the SDK's client of an MCP server: a fault is the error of one request, where the SDK would end the connection."""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, final, override

import httpx2
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, JSONRPCNotification, JSONRPCRequest
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from jinfercept.tools.mcp_answers import MAX_ANSWER_BYTES, readable_json

log = logging.getLogger(__name__)

SESSION_ENDED, UNREACHED = "jinfercept: session ended", "jinfercept: no answer"
"""`data` of errors that are made here: the request was refused, as its session has ended; no whole response came."""

_NO_SESSION = (404, 400, 410)
"""Statuses for an unknown session: the protocol's, and those of other servers, which have them for other faults too."""

_CANCELLED = "notifications/cancelled"
_NOTICE_S = 30.0


@asynccontextmanager
async def http_streams(
    server: str, url: str, headers: Mapping[str, str], session_ended: Callable[[], object]
) -> AsyncGenerator[Any]:
    """Streams of messages from and to a server at a URL.

    Args:
        server: name of the server, for errors.
        session_ended: called when a request is refused since its session has ended.
    """
    async with (
        _McpHttp(headers=headers, timeout=httpx2.Timeout(30.0, read=None, pool=None)) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=MAX_ANSWER_BYTES) as (messages, write),
    ):
        http.server, http.session_ended = server, session_ended
        yield messages, _Requests(write)


@final
class _Requests(AbstractAsyncContextManager[Any]):
    """Messages for the SDK. It closes the POST of a request only when another has its id: so a cancellation is sent as one."""

    def __init__(self, write: Any) -> None:
        self._write = write

    @override
    async def __aexit__(self, *error: object) -> None:
        await self._write.aclose()

    async def send(self, item: SessionMessage) -> None:
        message = item.message
        if isinstance(message, JSONRPCNotification) and message.method == _CANCELLED and message.params:
            item = SessionMessage(JSONRPCRequest(id=message.params["requestId"], **message.model_dump()))
        await self._write.send(item)


@final
class _McpHttp(httpx2.AsyncClient):
    server: str
    session_ended: Callable[[], object]

    @override
    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """As the base class. A POST's error status or failed connection becomes a JSON-RPC error, which the SDK passes on."""
        if request.method != "POST":
            return await super().send(request, **options)
        message = json.loads(request.content)
        if message.get("method") == _CANCELLED:
            if request.headers.get(MCP_PROTOCOL_VERSION_HEADER) not in MODERN_PROTOCOL_VERSIONS:
                with suppress(httpx2.RequestError):
                    message.pop("id")
                    await self._notify(request, message)
            return httpx2.Response(202, request=request)
        try:
            response = _readable(await super().send(request, **options))
            if response.is_error or not _is_stream(response):
                try:
                    await response.aread()
                finally:
                    await response.aclose()
            if not response.is_error:
                return response
            status, error = response.status_code, _error(response)
            if await self._has_ended(request, status):
                self.session_ended()
                error["data"] = SESSION_ENDED
            error["message"] = f"the MCP server {self.server} answered {error['message']}"
        except httpx2.SSEError as fault:
            status, error = 502, {"code": INTERNAL_ERROR, "message": f"the MCP server {self.server}: {fault}"}
        except httpx2.RequestError as fault:
            problem = f"the MCP server {self.server} did not answer: {type(fault).__name__}: {fault}"
            status, error = 502, {"code": INTERNAL_ERROR, "message": problem, "data": UNREACHED}
        if status in (401, 403, 429) or status >= 500:
            log.warning(error["message"])
        return httpx2.Response(status, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)

    async def _has_ended(self, request: httpx2.Request, status: int) -> bool:
        """Whether a request was refused since its session has ended. If the status does not tell, the session is pinged."""
        if MCP_SESSION_ID not in request.headers or status not in _NO_SESSION:
            return False
        ping = {"jsonrpc": "2.0", "id": "ping", "method": "ping"}
        return status == _NO_SESSION[0] or await self._notify(request, ping) in _NO_SESSION

    async def _notify(self, request: httpx2.Request, message: Mapping[str, Any]) -> int:
        """The status of the answer to a message in the session of a request."""
        names = ("accept", MCP_PROTOCOL_VERSION_HEADER, MCP_SESSION_ID)
        headers = {name: request.headers[name] for name in names if name in request.headers}
        notice = self.build_request("POST", request.url, json=message, headers=headers, timeout=_NOTICE_S)
        response = await super().send(notice, stream=True)
        await response.aclose()
        return response.status_code


def _is_stream(response: httpx2.Response) -> bool:
    return "text/event-stream" in response.headers.get("content-type", "").lower()


def _readable(response: httpx2.Response) -> httpx2.Response:
    """A response of which the SDK can read all texts, and whose length is limited."""
    names = ("content-type", "location", "retry-after", MCP_SESSION_ID)
    headers = {name: response.headers[name] for name in names if name in response.headers}
    readable = httpx2.Response(
        response.status_code, headers=headers, stream=_Body(response), extensions=response.extensions
    )
    readable.request, readable.next_request = response.request, response.next_request
    return readable


@final
class _Body(httpx2.AsyncByteStream):
    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    @override
    async def __aiter__(self) -> AsyncGenerator[bytes]:
        rest, is_stream = bytearray(), _is_stream(self._response)
        async for part in self._response.aiter_bytes():
            rest += part
            if is_stream and (end := max(part.rfind(b"\n"), part.rfind(b"\r")) + 1):
                end += len(rest) - len(part)
                yield readable_json(rest[:end])
                del rest[:end]
            if len(rest) > MAX_ANSWER_BYTES:
                raise httpx2.SSEError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")  # which the SDK awaits
        yield readable_json(rest)

    @override
    async def aclose(self) -> None:
        await self._response.aclose()


def _error(response: httpx2.Response) -> dict[str, Any]:
    """The JSON-RPC error of a response, or one made of its text; with its status in front."""
    try:
        error = json.loads(response.content)["error"]
        error = {"code": int(error["code"]), "message": str(error["message"]), "data": error.get("data")}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        error = {"code": INTERNAL_ERROR, "message": " ".join(response.content.decode(errors="replace").split())[:500]}
    status = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    retry = f", Retry-After: {response.headers['retry-after']}" if "retry-after" in response.headers else ""
    return error | {"message": f"{status}{retry}: {error['message']}".removesuffix(": ")}
