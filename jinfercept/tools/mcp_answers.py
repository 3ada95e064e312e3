"""Repairs an MCP server's answers: for one malformed tool the SDK would refuse the whole list, and it refuses odd results."""

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse
from mcp_types.methods import validate_server_result
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
