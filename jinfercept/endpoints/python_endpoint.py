"""Python functions as tools of a file: found by name, declared by their signatures, run in threads."""

import asyncio
import importlib
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jinfercept.chat.function_tools import chat_tools, load_functions, load_module
from jinfercept.endpoints.calls import CallQueue, CallRequest
from jinfercept.endpoints.tool_tables import Place, PythonTable
from jinfercept.errors import RequestError
from jinfercept.request import Tool

MAX_THREADS = 32
"""Maximum running calls of a sync function without `max_concurrency`. Each runs in a thread, which no timeout ends."""


@dataclass(frozen=True, slots=True)
class PythonEndpoint:
    """A Python function.

    Attributes:
        declaration: OpenAI's.
        function: of the arguments as JSON.
        in_thread: whether it is a sync function.
    """

    declaration: Mapping[str, Any]
    function: Callable[[str], Any]
    in_thread: bool

    def queue(self, max_concurrency: int | None) -> CallQueue:
        """A queue for its calls. A thread keeps its slot until it has ended, so there are never more threads than slots."""
        return CallQueue(max_concurrency or (MAX_THREADS if self.in_thread else None), to_the_end=self.in_thread)

    async def __call__(self, request: CallRequest) -> str:
        """The result of the function as text."""
        arguments = json.dumps(dict(request.arguments))
        if not self.in_thread:
            return await self.function(arguments)
        value = await in_thread(self.function, arguments)
        return await value if inspect.isawaitable(value) else value


def python_endpoint(table: PythonTable, place: Place, modules: dict[Path, ModuleType]) -> PythonEndpoint:
    """The function that a table names.

    Args:
        modules: modules of files that are loaded already, by path.

    Raises:
        ConfigError: there is no such function, or it cannot be a tool.
    """
    home, _, name = table.function.rpartition(":")
    try:
        function = getattr(_module(home, place.path.parent, modules), name)
        [made] = chat_tools([Tool(function, name=table.name or name)])
    except (ImportError, AttributeError) as error:
        raise place.error(f"there is no such function: {error}", table.function, "name one that is there") from error
    except RequestError as error:
        raise place.error(error.what, error.got, error.fix) from error
    assert made.tool is not None
    declared = dict(made.declaration["function"])
    declared |= {} if table.description is None else {"description": table.description}
    declared |= {} if table.parameters is None else {"parameters": table.parameters}
    in_thread = not inspect.iscoroutinefunction(function)
    return PythonEndpoint({"type": "function", "function": declared}, made.tool.function, in_thread)


def python_endpoints(path: Path) -> list[PythonEndpoint]:
    """The functions of a Python file. Raises `RequestError` as `load_functions`, and for a function that cannot be a tool."""
    functions = load_functions(path)
    return [
        PythonEndpoint(made.declaration, made.tool.function, not inspect.iscoroutinefunction(function))
        for function, made in zip(functions, chat_tools(functions), strict=True)
        if made.tool is not None
    ]


def _module(home: str, folder: Path, modules: dict[Path, ModuleType]) -> ModuleType:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = folder / home
    if path not in modules:
        modules[path] = load_module(path)
    return modules[path]


async def in_thread[A, T](function: Callable[[A], T], argument: A) -> T:
    """The result of a function that runs in its own daemon thread: a call that hangs blocks no other call and no exit."""
    loop, context = asyncio.get_running_loop(), copy_context()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.cancelled():
            done.set_result(value) if error is None else done.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = context.run(function, argument)
        except BaseException as raised:  # the function is the user's
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="jinfercept-tool", daemon=True).start()
    return await done
