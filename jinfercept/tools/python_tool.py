"""Python functions as tools of a file: found by name, declared by their signatures, run by the executor of the file's tools."""

import asyncio
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jinfercept.calls import Tool
from jinfercept.chat.function_tools import chat_tools
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


def load_functions(path: Path) -> list[Callable[..., object]]:
    """The public functions that a Python file defines and documents, to be called by a model. The file is run.

    Raises:
        RequestError: the file cannot be run, or has no such function.
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
    if not path.is_file():
        raise RequestError("there is no such file of tools", got=path, fix="give the path of one that is there")
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
    """File and line: where the file's text is wrong, or the last line of it that ran."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()
    ]
    return f"{path}, line {lines[-1]}" if lines else str(path)
