"""Converts the stored items of a conversation of `/v1/responses` to the messages of a chat."""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import Any, final

from jinfercept.chat.futures import placeholder
from jinfercept.protocols.openai.chat_schemas import CalledFunction, Message, ToolCall
from jinfercept.protocols.openai.response_items import CALL_OUTPUTS, Item, joined
from jinfercept.protocols.openai.response_tools import CLIENT_CALLS, called_function, declared_text


def messages_of(items: Iterable[Item], instructions: str | None) -> list[Message]:
    """The messages of a conversation. Reasoning, text and calls of one turn are one message.

    Incomplete calls of the client's tools are left out, but for those with a result.
    """
    items = list(items)
    messages = _Messages(instructions, {item["call_id"] for item in items if item["type"] in CALL_OUTPUTS})
    late: dict[int, list[Message]] = defaultdict(
        list
    )  # results of futures, by the index of the item before which they stand
    for index, item in enumerate(items):
        for result in late.pop(index, ()):
            messages.add(result)
        messages.add_item(item)
        if (after := _read_after(item)) is not None:
            late[index + 1 + after].append(_result(item, item["output"]))
    for index in sorted(late):
        for result in late[index]:
            messages.add(result)
    return _in_call_order(messages.whole())


@final
class _Messages:
    """The messages of the items that were added.

    Args:
        answered: ids of the calls that have a result of the client's.
    """

    def __init__(self, instructions: str | None, answered: Container[str]) -> None:
        self._answered = answered
        self._messages = list[Message]()
        if instructions is not None:
            self._messages.append(Message.model_construct(role="system", content=instructions))
        self._turns: list[tuple[Message, dict[str, list[str]]]] = []  # of the assistant, and the texts of their fields
        self._names: dict[str, str] = {}  # of the functions that were called, by the ids of calls
        self._turn: Message | None = None  # the last of these, if an item may belong to it
        self._round = 0  # of the calls of that turn
        self._has_results = False  # of calls of that turn

    def add(self, message: Message) -> None:
        """Add a message after which another turn of the assistant begins."""
        self._messages.append(message)
        self._turn = None

    def whole(self) -> list[Message]:
        """All messages, each text joined once."""
        for turn, fields in self._turns:
            for field, texts in fields.items():
                setattr(turn, field, "".join(texts))
        return self._messages

    def add_item(self, item: Item) -> None:
        """Add an item. A result of the server's own call stands behind the turn, which may have further calls."""
        match item["type"]:
            case kind if kind in CALL_OUTPUTS:
                call_id = item["call_id"]
                content = declared_text(item["tools"]) if kind == "tool_search_output" else item["output"]
                fields = {"tool_call_id": call_id, "name": self._names.get(call_id), "content": content}
                self.add(Message.model_construct(role="tool", **fields))
            case "message" if item["role"] != "assistant":
                self.add(Message.model_construct(role=item["role"], content=joined(item["content"])))
            case "message" | "reasoning":
                self._add_text(item)
            case kind if kind in CLIENT_CALLS:
                if item["status"] != "incomplete" or item["call_id"] in self._answered:
                    name, arguments = called_function(item)
                    self._names[item["call_id"]] = name
                    self._add_call(item, item["call_id"], name, arguments)
            case "mcp_call" if item["output"] is not None:
                self._add_call(item, _server_call_id(item), item["name"], item["arguments"])
                future = _note(item).get("future")
                self._messages.append(_result(item, item["output"] if future is None else placeholder(future)))
                self._has_results = True

    def _add_text(self, item: Item) -> None:
        """Add text or reasoning. Behind a call it belongs to the call's turn while no result has come."""
        field = "content" if item["type"] == "message" else "reasoning_content"
        text = joined(item["content"])
        if item["type"] == "reasoning" and not text:
            return
        turn = self._turn
        if turn is None or self._has_results or (turn.tool_calls is None and self._has_text(field)):
            self._begin_turn(item)
        self._turns[-1][1][field].append(text)

    def _add_call(self, item: Item, call_id: str, name: str, arguments: str) -> None:
        """Add a call behind the text of its turn, or behind calls of the same round."""
        turn = self._turn
        if turn is None or (turn.tool_calls and self._round != _note(item).get("round", 0)):
            turn = self._begin_turn(item)
        self._round = _note(item).get("round", 0)
        function = CalledFunction.model_construct(name=name, arguments=arguments)
        call = ToolCall.model_construct(id=call_id, type="function", function=function)
        turn.tool_calls = turn.tool_calls or []
        turn.tool_calls.append(call)

    def _begin_turn(self, item: Item) -> Message:
        self._round = _note(item).get("round", 0)
        self._has_results = False
        self._turn = Message.model_construct(role="assistant")
        self._messages.append(self._turn)
        self._turns.append((self._turn, defaultdict(list)))
        return self._turn

    def _has_text(self, field: str) -> bool:
        """Whether the turn has text in a field, or in one that stands behind it: content stands behind reasoning."""
        return not {"content", field}.isdisjoint(self._turns[-1][1])


def _result(item: Item, text: str) -> Message:
    """A message with the result of a server's call."""
    fields = {"tool_call_id": _server_call_id(item), "name": item["name"], "content": text}
    return Message.model_construct(role="tool", **fields)


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Sorts results in the order of their calls, which some templates need; the server's are stored before the client's."""
    ordered: list[Message] = []
    places: dict[str | None, int] = {}
    for is_result, group in groupby(messages, key=lambda message: message.role == "tool"):
        some = list(group)
        if is_result:
            some.sort(key=lambda message: places.get(message.tool_call_id, len(places)))
        places = {call.id: place for place, call in enumerate(some[-1].tool_calls or ())}
        ordered += some
    return ordered


def _read_after(item: Item) -> int | None:
    """The number of further items behind which the model read the result of a future; None: there is no such result."""
    note = _note(item)
    is_future = item["type"] == "mcp_call" and item["output"] is not None and note.get("future") is not None
    return note.get("read_after") if is_future else None


def _server_call_id(item: Item) -> str:
    return _note(item).get("call_id") or item["id"]


def _note(item: Item) -> dict[str, Any]:
    return item.get("jinfercept") or {}
