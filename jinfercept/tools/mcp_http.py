"""HTTP for the SDK's client of an MCP server: a fault is the error of one request, where the SDK would end the connection."""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, final, override

import httpx2
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp_types import INTERNAL_ERROR

log = logging.getLogger(__name__)

SESSION_ENDED, UNREACHED = "jinfercept: session ended", "jinfercept: no answer"
"""`data` of errors that are made here: the request was refused, as its session has ended; no whole response came."""

_NO_SESSION = (404, 400, 410)
"""Statuses for an unknown session: the protocol's, and those of other servers, which have them for other faults too."""


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
        streamable_http_client(url, http_client=http) as streams,
    ):
        http.server, http.session_ended = server, session_ended
        yield streams


@final
class _McpHttp(httpx2.AsyncClient):
    server: str
    session_ended: Callable[[], object]

    @override
    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """As the base class. A POST's error status or failed connection becomes a JSON-RPC error, which the SDK passes on."""
        if request.method != "POST":
            return await super().send(request, **options)
        try:
            response = await super().send(request, **options)
            if response.is_error or "text/event-stream" not in response.headers.get("content-type", "").lower():
                await response.aread()
            if not response.is_error:
                return response
            status, error = response.status_code, _error(response)
            if await self._has_ended(request, status):
                self.session_ended()
                error["data"] = SESSION_ENDED
            error["message"] = f"the MCP server {self.server} answered {error['message']}"
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
        if status == _NO_SESSION[0]:
            return True
        names = ("accept", "mcp-protocol-version", MCP_SESSION_ID)
        headers = {name: request.headers[name] for name in names if name in request.headers}
        ping = {"jsonrpc": "2.0", "id": "ping", "method": "ping"}
        response = await super().send(self.build_request("POST", request.url, json=ping, headers=headers), stream=True)
        await response.aclose()
        return response.status_code in _NO_SESSION


def _error(response: httpx2.Response) -> dict[str, Any]:
    """The JSON-RPC error of a response, or one made of its text; with its status in front."""
    try:
        error = json.loads(response.content)["error"]
        error = {"code": int(error["code"]), "message": str(error["message"]), "data": error.get("data")}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        error = {"code": INTERNAL_ERROR, "message": " ".join(response.text.split())[:500]}
    status = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    retry = f", Retry-After: {response.headers['retry-after']}" if "retry-after" in response.headers else ""
    return error | {"message": f"{status}{retry}: {error['message']}".removesuffix(": ")}
