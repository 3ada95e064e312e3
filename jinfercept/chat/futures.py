"""Asynchronous calls for chat models that know no markup: a call returns a placeholder at once, and its result comes later.

A turn that calls a tool with `calls="async"` is answered by `future_1`, and the model goes on with its next turn while the call
runs. At the end of every turn, finished results follow as tool messages. A turn that ends without a call waits for all results,
and the model goes on. The tool `await_future` waits for one result. All pauses are ordinary interceptions: short ones for
placeholders, and traps. The end of the request cancels running calls. (Futures as in AsyncFC, arXiv 2605.15077.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import final

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.function_tools import ChatTool
from jinfercept.engine.tool_executor import CURRENT_CALL, AtOnce, Placeholder, RunningCall, around
from jinfercept.errors import RequestError
from jinfercept.outputs import Interception
from jinfercept.values import json_object

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
    """The futures of conversations with the same tools. Their watches and tools share it."""

    def __init__(self, tools: Mapping[str, Tool], options: AsyncCalls) -> None:
        # limit of pending calls, and the behaviour at the end of the text; the markup does not apply to chats
        self.options = options
        self._names = frozenset(name for name, tool in tools.items() if tool.calls == "async")
        self._by_call: dict[str, RunningCall | None] = {}  # by id of the call, of the one that waits too
        longest_s = max(tools[name].timeout_s for name in self._names)
        most = max(tools[name].max_result_tokens for name in self._names)
        self.tools = {name: self._wrapped(tool) if name in self._names else tool for name, tool in tools.items()}
        self.tools[AWAIT] = Tool(AtOnce(self._await), name=AWAIT, timeout_s=longest_s, max_result_tokens=most)

    @classmethod
    def of(cls, tools: Iterable[ChatTool], options: AsyncCalls) -> "Futures | None":
        """Make the futures of a chat's tools; None if no tool has `calls="async"`.

        Raises `RequestError` if a tool is called `await_future`.
        """
        with_functions = {tool.name: tool.tool for tool in tools if tool.tool is not None}
        if not any(tool.calls == "async" for tool in with_functions.values()):
            return None
        if AWAIT in {tool.name for tool in tools}:
            raise RequestError("two tools have one name", got=AWAIT, fix="give yours another name")
        return cls(with_functions, options)

    @property
    def waiting_tool(self) -> ChatTool:
        """The tool `await_future`, as it is declared to the model."""
        return ChatTool(_DECLARATION, self.tools[AWAIT])

    def begin(self, call: Call, name: str) -> RunningCall | None:
        """Note a call that returns a placeholder; None if its tool returns only results."""
        if call.name not in self._names:
            return None
        running = self._by_call[call.id] = RunningCall(name, call)
        return running

    def wait_for(self, call: Call, running: RunningCall | None) -> None:
        """Note which running call a call of `await_future` waits for; None: there is no such future."""
        self._by_call[call.id] = running

    def _wrapped(self, tool: Tool) -> Tool:
        def answer(arguments: str) -> object:
            running = self._by_call.get(
                CURRENT_CALL.get().id
            )  # none beside calls that the client runs: those end the request
            if running is None:
                return tool.function(arguments)
            if running.has_started:
                return running.wait()
            limit = self.options.shared_limit
            if limit is not None and not limit.take():
                running.skip()
                return tool.function(arguments)
            running.start(tool.function, arguments, limit.release if limit is not None else lambda: None)
            return Placeholder(placeholder(running.name))

        return replace(tool, function=around(tool.function, answer), calls=None)  # markup is not for chats

    def _await(self, arguments: str) -> object:
        running = self._by_call.get(CURRENT_CALL.get().id)
        if running is None:
            raise RequestError("there is no such future", got=arguments[:80], fix="name one that a call returned")
        return running.wait()


@final
class UnreadFutures:
    """The futures of one request whose results it has not read. Mutable; the watch of its turns owns it."""

    def __init__(self, futures: Futures) -> None:
        self._futures, self._options = futures, futures.options
        self._by_name: dict[str, RunningCall] = {}
        self._unread: dict[str, RunningCall] = {}

    def take(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        """Return the calls of a turn that has ended, followed by the earlier calls whose results come after it.

        Args:
            calls: of the turn. A turn without calls waits for all results, unless they are to be cancelled.
        """
        if not calls and self._options.on_end == "cancel":
            return ()
        for call in calls:
            if call.name == AWAIT:
                name = _named(call.arguments)
                self._futures.wait_for(call, self._by_name.get(name))
                self._unread.pop(name, None)
        self._unread = {name: running for name, running in self._unread.items() if not running.is_read}
        due = [running for running in self._unread.values() if not calls or running.has_returned]
        for running in due:
            del self._unread[running.name]
        for call in calls:
            if len(self._unread) >= self._options.max_pending:
                break  # its result is waited for
            name = f"future_{len(self._by_name) + 1}"
            if (begun := self._futures.begin(call, name)) is not None:
                self._by_name[name] = self._unread[name] = begun
        return (*calls, *(running.call for running in due))


def placeholder(name: str) -> str:
    """Write the text that the call of a future returns at once."""
    return f"{name} (the call runs; its result follows as a tool message, {AWAIT} waits for it)"


def future_of(call: Call, result: Result) -> str | None:
    """Return the name of the future that a call has made or waited for; None for other calls."""
    if result.status == "started":
        return result.text.partition(" ")[0]
    return (_named(call.arguments) or None) if call.name == AWAIT else None


def unread_calls(pauses: Iterable[Interception]) -> tuple[Call, ...]:
    """Return the calls that went on beside a chat and whose results the model has not read."""
    unread: dict[str, Call] = {}
    for pause in pauses:
        for call, result in zip(pause.calls, pause.results, strict=False):
            future = future_of(call, result)
            if future is not None and result.status == "started":
                unread[future] = call
            else:
                unread = {name: earlier for name, earlier in unread.items() if name != future and earlier.id != call.id}
    return tuple(unread.values())


def _named(arguments: str) -> str:
    return str(json_object(arguments).get("future", ""))
