"""Converts the stored items of a conversation of `/v1/responses` to the messages of a chat."""

from collections import defaultdict
from collections.abc import Container, Iterable
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
    return messages.whole()


@final
class _ItemsOfTurn:
    """A turn of the assistant.

    Attributes:
        texts: of the fields of its message.
        calls: the id, the name and the arguments of each.
    """

    role = "assistant"

    def __init__(self, item: Item) -> None:
        self.round: int = _note(item).get("round", 0)  # of its last calls
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.calls: list[tuple[str, str, str]] = []

    def message(self) -> Message:
        fields: dict[str, Any] = {
            field: ("" if field == "content" else "\n\n").join(texts) for field, texts in self.texts.items()
        }
        if self.calls:
            fields["tool_calls"] = [
                ToolCall.model_construct(
                    id=call_id, type="function", function=CalledFunction.model_construct(name=name, arguments=arguments)
                )
                for call_id, name, arguments in self.calls
            ]
        return Message.model_construct(role="assistant", **fields)


@final
class _Messages:
    """The messages of the items that were added.

    Args:
        answered: ids of the calls that have a result of the client's.
    """

    def __init__(self, instructions: str | None, answered: Container[str]) -> None:
        self._answered = answered
        self._messages = list[Message | _ItemsOfTurn]()
        if instructions is not None:
            self._messages.append(Message.model_construct(role="system", content=instructions))
        self._names: dict[str, str] = {}  # of the functions that were called, by the ids of calls
        self._turn: _ItemsOfTurn | None = None  # the last one, if an item may belong to it
        self._has_results = False  # of calls of that turn

    def add(self, message: Message) -> None:
        """Add a message after which another turn of the assistant begins."""
        self._messages.append(message)
        self._turn = None

    def whole(self) -> list[Message]:
        """All messages, each text joined once."""
        return [message.message() if isinstance(message, _ItemsOfTurn) else message for message in self._messages]

    def add_item(self, item: Item) -> None:
        """Add an item. A result of the server's own call stands behind the turn, which may have further calls."""
        match item["type"]:
            case kind if kind in CALL_OUTPUTS:
                name = self._names.get(item["call_id"])
                self._messages.append(_client_result(item, name))
                if self._turn is not None and self._turn.calls:
                    self._turn = None
            case "message" if item["role"] != "assistant":
                self.add(_given(item))
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
        if turn is None or self._has_results or (not turn.calls and not {"content", field}.isdisjoint(turn.texts)):
            turn = self._begin_turn(item)  # content stands behind reasoning
        turn.texts[field].append(text)

    def _add_call(self, item: Item, call_id: str, name: str, arguments: str) -> None:
        """Add a call behind the text of its turn, or behind calls of the same round."""
        turn, number = self._turn, _note(item).get("round", 0)
        if turn is None or (turn.calls and turn.round != number):
            turn = self._begin_turn(item)
        turn.round = number
        turn.calls.append((call_id, name, arguments))

    def _begin_turn(self, item: Item) -> _ItemsOfTurn:
        self._has_results = False
        self._turn = _ItemsOfTurn(item)
        self._messages.append(self._turn)
        return self._turn


def _given(item: Item) -> Message:
    return Message.model_construct(role=item["role"], content=joined(item["content"]))


def _client_result(item: Item, name: str | None) -> Message:
    """A message with the result of a call that the client ran.

    Args:
        name: of the function that was called.
    """
    content = declared_text(item["tools"]) if item["type"] == "tool_search_output" else item["output"]
    return Message.model_construct(role="tool", tool_call_id=item["call_id"], name=name, content=content)


def _result(item: Item, text: str) -> Message:
    """A message with the result of a server's call."""
    fields = {"tool_call_id": _server_call_id(item), "name": item["name"], "content": text}
    return Message.model_construct(role="tool", **fields)


def _read_after(item: Item) -> int | None:
    """The number of further items behind which the model read the result of a future; None: there is no such result."""
    note = _note(item)
    is_future = item["type"] == "mcp_call" and item["output"] is not None and note.get("future") is not None
    return note.get("read_after") if is_future else None


def _server_call_id(item: Item) -> str:
    return _note(item).get("call_id") or item["id"]


def _note(item: Item) -> dict[str, Any]:
    return item.get("jinfercept") or {}
