"""The Python tools of a file, in a process of their own: an MCP server over standard input and output.

A tool that crashes, ends the process or blocks cannot hold up a server. The process is started, and started again, as that of
any MCP server: by `mcp_server.python_server`, which gives it what it should load as JSON.
"""

import asyncio
import inspect
import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, final

import mcp_types
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from jinfercept.errors import JinferceptError
from jinfercept.intercept.current_call import CALL_KEY, CURRENT_CALL, CurrentCall
from jinfercept.intercept.tool_executor import ToolExecutor
from jinfercept.intercept.tool_run import ToolRun
from jinfercept.intercept.tool_values import ToolFailed
from jinfercept.tools.calls import BLOCKED_S, CallQueue
from jinfercept.tools.python_tool import PythonTool, python_tools

log = logging.getLogger(__name__)

MAX_THREADS = 32
"""Running calls of a sync function without `max_concurrency`. Each runs in a thread, which no timeout ends."""
_MOST_CHARS = 1 << 20


@final
class _Tool:
    """A function with its limit. A call keeps its slot until the function has ended, so there are never more threads."""

    def __init__(self, tool: PythonTool, executor: ToolExecutor) -> None:
        self._name, self._function, self._executor = tool.declaration["function"]["name"], tool.function, executor
        self._is_async = inspect.iscoroutinefunction(tool.function)
        self._queue = CallQueue(tool.max_concurrency or (None if self._is_async else MAX_THREADS))

    async def __call__(self, arguments: str) -> str:
        """The result of the function as text. Raises `ToolFailed`."""
        return await self._queue.run(CURRENT_CALL.get().tenant, lambda: self._run(arguments))

    async def _run(self, arguments: str) -> str:
        """As `__call__`; if it is cancelled, it returns when the function has ended."""
        run = self._executor.call(self._name, self._function, arguments)
        ended = asyncio.wrap_future(run.result)
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                run.cancel()
                if self._is_async:
                    beat = self._executor.submit(lambda: asyncio.sleep(0))
                    asyncio.get_running_loop().call_later(BLOCKED_S, self._end_if_blocked, beat)
        value = ended.result()
        return (value if isinstance(value, str) else str(list(value)))[:_MOST_CHARS]

    def _end_if_blocked(self, beat: ToolRun[None]) -> None:
        if not beat.result.done():
            log.error("the tool %s blocks the event loop of async tools; their process is started again", self._name)
            os._exit(1)


async def _serve(facts: dict[str, Any]) -> None:
    executor, tools, problem = ToolExecutor(), list[PythonTool](), None
    try:
        tools = python_tools(facts["tools"], Path(facts["folder"]))
    except JinferceptError as error:
        parts = {"what": error.what, "got": str(error.got), "fix": error.fix}
        problem = MCPError(mcp_types.INTERNAL_ERROR, str(error), parts)
    called = {tool.declaration["function"]["name"]: _Tool(tool, executor) for tool in tools}

    async def list_tools(_: Any, __: Any) -> mcp_types.ListToolsResult:
        if problem is not None:
            raise problem
        declared = [tool.declaration["function"] for tool in tools]
        return mcp_types.ListToolsResult(
            tools=[
                mcp_types.Tool(name=each["name"], description=each["description"], input_schema=each["parameters"])
                for each in declared
            ]
        )

    async def call_tool(context: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        meta = context.meta or {}
        CURRENT_CALL.set(CurrentCall(**meta.get(CALL_KEY, {})))
        try:
            text, failed = await called[params.name](json.dumps(params.arguments or {})), False
        except ToolFailed as error:
            text, failed = str(error), True
        return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=text)], is_error=failed)

    server = Server("python tools", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def main() -> None:
    """Serve until standard input ends. What tools have started ends with the process, in whose group nothing else is."""
    logging.basicConfig(format="%(message)s")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's way would wait for the thread that reads
    try:
        asyncio.run(_serve(json.loads(sys.argv[1])))
    except BaseException:
        traceback.print_exc()
    os.killpg(0, signal.SIGKILL)
