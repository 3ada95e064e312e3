"""The Python tools of a file, in their own process: an MCP server over standard input and output.

A tool that crashes, exits or blocks cannot hold up the server. `mcp_server.python_server` starts and restarts the process, as
it does for any MCP server, and passes it as JSON which functions to load.
"""

import asyncio
import importlib.util
import inspect
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, final

import mcp_types
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from jinfercept.calls import Tool
from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.engine.tool_executor import CALL_KEY, CURRENT_CALL, CurrentCall, ToolExecutor, ToolFailed, ToolRun
from jinfercept.errors import ConfigError, JinferceptError, RequestError
from jinfercept.tools.calls import BLOCKED_S, CallQueue


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A Python function."""

    declaration: Mapping[str, Any]  # OpenAI's
    function: Callable[[str], object]  # takes the arguments as JSON
    max_concurrency: int | None = None  # calls that run at once; None: the default


def python_tools(tools: Iterable[Mapping[str, Any]], folder: Path) -> list[PythonTool]:
    """Load functions as tools.

    Args:
        tools: each a `file`, all of whose functions are tools, or the fields of a `PythonTable` with its `place`.
        folder: base of relative paths.

    Raises:
        RequestError: a file cannot be run, a function cannot be a tool, or two tools have the same name.
        ConfigError: there is no such function.
    """
    modules, made = dict[Path, ModuleType](), list[PythonTool]()
    for tool in tools:
        if "file" in tool:
            in_file = chat_tools(load_functions(folder / tool["file"]))
            made += [PythonTool(each.declaration, each.tool.function) for each in in_file if each.tool is not None]
        else:
            made.append(_of_table(tool, folder, modules))
    chat_tools([ChatTool(tool.declaration, None) for tool in made])
    return made


def _of_table(table: Mapping[str, Any], folder: Path, modules: dict[Path, ModuleType]) -> PythonTool:
    home, _, name = table["function"].rpartition(":")
    try:
        function = getattr(_module(home, folder, modules), name)
        [chat_tool] = chat_tools([Tool(function, name=table["name"] or name)])
    except (ImportError, AttributeError) as error:
        what = f"{table['place']}: there is no such function: {error}"
        raise ConfigError(what, got=table["function"], fix="name one that is there") from error
    except RequestError as error:
        raise ConfigError(f"{table['place']}: {error.what}", got=error.got, fix=error.fix) from error
    assert chat_tool.tool is not None
    declared = dict(chat_tool.declaration["function"])
    declared |= {key: table[key] for key in ("description", "parameters") if table[key] is not None}
    return PythonTool({"type": "function", "function": declared}, chat_tool.tool.function, table["max_concurrency"])


def _module(home: str, folder: Path, modules: dict[Path, ModuleType]) -> ModuleType:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = folder / home
    if path not in modules:
        modules[path] = load_module(path)
    return modules[path]


def load_functions(path: Path) -> list[Callable[..., object]]:
    """Run a Python file and return its public functions that have docstrings, as tools for a model.

    Raises `RequestError` if the file cannot be run, or has no such function.
    """
    module = load_module(path)
    functions = [
        value
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not key.startswith("_")
        and inspect.getdoc(value)
    ]
    if not functions:
        raise RequestError("the file defines no tool", got=path, fix="define functions with docstrings in it")
    return functions


def load_module(path: Path) -> ModuleType:
    """Run a Python file of tools. Raises `RequestError` if that fails."""
    name = f"jinfercept_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RequestError("tools need a Python file", got=path, fix="give the path of a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the annotations of its functions are looked up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file is the user's
        problem = f"{_line_of(error, path)}: {type(error).__name__}: {error}"
        raise RequestError("running the file failed", got=problem, fix="correct it; it is run as it is") from error
    return module


def _line_of(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()
    ]
    return f"{path}, line {lines[-1]}" if lines else str(path)


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
        return await self._queue.run(CURRENT_CALL.get().tenant, lambda: self._run(arguments))

    async def _run(self, arguments: str) -> str:
        run = self._executor.call(self._name, self._function, arguments)
        ended = asyncio.wrap_future(run.result)
        while not ended.done():
            try:
                # a cancelled call keeps its slot, so it is waited for until the function has ended
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
