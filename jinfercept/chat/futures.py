"""Asynchronous calls for chat models that know no markup: a call returns a placeholder at once, its result comes later.

A turn that calls a tool with `calls="async"` is answered by `future_1`, and the model goes on with its next turn while the call
runs. At the end of every turn the results that have come by then follow as tool messages; a turn that ends without a call waits
for all of them, and the model goes on. The tool `await_future` waits for one. The pauses are ordinary interceptions: short ones
for placeholders, and traps. (Futures as in AsyncFC, arXiv 2605.15077.) Knows no engine.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import final

from jinfercept.chat.function_tools import ChatTool
from jinfercept.errors import RequestError
from jinfercept.intercept.dispatcher import CALL_ID
from jinfercept.intercept.running_call import RunningCall
from jinfercept.request import Call, Tool

AWAIT = "await_future"

_DECLARATION = {
    "type": "function",
    "function": {
        "name": AWAIT,
        "description": "Wait for the result of a call that returned a future.",
        "parameters": {
            "type": "object",
            "properties": {"future": {"type": "string", "description": "The future's name, such as future_1."}},
            "required": ["future"],
        },
    },
}


@final
class Futures:
    """The futures of one or several conversations with the same tools. Shared by their watches and tools.

    Args:
        tools: those with a function, by name.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._names = frozenset(name for name, tool in tools.items() if tool.calls == "async")
        self._by_call: dict[str, RunningCall | None] = {}  # by id of the call, of the one that waits too
        longest_s = max(tools[name].timeout_s for name in self._names)
        most = max(tools[name].max_result_tokens for name in self._names)
        self.tools = {name: self._wrapped(tool) if name in self._names else tool for name, tool in tools.items()}
        self.tools[AWAIT] = Tool(self._await, name=AWAIT, timeout_s=longest_s, max_result_tokens=most)

    @classmethod
    def of(cls, tools: Iterable[ChatTool]) -> "Futures | None":
        """The futures of a chat's tools; None if no tool has `calls="async"`.

        Raises:
            RequestError: a tool has the name of the tool that waits.
        """
        with_functions = {tool.name: tool.tool for tool in tools if tool.tool is not None}
        if not any(tool.calls == "async" for tool in with_functions.values()):
            return None
        if AWAIT in {tool.name for tool in tools}:
            raise RequestError("two tools have one name", got=AWAIT, fix="give yours another name")
        return cls(with_functions)

    @property
    def waiting_tool(self) -> ChatTool:
        """The tool that waits for a future, as it is declared to the model."""
        return ChatTool(_DECLARATION, self.tools[AWAIT])

    def reader(self) -> "UnreadFutures":
        """The futures of one request, of which there are none yet."""
        return UnreadFutures(self)

    def begin(self, call: Call, name: str) -> RunningCall | None:
        """Note a call that returns a placeholder; None if its tool has results only."""
        if call.name not in self._names:
            return None
        running = self._by_call[call.id] = RunningCall(name, call)
        return running

    def wait_for(self, call: Call, running: RunningCall | None) -> None:
        """Note for what a call of `await_future` waits."""
        self._by_call[call.id] = running

    def _wrapped(self, tool: Tool) -> Tool:
        def answer(arguments: str) -> object:
            running = self._by_call.get(CALL_ID.get())  # none beside calls that the client runs: those end the request
            if running is None:
                return tool.function(arguments)
            if running.start(tool.function, arguments):
                return f"{running.name} (the call runs; its result follows as a tool message, {AWAIT} waits for it)"
            return running.wait()

        return replace(tool, function=answer, calls=None)  # markup is not for chats

    def _await(self, arguments: str) -> object:
        running = self._by_call.get(CALL_ID.get())
        if running is None:
            raise RequestError("there is no such future", got=arguments[:80], fix="name one that a call returned")
        return running.wait()


@final
class UnreadFutures:
    """The futures of one request whose results it has not read. Mutable, owned by the watch of its turns."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._by_name: dict[str, RunningCall] = {}
        self._unread: dict[str, RunningCall] = {}

    def take(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        """The calls of a turn that has ended, and behind them the earlier calls whose results follow it.

        Args:
            calls: of the turn; without any, it waits for all results.
        """
        for call in calls:
            if call.name == AWAIT:
                name = _future_of(call.arguments)
                self._futures.wait_for(call, self._by_name.get(name))
                self._unread.pop(name, None)
        due = [running for running in self._unread.values() if not calls or running.has_returned]
        for running in due:
            del self._unread[running.name]
        for call in calls:
            name = f"future_{len(self._by_name) + 1}"
            if (begun := self._futures.begin(call, name)) is not None:
                self._by_name[name] = self._unread[name] = begun
        return (*calls, *(running.call for running in due))


def _future_of(arguments: str) -> str:
    """The name of a future in the arguments of `await_future`; "" if they are no such."""
    try:
        return str(json.loads(arguments)["future"])
    except (ValueError, TypeError, LookupError):
        return ""
