"""An MCP server as a source of tools: it is started or connected, its tools are listed, and a lost connection is renewed.

One task holds the connection; calls come from other tasks. Calls without a connection fail at once.
"""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast, final

import httpx2
from mcp import Client, MCPError
from mcp.client import IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp_types import (
    CONNECTION_CLOSED,
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    RequestParamsMeta,
    TextContent,
    TextResourceContents,
    ToolListChangedNotification,
)
from mcp_types import Tool as Declared
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from jinfercept.tools.calls import CallFailed, CallRequest, Endpoint, declare
from jinfercept.tools.mcp_process import McpProcess
from jinfercept.tools.tool_tables import McpTable, Place

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_MAX_PAGES = 100
_ENDED = "its connection ended"
_SESSION_LOST = "Session terminated"
"""The SDK's message, without a code of its own, when an HTTP server has ended a session."""

_NO_NAME = re.compile(r"[^a-zA-Z0-9_-]")


@final
class McpServer:
    """One server.

    Args:
        place: of the table, for errors.

    Raises:
        ConfigError: a variable of its environment or its headers is not set.
    """

    def __init__(self, table: McpTable, place: Place) -> None:
        self._table, self._place = table, place
        self._headers = {name: place.expand(value, f"headers.{name}") for name, value in table.headers.items()}
        env = {name: place.expand(value, f"env.{name}") for name, value in table.env.items()}
        command = () if table.command is None else (table.command, *table.args)
        cwd = os.path.abspath(table.cwd or ".")  # a tool may change the working directory later
        self._process = McpProcess(command, env, cwd, self._note_lost)
        self._tools: tuple[Declared, ...] = ()
        self._client: Client | None = None
        self._problem = _ENDED
        self._lost = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and reconnect whenever the connection is lost. Raises `ConfigError` if the first attempt fails."""
        connected = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._stay(connected))
        if problem := await connected:
            await self.close()
            source = self._table.url or " ".join([self._table.command or "", *self._table.args])
            fix = "try it by hand; connect_timeout_s gives it more time"
            raise self._place.error(f"the MCP server does not start: {problem}", source, fix)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Disconnect, and end a server that was started here; after the time-out it is killed."""
        self._process.end_s = time.monotonic() + 0.8 * timeout_s
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=timeout_s)
        self._process.kill()

    def endpoints(self) -> list[tuple[dict[str, Any], Endpoint]]:
        """Declarations and endpoints of the current tools."""
        return [
            (
                declare(
                    _NO_NAME.sub("_", self._table.prefix + tool.name)[:64], tool.description or "", tool.input_schema
                ),
                partial(self._call, tool.name),
            )
            for tool in self._tools
        ]

    async def _call(self, name: str, request: CallRequest) -> str:
        """Call a tool. Raises `CallFailed` for an error result, and without a connection."""
        client = self._client
        if client is None:
            raise CallFailed(f"the MCP server {self._table.name} is not there ({self._problem}); it is tried again")
        try:
            meta = cast(RequestParamsMeta, dict(request.call.trace)) if request.call.trace else None
            result = await client.call_tool(name, dict(request.arguments), meta=meta)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED and error.message != _SESSION_LOST:
                raise CallFailed(str(error)) from error
            if self._client is client:
                self._lost.set()
            raise CallFailed(
                f"the MCP server {self._table.name} was lost during the call, it is tried again"
            ) from error
        if result.is_error:
            raise CallFailed(result_text(result))
        return result_text(result)

    async def _stay(self, connected: asyncio.Future[str | None]) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(self._table.connect_timeout_s) as limit, self._connect() as client:
                    self._tools = await self._list(client)
                    limit.reschedule(None)
                    self._client, self._problem, since_s = client, _ENDED, time.monotonic()
                    if not connected.done():
                        connected.set_result(None)
                    await self._until_lost(client)
                    if (
                        time.monotonic() - since_s > _LONGEST_PAUSE_S
                    ):  # a server that ends at once keeps the longer pause
                        pause_s = _FIRST_PAUSE_S
            except (Exception, BaseExceptionGroup) as error:
                self._problem = _describe(error)
            finally:
                self._client = None
            if not connected.done():
                connected.set_result(self._problem)
                return
            log.warning("the MCP server %s was lost: %s", self._table.name, self._problem)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[Client]:
        table = self._table
        self._lost.clear()
        self._changed.clear()
        if table.url is not None:
            async with (
                httpx2.AsyncClient(headers=self._headers, timeout=httpx2.Timeout(30.0, read=None)) as http,
                Client(streamable_http_client(table.url, http_client=http), message_handler=self._hear) as client,
            ):
                yield client
        else:
            async with Client(self._process.streams(), message_handler=self._hear) as client:
                yield client

    def _note_lost(self) -> None:
        self._client = None
        self._lost.set()

    async def _until_lost(self, client: Client) -> None:
        """Lists the tools again after each change; returns when the connection is lost."""
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(self._renew(client))
            listening = group.create_task(self._listen(client))
            await self._lost.wait()
            renewing.cancel()
            listening.cancel()

    async def _renew(self, client: Client) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._tools = await self._list(client)
            except MCPError as error:
                log.warning("the tools of the MCP server %s cannot be listed: %s", self._table.name, error)

    async def _listen(self, client: Client) -> None:
        """Subscribe to changes of the tools, for protocol versions in which servers do not announce them."""
        capability = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or capability is None or not capability.list_changed:
            return
        pause_s = _FIRST_PAUSE_S
        while True:
            with suppress(MCPError, SubscriptionLost):
                async with client.listen(tools_list_changed=True) as events:
                    async for _ in events:
                        self._changed.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._changed.set()  # changes between two subscriptions are not announced

    async def _hear(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._changed.set()

    async def _list(self, client: Client) -> tuple[Declared, ...]:
        tools: list[Declared] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        include, exclude = self._table.include, self._table.exclude
        return tuple(tool for tool in tools if (include is None or tool.name in include) and tool.name not in exclude)


def _describe(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return f"{type(error).__name__}: {error}"


def result_text(result: CallToolResult) -> str:
    """The texts of a result, one per line, other parts as descriptions. Without content: the structured content as JSON."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part, result.content))


def _part(part: Any) -> str:
    match part:
        case TextContent():
            return part.text
        case ImageContent() | AudioContent():
            return f"({part.mime_type}, {len(part.data) * 3 // 4} bytes)"
        case EmbeddedResource() if isinstance(part.resource, TextResourceContents):
            return part.resource.text
        case EmbeddedResource():
            return f"({part.resource.uri})"
    return f"({getattr(part, 'uri', part.type)})"
