"""An MCP server as a source of tools: starts or connects it, lists its tools, and renews a lost connection.

Each connection has its own task; calls come from other tasks. Calls without a connection fail at once, except for Python
tools, whose calls wait for the next process.
"""

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, cast, final

from mcp import Client, MCPError
from mcp.client import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp_types import CONNECTION_CLOSED, RequestParamsMeta, TextContent, ToolListChangedNotification
from mcp_types import Tool as Declared
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from jinfercept.chat.function_tools import ChatTool
from jinfercept.engine.tool_executor import CALL_KEY, ToolExecutor, ToolFailed, fields_of
from jinfercept.errors import ConfigError
from jinfercept.tools.calls import BLOCKED_S, CallFailed, CallQueue, CallRequest, declare, endpoint_tool
from jinfercept.tools.mcp_process import McpProcess
from jinfercept.tools.mcp_transport import SESSION_ENDED, UNREACHED, http_streams, lenient
from jinfercept.tools.tool_tables import Limits, McpTable, Place

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_LOAD_S = 600.0
"""Seconds that the files of Python tools may take to run."""
_MAX_PAGES = 100
_MAX_NAME_CHARS = 64

_NO_NAME = re.compile(r"[^a-zA-Z0-9_-]")


@final
@dataclass(eq=False)
class _McpConnection:
    # None until the tools are listed
    client: Client | None = None
    # set when the tools are listed, or the attempt has failed
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    # set when no more calls may use the connection
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    # set when the tools have to be listed again
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    # takes over at once when the server has ended the session
    successor: Self | None = None

    def begin[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        call = asyncio.ensure_future(work)
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        return call

    async def hear(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.changed.set()


@final
class McpServer:
    """One server. Raises `ConfigError` if a variable of its environment or its headers is not set."""

    def __init__(
        self, table: McpTable, place: Place, executor: ToolExecutor, limits: Mapping[str, Limits] | None = None
    ) -> None:
        # limits by tool name belong to the process of Python tools, which gets this process's environment;
        # None: any other server, all of whose tools have the limits of its table
        self._table, self._place, self._executor, self._limits = table, place, executor, limits
        self._queue = CallQueue(table.max_concurrency)
        self._headers = {name: place.expand(value, f"headers.{name}") for name, value in table.headers.items()}
        env = {name: place.expand(value, f"env.{name}") for name, value in table.env.items()}
        if limits is not None:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._shown = f"the MCP server {table.name}" if limits is None else "the process of the Python tools"
        command = () if table.command is None else (table.command, *table.args)
        cwd = os.path.abspath(table.cwd or ".")  # a tool may change the working directory later
        self._process = McpProcess(command, env, cwd)
        self._tools: dict[str, Declared] = {}
        self._connection = _McpConnection()
        self._problem = ""
        self._refusal: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and reconnect whenever the connection is lost. Raises `ConfigError` if the first attempt fails."""
        self._task = asyncio.ensure_future(self._stay())
        await self._connection.settled.wait()
        if self._connection.client is None:
            await self.close()
            if self._limits is not None and isinstance(self._refusal, dict):
                raise ConfigError(**self._refusal)
            if self._limits is not None:
                what, fix = f"{self._shown} does not start", "run their files by hand, as in `python FILE`"
                raise ConfigError(what, got=self._problem, fix=fix)
            source = self._table.url or " ".join([self._table.command or "", *self._table.args])
            fix = "try it by hand; connect_timeout_s gives it more time"
            raise self._place.error(f"the MCP server does not start: {self._problem}", source, fix)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Disconnect, and end a server that was started here. It is killed after the timeout."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=0.8 * timeout_s)
            self._process.kill()
            await asyncio.wait([self._task], timeout=0.2 * timeout_s)

    def tools(self, taken: set[str]) -> list[ChatTool]:
        """List the current tools.

        Args:
            taken: names of other tools, to which the names of these are added. A tool whose name is taken gets a number at its
                end. Which tool gets it does not depend on the order of the server's list.
        """
        prefix, names = self._table.prefix, dict[str, str]()
        for name in sorted(self._tools, key=lambda name: (_offered(prefix + name, "") != prefix + name, name)):
            endings = (f"_{number}" if number > 1 else "" for number in count(1))
            names[name] = next(free for ending in endings if (free := _offered(prefix + name, ending)) not in taken)
            taken.add(names[name])
        return [
            endpoint_tool(
                declare(names[name], tool.description or "", tool.input_schema),
                self._table if self._limits is None else self._limits.get(name, self._table),
                partial(self._call, name),
                self._executor,
                self._queue,
            )
            for name, tool in self._tools.items()
        ]

    async def _call(self, name: str, request: CallRequest) -> str:
        server, own = self._shown, self._limits is not None
        facts = {**request.call.trace} | ({CALL_KEY: fields_of(request.call)} if own else {})
        meta = cast(RequestParamsMeta, facts) if facts else None
        for _ in range(2):
            connection = self._connection
            await connection.settled.wait()
            if connection.client is None or connection.lost.is_set():
                raise CallFailed(f"{server} is not there ({self._problem}); it is tried again")
            call = connection.begin(connection.client.call_tool(name, dict(request.arguments), meta=meta))
            try:
                result = await call
            except asyncio.CancelledError:
                if own:
                    connection.begin(self._end_if_blocked(connection.client, name))
                raise
            except MCPError as error:
                # the call was refused, so it has not run: sending it again in a new session is safe
                if error.data == SESSION_ENDED:
                    continue
                if error.data == UNREACHED:
                    connection.changed.set()  # it may come back with other tools
                if error.code == CONNECTION_CLOSED and connection.lost.is_set():
                    raise CallFailed(f"{server} was lost during the call, it is tried again") from error
                raise CallFailed(str(error)) from error
            except ValueError as error:
                raise CallFailed(f"{server} sent no result of a tool: {error}") from error
            [text] = result.content  # of `lenient`
            assert isinstance(text, TextContent)
            if result.is_error:
                raise ToolFailed(text.text) if own else CallFailed(text.text)
            return text.text
        raise CallFailed(f"{server} ended two sessions before they ran the call; call it again later")

    async def _end_if_blocked(self, client: Client, tool: str) -> None:
        # a function that holds the interpreter's lock lets the process answer nothing
        with suppress(MCPError):  # it has ended
            try:
                async with asyncio.timeout(BLOCKED_S):
                    await client.list_tools(cache_mode="bypass")
            except TimeoutError:
                log.error("the tool %s blocks the process of the Python tools, which is started again", tool)
                self._process.kill()

    async def _stay(self) -> None:
        pause_s, connection = _FIRST_PAUSE_S, self._connection
        async with asyncio.TaskGroup() as group:
            while True:
                since_s, serving = time.monotonic(), group.create_task(self._serve(connection))
                await connection.lost.wait()
                if connection.successor is not None:  # while the other calls of the old session end
                    connection = connection.successor
                    continue
                following = _McpConnection()
                if is_own := self._limits is not None and connection.client is not None:
                    self._connection = following  # calls wait for it: a tool ended the process, not what starts it
                await asyncio.wait([serving])
                log.warning("%s was lost: %s", self._shown, self._problem)
                if is_own or time.monotonic() - since_s > _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S  # a server that ends at once keeps the longer pause
                await asyncio.sleep(pause_s)
                pause_s, connection = min(2 * pause_s, _LONGEST_PAUSE_S), following

    async def _serve(self, connection: _McpConnection) -> None:
        table = self._table
        if table.url is None:
            streams = self._process.streams(connection.lost.set)
        else:
            streams = http_streams(table.name, table.url, self._headers, partial(self._replace, connection))
        try:
            async with (
                asyncio.timeout(table.connect_timeout_s) as limit,
                Client(lenient(streams, table.name), message_handler=connection.hear) as client,
                asyncio.TaskGroup() as group,
            ):
                self._tools = await self._list(client)
                limit.reschedule(None)
                self._connection, self._problem, connection.client = connection, "its connection ended", client
                connection.settled.set()
                following = self._renew(connection, client), _listen(connection, client)
                tasks = [group.create_task(work) for work in following]
                await connection.lost.wait()
                for task in tasks:
                    task.cancel()
                if connection.calls:
                    await asyncio.wait(connection.calls)
        except (Exception, BaseExceptionGroup) as error:
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            self._problem, self._refusal = _describe(cause), getattr(cause, "data", None)
        finally:
            connection.settled.set()
            connection.lost.set()

    def _replace(self, connection: _McpConnection) -> None:
        if connection.client is not None and not connection.lost.is_set():
            connection.successor = self._connection = _McpConnection()
            connection.lost.set()

    async def _renew(self, connection: _McpConnection, client: Client) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            await connection.changed.wait()
            connection.changed.clear()
            try:
                self._tools, pause_s = await self._list(client), _FIRST_PAUSE_S
            except (MCPError, ValueError) as error:
                log.warning("the tools of the MCP server %s cannot be listed: %s", self._table.name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                connection.changed.set()

    async def _list(self, client: Client) -> dict[str, Declared]:
        table, tools = self._table, dict[str, Declared]()
        cursor, cursors = None, set[str | None]({"", None})
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            for tool in page.tools:
                if (table.include is None or tool.name in table.include) and tool.name not in table.exclude:
                    tools.setdefault(tool.name, tool)
            cursor = page.next_cursor
            if cursor in cursors:
                return tools
            cursors.add(cursor)
        log.warning("the MCP server %s: tools after page %d of its list are left out", table.name, _MAX_PAGES)
        return tools


def python_server(
    functions: Sequence[dict[str, Any]], folder: Path, limits: Mapping[str, Limits], executor: ToolExecutor
) -> McpServer:
    """Make the server of Python tools: a process that calls at most as many functions at once as it has slots.

    Args:
        functions, folder: as of `python_process.python_tools`.
        limits: by tool name.
    """
    facts = {"tools": functions, "folder": str(folder.absolute())}
    args = ["-c", "from jinfercept.tools.python_process import main; main()", json.dumps(facts)]
    command = {"kind": "mcp", "name": "python", "command": sys.executable, "args": args}
    table = McpTable.model_validate(command | {"connect_timeout_s": _LOAD_S})
    return McpServer(table, Place(folder, 0), executor, limits)


async def _listen(connection: _McpConnection, client: Client) -> None:
    # servers of older protocol versions announce changes without a subscription
    capability = client.server_capabilities.tools
    if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or capability is None or not capability.list_changed:
        return
    pause_s = _FIRST_PAUSE_S
    while True:
        with suppress(MCPError, SubscriptionLost):
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    connection.changed.set()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        connection.changed.set()  # changes between two subscriptions are not announced


def _offered(name: str, ending: str) -> str:
    return _NO_NAME.sub("_", name)[: _MAX_NAME_CHARS - len(ending)] + ending


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) if isinstance(error, MCPError) else f"{type(error).__name__}: {error}"
