"""What lies between the SDK's MCP client and servers: repaired answers, and faults of HTTP that fail one request.

By itself, the SDK would refuse a whole list for one malformed tool, refuse odd results, and end its connection at a fault.
"""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, final, override

import anyio
import httpx2
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from mcp_types.methods import validate_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

log = logging.getLogger(__name__)

_STRICTEST = "2025-11-25"
"""A protocol version whose schema of a declaration no other version exceeds."""

MAX_ANSWER_BYTES = 4 << 20
"""The longest body of a response, event of a stream, or line of a process."""


@asynccontextmanager
async def lenient(transport: AbstractAsyncContextManager[Any], server: str) -> AsyncGenerator[Any]:
    """Streams of messages for the SDK's `Client`, with answers repaired so that it accepts them.

    Args:
        transport: yields the server's messages as an asynchronous iterator, and a stream for messages to the server.
        server: name of the server, for the log.
    """
    inbound, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)

    async def read(messages: Any) -> None:
        with suppress(anyio.BrokenResourceError):  # the SDK reads no more
            async with inbound:
                async for message in messages:
                    if isinstance(message, SessionMessage) and isinstance(message.message, JSONRPCResponse):
                        message.message.result = _mended(message.message.result, server)
                    await inbound.send(message)

    async with transport as (messages, write), inbound, received, anyio.create_task_group() as tasks:
        tasks.start_soon(read, messages)
        yield received, write
        tasks.cancel_scope.cancel()


def _mended(result: dict[str, Any], server: str) -> dict[str, Any]:
    # a listing keeps its well-formed tools; a call's result becomes one text, without the parts that its schema could refuse
    if isinstance(tools := result.get("tools"), list):
        declared = (_declared(tool, number, server) for number, tool in enumerate(tools, 1))
        cursor = result.get("nextCursor")
        mended = [tool for tool in declared if tool is not None]
        return result | {"tools": mended, "nextCursor": cursor if isinstance(cursor, str) else None}
    kind = result.get("resultType", "complete")
    if kind != "complete" or result.keys().isdisjoint({"content", "structuredContent", "isError"}):
        return result
    content = [{"type": "text", "text": result_text(result)}]
    return {"resultType": kind, "content": content, "isError": bool(result.get("isError"))}


def _declared(tool: Any, number: int, server: str) -> dict[str, Any] | None:
    fields = tool if isinstance(tool, Mapping) else {}
    name = fields.get("name")
    declared = {key: fields[key] for key in ("name", "description", "inputSchema") if key in fields}
    if isinstance(schema := declared.get("inputSchema"), Mapping):  # some servers write null for what they leave out
        declared["inputSchema"] = {key: value for key, value in schema.items() if value is not None}
    try:
        validate_server_result("tools/list", _STRICTEST, {"tools": [declared]})
        if name:
            return declared
        problem = "name: it is empty"
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc'][2:]))}: {first['msg']}"
    shown = repr(name) if isinstance(name, str) and name else f"number {number}"
    fix = 'correct its declaration in the server: {"name": …, "inputSchema": {"type": "object", …}}'
    log.warning("the MCP server %s: tool %s is left out: %s; %s", server, shown, problem, fix)
    return None


def result_text(result: Mapping[str, Any]) -> str:
    """Join the texts of a call's result, one per line, with notes on its other parts.

    The structured content stands in for the texts of a result that has none. `result` is JSON as the server sent it.
    """
    content = result.get("content") or []
    content = content if isinstance(content, list) else [content]
    parts = [_part(part) for part in content]
    structured = result.get("structuredContent")
    if structured is not None and not any(text and is_text for text, is_text in parts):
        parts = [part for part in parts if part[0]] + [(_text(structured), True)]
    return "\n".join(text for text, _ in parts)


def _part(part: Any) -> tuple[str, bool]:
    match part:
        case {"type": "text", "text": text} | {"type": "resource", "resource": {"text": text}}:
            return _text(text), True
        case {"type": "image" | "audio", "mimeType": mime_type, "data": str(data)}:
            return f"({mime_type}, {len(data) * 3 // 4} bytes)", False
        case {"type": "resource", "resource": {"uri": uri}} | {"type": "resource_link", "uri": uri}:
            return " ".join([f"({uri})", *filter(None, [part.get("description")])]), False
        case {"type": kind}:
            return f"[unsupported content: {kind}]", False
    return _text(part), True


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
