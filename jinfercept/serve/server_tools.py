"""The tools that the server runs itself: loads them, selects those that a request is offered, and stores their turns."""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from sys import getsizeof
from typing import Any, final

from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.messages import Message, checked_message, digests
from jinfercept.errors import ConfigError
from jinfercept.sched.tenants import ExpiringEntries, Quota
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.tools.inbox import Inbox
from jinfercept.tools.load import LoadedTools, load_tools, tools_of

_FIELD = "jinfercept.server_tools"
_CLOSE_S = 0.5
"""Seconds for the tools of a file to end, however little time is left."""


@final
class ServerTools:
    """The tools of the server's files, which the caller closes.

    Attributes:
        inbox: where calls wait for a person; None if there is no person tool.
        traced: lets a tool's calls pass the trace of their request on; by default it returns the tool.
        ends_s: time by which the server and its tools should have ended, in seconds of `time.monotonic`; None: it does not end.
    """

    def __init__(self, loaded: Sequence[LoadedTools] = (), inbox: Inbox | None = None) -> None:
        self._loaded = loaded
        self.inbox = inbox if inbox is not None and inbox.tools else None
        self.traced: Callable[[ChatTool], ChatTool] = lambda tool: tool
        self.ends_s: float | None = None

    def close(self) -> None:
        """Close the tools in the time that is left."""
        for file in self._loaded:
            file.close() if self.ends_s is None else file.close(max(_CLOSE_S, self.ends_s - time.monotonic()))

    @property
    def tools(self) -> dict[str, ChatTool]:
        """The current tools by name; those of an MCP server change."""
        return {tool.name: tool for tool in tools_of(self._loaded)}

    def offered(self, chosen: bool | Sequence[str] | None, client_tools: Collection[str]) -> list[ChatTool]:
        """The server's tools that a request is offered.

        If a request for all tools has a tool of its own with the same name, its own one is used, so that new tools of a server
        do not break clients.

        Args:
            chosen: True for all tools, or names of tools.
            client_tools: names of the tools that the client runs.

        Raises:
            ApiError: 400 for an unknown name, and for one that the request also declares.
        """
        if not chosen:
            return []
        tools = self.tools
        if not tools:
            raise ApiError.bad("the server has no tools; fix: start it with --tools FILE", _FIELD)
        if chosen is True:
            return [self.traced(tool) for name, tool in tools.items() if name not in client_tools]
        unknown = [name for name in chosen if name not in tools]
        if unknown:
            raise ApiError.bad(f"no server tool is named {unknown[0]!r}; available: {', '.join(tools)}", _FIELD)
        twice = [name for name in chosen if name in client_tools]
        if twice:
            raise ApiError.bad(f"tool {twice[0]!r} is in tools and in server_tools; fix: leave one out", _FIELD)
        return [self.traced(tools[name]) for name in dict.fromkeys(chosen)]


@contextmanager
def open_server_tools(paths: Sequence[str]) -> Generator[ServerTools]:
    """The tools of files, whose servers run until the end. Raises `ConfigError` and `RequestError`."""
    inbox = Inbox()
    with ExitStack() as ends:
        loaded: list[LoadedTools] = []
        tools = ServerTools(loaded, inbox)
        ends.callback(tools.close)
        for path in paths:
            loaded.append(load_tools(path, inbox))  # noqa: PERF401 # they are closed if a later file fails
        names = [tool.name for tool in tools_of(loaded)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                "two files have the same tool", got=", ".join(twice), fix="rename one; MCP servers take a prefix"
            )
        tools.inbox = inbox if inbox.tools else None
        yield tools


MOST = 16384
MOST_BYTES = 2**27


@final
class ToolHistory:
    """Stores the turns of answers in which the server's tools were called, with their results. Thread-safe.

    A follow-up has the one merged message that the client saw. The stored turns replace it, so that the prompt is what the
    model wrote, and matches the retained context token by token. Without them the context is computed again, without the calls.

    The key of an answer is a digest of the conversation as the client sees it, with the answer: ids of calls are no keys, since
    models choose the same ones in many conversations. Tenants share the space fairly (`Quota`).

    Args:
        ttl_s: seconds until an entry expires, since its last use.
        now: a monotonic clock.
    """

    def __init__(self, ttl_s: float, now: Callable[[], float], most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._turns = ExpiringEntries[tuple[Message, ...]](Quota(most, most_bytes), ttl_s, now)

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, tenant: str, salt: str, messages: Sequence[Message], turns: Sequence[Message]) -> None:
        """Store the turns of an answer.

        Args:
            salt: derived from the tenant; the entry is found only with the same one.
            messages: of the conversation, from the client, and the merged message of the answer.
            turns: messages of the assistant and results of its calls.
        """
        *_, digest = digests([salt], [*map(checked_message, messages)])
        stored = tuple(turns)
        self._turns.put(tenant, digest, stored, num_bytes_of(stored))

    def restored(self, salt: str, messages: Sequence[Message]) -> list[Message]:
        """A conversation in which the stored turns replace the merged messages of their answers.

        Raises:
            RequestError: one of these is no message.
        """
        if not self._turns:
            return list(messages)
        restored: list[Message] = []
        _, *until = digests([salt], [*map(checked_message, messages)])
        for message, digest in zip(messages, until, strict=True):
            turns = self._turns.use(digest) if message["role"] == "assistant" else None
            restored += turns or (message,)
        return restored


def num_bytes_of(value: Any) -> int:
    """Bytes that a JSON value, or a tuple of them, holds in memory: what occurs in it twice counts once."""
    num_bytes, seen, rest = 0, set[int](), [value]
    while rest:
        item = rest.pop()
        if id(item) not in seen:
            seen.add(id(item))
            num_bytes += getsizeof(item)
            if isinstance(item, dict):
                rest += item
                rest += item.values()
            elif isinstance(item, list | tuple):
                rest += item
    return num_bytes
