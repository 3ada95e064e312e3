"""HTTP transport for the SDK's MCP client. A fault fails one request; the SDK by itself would end the connection."""

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

from jinfercept.tools.mcp_answers import MAX_ANSWER_BYTES

log = logging.getLogger(__name__)

SESSION_ENDED, UNREACHED = "jinfercept: session ended", "jinfercept: no answer"
"""`data` of errors that are made here: the request was refused, as its session has ended; no whole response came."""

_NO_SESSION = (404, 410)
"""Statuses for an unknown session; some servers say 400 and name it."""

_CANCELLED = "notifications/cancelled"
_NOTICE_S = 30.0
_SHOWN_CHARS = 500
_KEPT = ("content-type", "location", MCP_SESSION_ID)
"""Headers of a response that is read to its end."""


@asynccontextmanager
async def http_streams(
    server: str, url: str, headers: Mapping[str, str], session_ended: Callable[[], object]
) -> AsyncGenerator[Any]:
    """Streams of messages from and to a server at a URL.

    Args:
        server: name of the server, for errors.
        session_ended: called when the server refuses a request because its session has ended.
    """
    async with (
        _McpHttp(headers=headers, timeout=httpx2.Timeout(30.0, read=None, pool=None)) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=MAX_ANSWER_BYTES) as (messages, write),
    ):
        http.server, http.session_ended = server, session_ended
        yield messages, _Requests(write)


@final
class _Requests(AbstractAsyncContextManager[Any]):
    """The SDK closes the POST of a request only when another request has its id, so a cancellation is sent as a request."""

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
        if request.method != "POST":
            return await super().send(request, **options)
        message = json.loads(request.content)
        if message.get("method") == _CANCELLED:
            if request.headers.get(MCP_PROTOCOL_VERSION_HEADER) not in MODERN_PROTOCOL_VERSIONS:
                with suppress(httpx2.RequestError):
                    await self._cancel(request, message["params"])
            return httpx2.Response(202, request=request)
        data = None
        try:
            response = await super().send(request, **options)
            if response.is_error or not response.headers.get("content-type", "").startswith("text/event-stream"):
                response = await _whole(response)
            if not response.is_error:
                return response
            status, text = response.status_code, " ".join(response.text.split())[:_SHOWN_CHARS]
            problem = f"answered HTTP {status} {response.reason_phrase}: {text}"
            if MCP_SESSION_ID in request.headers and (status in _NO_SESSION or (status == 400 and "session" in text)):
                self.session_ended()
                data = SESSION_ENDED
        except httpx2.RequestError as fault:
            status, problem, data = 502, f"did not answer: {type(fault).__name__}: {fault}", UNREACHED
        if status in (401, 403, 429) or status >= 500:
            log.warning("the MCP server %s %s", self.server, problem)
        # a JSON-RPC error fails this request alone: the SDK passes it on
        error = {"code": INTERNAL_ERROR, "message": f"the MCP server {self.server} {problem}", "data": data}
        return httpx2.Response(status, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)

    async def _cancel(self, request: httpx2.Request, params: Mapping[str, Any]) -> None:
        names = ("accept", MCP_PROTOCOL_VERSION_HEADER, MCP_SESSION_ID)
        headers = {name: request.headers[name] for name in names if name in request.headers}
        message = {"jsonrpc": "2.0", "method": _CANCELLED, "params": params}
        notice = self.build_request("POST", request.url, json=message, headers=headers, timeout=_NOTICE_S)
        response = await super().send(notice, stream=True)
        await response.aclose()


async def _whole(response: httpx2.Response) -> httpx2.Response:
    body = bytearray()
    try:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise httpx2.ReadError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    finally:
        await response.aclose()
    headers = {name: response.headers[name] for name in _KEPT if name in response.headers}
    whole = httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)
    whole.next_request = response.next_request
    return whole
