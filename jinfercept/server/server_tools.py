"""The tools that the server runs itself, and which of them a request is offered. Loads them; knows no requests."""

from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

from jinfercept.chat.function_tools import ChatTool
from jinfercept.endpoints.calls import owned
from jinfercept.endpoints.inbox import Inbox
from jinfercept.endpoints.load import LoadedTools, load_tools
from jinfercept.errors import ConfigError
from jinfercept.server.errors import ApiError

_FIELD = "jinfercept.server_tools"


@final
class ServerTools:
    """What the server's files declare.

    Args:
        loaded: by file; whoever loaded them closes them.
        inbox: where calls of all of them wait for a person.
    """

    def __init__(self, loaded: Sequence[LoadedTools] = (), inbox: Inbox | None = None) -> None:
        self._loaded = loaded
        self.inbox = inbox if inbox is not None and inbox.tools else None

    @property
    def tools(self) -> dict[str, ChatTool]:
        """Those that there are now, by name: an MCP server's change. Of two of one name the first counts."""
        listed: dict[str, ChatTool] = {}
        for file in self._loaded:
            for tool in file.tools:
                listed.setdefault(tool.name, tool)
        return listed

    def offered(self, asked: bool | Sequence[str] | None, own: Collection[str], owner: str) -> list[ChatTool]:
        """Those that a request gets beside its own.

        Whoever asks for all of them keeps its own tool where both have a name: what a server learns later must not break a
        client. Whoever asks for one by a name that it has itself contradicts itself.

        Args:
            asked: for all, for these, or for none.
            own: names of the tools that the client runs.
            owner: for whom they will be called.

        Raises:
            ApiError: 400, for names that mean nothing or two things.
        """
        if not asked:
            return []
        tools = self.tools
        if not tools:
            raise ApiError.bad("this server runs no tools: start it with --tools FILE", _FIELD)
        if asked is True:
            return [owned(tool, owner) for name, tool in tools.items() if name not in own]
        unknown = [name for name in asked if name not in tools]
        if unknown:
            raise ApiError.bad(f"this server runs no {', '.join(unknown)}, only {', '.join(tools)}", _FIELD)
        twice = [name for name in asked if name in own]
        if twice:
            raise ApiError.bad(f"{', '.join(twice)}: declared in tools too; ask for it in one place", _FIELD)
        return [owned(tools[name], owner) for name in dict.fromkeys(asked)]


@contextmanager
def open_server_tools(paths: Sequence[str]) -> Generator[ServerTools]:
    """The tools of files, their servers started; closed at the end.

    Raises:
        ConfigError, RequestError: as `load_tools`, or two files have a tool of one name.
    """
    inbox = Inbox()
    with ExitStack() as ends:
        loaded = [ends.enter_context(load_tools(path, inbox)) for path in paths]
        names = [tool.name for file in loaded for tool in file.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                "two files have a tool of one name", got=", ".join(twice), fix="rename one; MCP servers take a prefix"
            )
        yield ServerTools(loaded, inbox)
