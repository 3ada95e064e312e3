"""Python functions as tools of a file: found by name, declared by their signatures, run by the executor of the file's tools."""

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jinfercept.calls import Tool
from jinfercept.chat.function_tools import chat_tools, load_functions, load_module
from jinfercept.errors import RequestError
from jinfercept.intercept.tool_executor import ToolExecutor
from jinfercept.tools.calls import CallQueue, CallRequest
from jinfercept.tools.tool_tables import Place, PythonTable

MAX_THREADS = 32
"""Maximum running calls of a sync function without `max_concurrency`. Each runs in a thread, which no timeout ends."""


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A Python function.

    Attributes:
        declaration: OpenAI's.
        function: of the arguments as JSON.
    """

    declaration: Mapping[str, Any]
    function: Callable[[str], object]
    executor: ToolExecutor

    def queue(self, max_concurrency: int | None) -> CallQueue:
        """A queue for its calls. A call keeps its slot until it has ended, so there are never more threads than slots."""
        return CallQueue(max_concurrency or (None if inspect.iscoroutinefunction(self.function) else MAX_THREADS))

    async def __call__(self, request: CallRequest) -> str:
        """The result of the function as text. Raises `ToolFailed`; if it is cancelled, when the function has ended."""
        run = self.executor.call(request.call.tool, self.function, json.dumps(dict(request.arguments)))
        ended = asyncio.wrap_future(run.result)
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                run.cancel()
                if self.executor.is_closed:
                    ended.cancel()  # the result of this function is read nowhere any more
                    raise
        value = ended.result()
        return value if isinstance(value, str) else str(list(value))


def python_tool(
    table: PythonTable, place: Place, modules: dict[Path, ModuleType], executor: ToolExecutor
) -> PythonTool:
    """The function that a table names.

    Args:
        modules: modules of files that are loaded already, by path.

    Raises:
        ConfigError: there is no such function, or it cannot be a tool.
    """
    home, _, name = table.function.rpartition(":")
    try:
        function = getattr(_module(home, place.path.parent, modules), name)
        [chat_tool] = chat_tools([Tool(function, name=table.name or name)])
    except (ImportError, AttributeError) as error:
        raise place.error(f"there is no such function: {error}", table.function, "name one that is there") from error
    except RequestError as error:
        raise place.error(error.what, error.got, error.fix) from error
    assert chat_tool.tool is not None
    declared = dict(chat_tool.declaration["function"])
    declared |= {} if table.description is None else {"description": table.description}
    declared |= {} if table.parameters is None else {"parameters": table.parameters}
    return PythonTool({"type": "function", "function": declared}, chat_tool.tool.function, executor)


def python_tools(path: Path, executor: ToolExecutor) -> list[PythonTool]:
    """The functions of a Python file. Raises `RequestError` as `load_functions`, and for a function that cannot be a tool."""
    return [
        PythonTool(chat_tool.declaration, chat_tool.tool.function, executor)
        for chat_tool in chat_tools(load_functions(path))
        if chat_tool.tool is not None
    ]


def _module(home: str, folder: Path, modules: dict[Path, ModuleType]) -> ModuleType:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = folder / home
    if path not in modules:
        modules[path] = load_module(path)
    return modules[path]
