"""Loads the tools of a Python or TOML file. All tables are checked before a server is started."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.engine.tool_executor import ToolExecutor
from jinfercept.errors import ConfigError, shown
from jinfercept.tools.calls import QUESTION, CallQueue, CallRequest, Endpoint, check_of, declare, endpoint_tool
from jinfercept.tools.inbox import Inbox
from jinfercept.tools.tool_tables import (
    HttpTable,
    Limits,
    McpTable,
    ModelTable,
    PersonTable,
    Place,
    PythonTable,
    Table,
    read_tables,
)

if TYPE_CHECKING:
    from jinfercept.tools.mcp_server import McpServer

_Source = ChatTool | Callable[[set[str]], list[ChatTool]]
"""A tool, or the current tools of an MCP server. It takes the names of other tools, and adds its own."""

_FILE_FIX = "give the path of one that is there"
_CLOSE_S = 5.0
_END_S = 0.5
"""Seconds that tasks on event loops have to end, however little time is left."""


@final
class LoadedTools(AbstractContextManager["LoadedTools"], AbstractAsyncContextManager["LoadedTools"]):
    """Loaded tools. Close them, or use them in `with` or `async with`."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.sources: list[_Source] = []
        self.executor = ToolExecutor()
        self.servers: list[McpServer] = []  # start after all tables are checked
        self.models = ExitStack()

    @property
    def tools(self) -> list[ChatTool]:
        """The current tools for `LLM.chat`. An MCP server may change its tools at any time."""
        return tools_of([self])

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End servers and connections, and fail waiting calls. What does not end in time is killed, or left alone."""
        if self.executor.is_closed:
            return
        give_up_s = time.monotonic() + timeout_s

        async def end() -> None:
            await asyncio.gather(*(server.close(timeout_s) for server in self.servers), return_exceptions=True)

        if self.servers:
            with suppress(TimeoutError):
                self.executor.submit(end).result.result(timeout_s + _END_S)
        self.executor.close(max(_END_S, give_up_s - time.monotonic()))
        self.models.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)


def tools_of(files: Iterable[LoadedTools]) -> list[ChatTool]:
    """Collect the current tools of several files. Tools of MCP servers get names that no other tool has."""
    sources = [source for file in files for source in file.sources]
    taken = {source.name for source in sources if isinstance(source, ChatTool)}
    return [tool for source in sources for tool in ([source] if isinstance(source, ChatTool) else source(taken))]


def load_tools(path: str | Path, inbox: Inbox | None = None) -> LoadedTools:
    """Load the tools of a file, and start and connect its servers.

    Args:
        path: a Python file, of which every public function with a docstring is a tool, or a TOML file of `[[tool]]` tables
            (`tool_tables.py` has their keys).
        inbox: where calls wait for a person; None: a new one.

    Raises:
        ConfigError: the file is wrong, a Python function cannot be a tool, or a server, a variable or a package is missing.
        RequestError: two tools have the same name.
    """
    if not isinstance(path, str | Path):
        raise ConfigError("tools must be named by a path", got=shown(path), fix="give its path")
    path, inbox = Path(path), inbox or Inbox()
    if path.suffix not in (".toml", ".py"):
        raise ConfigError(
            "a file of tools must be a Python or a TOML file", got=path, fix="give a file that ends in .py or .toml"
        )
    if not path.is_file():
        raise ConfigError("there is no such file of tools", got=path, fix=_FILE_FIX)
    tables = None if path.suffix == ".py" else read_tables(path)
    loaded = LoadedTools(inbox)
    loader = _Loader(loaded, path.parent)
    with ExitStack() as undo:
        undo.callback(loaded.close)
        try:
            if tables is None:
                loader.add_python({"file": path.name}, "", Limits())
            for place, table in tables or ():
                loader.add(table, place)
            loader.start()
        except ImportError as error:
            raise ConfigError(
                f"the tools of {path} need more packages",
                got=f"no package {error.name}",
                fix="pip install 'jinfercept[tools]'",
            ) from error
        undo.pop_all()
    return loaded


@final
class _Loader:
    def __init__(self, loaded: LoadedTools, folder: Path) -> None:
        self._loaded, self._executor, self._folder = loaded, loaded.executor, folder
        self._functions, self._limits, self._places = list[dict[str, Any]](), dict[str, Limits](), list[int]()
        self._load: list[Callable[[], None]] = []

    def add(self, table: Table, place: Place) -> None:
        match table:
            case PythonTable():
                home, _, name = table.function.rpartition(":")
                if home.endswith(".py") and not (file := self._folder / home).is_file():
                    raise place.error("there is no such file of tools", file, _FILE_FIX)
                where = {"place": f"{place.path}, tool {place.number}"}
                self.add_python(table.model_dump() | where, table.name or name, table)
            case HttpTable():
                from jinfercept.tools.http_tool import HttpTool

                http = HttpTool(table, place)
                self._add(declare(table.name, table.description, http.parameters), table, http)
            case ModelTable() if table.path is None:
                from jinfercept.tools.model_tools import RemoteModel

                self._add_asked(table, place, RemoteModel(table, place))
            case ModelTable():
                from jinfercept.tools.model_tools import LocalModel

                local = LocalModel(table)
                self._loaded.models.callback(local.close)
                self._load.append(local.load)
                self._add_asked(table, place, local)
            case PersonTable():
                self._loaded.inbox.tools |= {table.name}
                self._add_asked(table, place, partial(self._loaded.inbox.ask, table.name))
            case McpTable():
                from jinfercept.tools.mcp_server import McpServer

                server = McpServer(table, place, self._executor)
                self._loaded.servers.append(server)
                self._loaded.sources.append(server.tools)

    def _add_asked(self, table: ModelTable | PersonTable, place: Place, endpoint: Endpoint) -> None:
        parameters = table.parameters or QUESTION
        check = check_of(parameters, place)

        async def checked(request: CallRequest) -> str:
            check(request.arguments)
            return await endpoint(request)

        self._add(declare(table.name, table.description, parameters), table, checked)

    def add_python(self, function: dict[str, Any], name: str, limits: Limits) -> None:
        self._functions.append(function)
        self._limits[name] = limits
        self._places.append(len(self._loaded.sources))

    def start(self) -> None:
        servers, python = self._loaded.servers, None
        if self._functions:
            from jinfercept.tools.mcp_server import python_server

            python = python_server(self._functions, self._folder, self._limits, self._executor)
            servers.append(python)

        async def connect() -> None:
            await asyncio.gather(*(server.start() for server in servers))

        if servers:
            self._executor.submit(connect).result.result()
        if python is not None:  # each stands where its table does
            for place, tool in reversed([*zip(chain(self._places, repeat(0)), python.tools(set()), strict=False)]):
                self._loaded.sources.insert(place, tool)
        for load in self._load:
            load()
        chat_tools(self._loaded.tools)  # no two of one name

    def _add(self, declaration: dict[str, Any], limits: Limits, endpoint: Endpoint) -> None:
        queue = CallQueue(limits.max_concurrency)
        self._loaded.sources.append(endpoint_tool(declaration, limits, endpoint, self._executor, queue))
