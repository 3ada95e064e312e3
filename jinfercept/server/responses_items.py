"""Converts items of `/v1/responses`: from a body to stored items, and from stored items to the messages of a chat.

Stored items are dicts, with the same form for input and output.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from jinfercept.chat.futures import placeholder
from jinfercept.server.chat_protocol import CalledFunction, Message, ToolCall
from jinfercept.server.errors import ApiError
from jinfercept.server.responses_protocol import (
    MAX_ITEMS,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    ItemReference,
    ItemRefusalPart,
    McpCallItem,
    MessageItem,
    ReasoningItem,
)

Item = dict[str, Any]
"""A stored item: `id`, `type`, `status`, and the fields of its type."""

SERVER_LABEL = "jinfercept"

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "mcp_call": "mcp",
    "reasoning": "rs",
}


def new_item(kind: str, status: str = "completed", **fields: Any) -> Item:
    """An item with a new id."""
    return {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": status, **fields}


def server_call(name: str, note: dict[str, Any]) -> dict[str, Any]:
    """Fields of a call that the server runs, before its arguments are known.

    Args:
        name: of the tool.
        note: fields of `CallNote`.
    """
    fixed = {"server_label": SERVER_LABEL, "approval_request_id": None}
    return {"name": name, "arguments": "", "output": None, "error": None} | fixed | {"jinfercept": note}


def check_length(given: str | Sequence[InputItem], num_before: int) -> None:
    """Raise 400 if a conversation has too many items. Items without text count too.

    Args:
        given: the body's `input`.
        num_before: items of the conversation that it continues.
    """
    number = num_before + (1 if isinstance(given, str) else len(given))
    if number > MAX_ITEMS:
        message = f"a conversation has at most {MAX_ITEMS} items; with the {num_before} before it this one has {number}"
        raise ApiError.bad(message, "input", "too_many_items")


def references(given: str | Sequence[InputItem]) -> set[str]:
    """Ids of the stored items that a body refers to."""
    return set() if isinstance(given, str) else {one.id for one in given if isinstance(one, ItemReference)}


def read_items(
    given: str | Sequence[InputItem],
    before: Iterable[Item],
    referred: Mapping[str, Item],
    *,
    check_calls: bool = True,
) -> list[Item]:
    """The stored items of a body. Slow: a body may have half a million parts.

    Args:
        given: the body's `input`.
        before: the conversation that it continues.
        referred: items of stored responses by the ids of `references`.
        check_calls: whether each result needs its call before it.

    Raises:
        ApiError: 400 for a result without its call.
    """
    if isinstance(given, str):
        return [new_item("message", role="user", content=[_text(given, "user")])]
    called = {item["call_id"] for item in before if item["type"] == "function_call"}
    items: list[Item] = []
    for index, one in enumerate(given):
        item = referred[one.id] if isinstance(one, ItemReference) else _stored(one)
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif check_calls and item["type"] == "function_call_output" and item["call_id"] not in called:
            raise ApiError.bad(f"there is no call {item['call_id']!r} before its output", f"input[{index}].call_id")
        items.append(item)
    return items


def messages_of(items: Iterable[Item], instructions: str | None) -> list[Message]:
    """The messages of a conversation. Reasoning, text and calls of one turn are one message; incomplete calls are left out."""
    messages = [Message.model_construct(role="system", content=instructions)] if instructions is not None else []
    names: dict[str, str] = {}
    turn: Message | None = None  # the current one of the assistant
    round_of_turn = 0
    later: list[tuple[int, Message]] = []  # results of futures, and the number of the item before which they stand
    number = 0
    for place, item in enumerate(items):
        number = place + 1
        if due := [message for at, message in later if at == place]:
            messages += due
            turn = None
        match item["type"]:
            case "function_call_output":
                call_id = item["call_id"]
                said = {"role": "tool", "tool_call_id": call_id, "name": names.get(call_id), "content": item["output"]}
                messages.append(Message.model_construct(**said))
                turn = None
            case "message" if item["role"] != "assistant":
                messages.append(Message.model_construct(role=item["role"], content=_joined(item["content"])))
                turn = None
            case "function_call" if item["status"] == "incomplete":
                continue
            case "mcp_call" if item["output"] is None:
                continue
            case kind:
                number = (item.get("jinfercept") or {}).get("round", 0)
                if turn is None or not _joins(kind, turn) or (turn.tool_calls and number != round_of_turn):
                    turn = Message.model_construct(role="assistant")
                    messages.append(turn)
                round_of_turn = number
                _join(item, turn)
                if kind == "function_call":
                    names[item["call_id"]] = item["name"]
                elif kind == "mcp_call":
                    note, result = item.get("jinfercept") or {}, _result(item, item["output"])
                    if (future := note.get("future")) is not None:
                        messages.append(_result(item, placeholder(future)))
                        after = note.get("read_after")
                        later += [] if after is None else [(place + 1 + after, result)]
                    else:
                        messages.append(result)
    messages += [message for at, message in later if at >= number]
    return _in_call_order(messages)


def _result(item: Item, text: str) -> Message:
    """A message with the result of a server's call."""
    said = {"tool_call_id": _call_id(item), "name": item["name"], "content": text}
    return Message.model_construct(role="tool", **said)


def _in_call_order(messages: list[Message]) -> list[Message]:
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


def _call_id(item: Item) -> str:
    note = item.get("jinfercept") or {}
    return item["call_id"] if item["type"] == "function_call" else note.get("call_id") or item["id"]


def _joins(kind: str, turn: Message) -> bool:
    """Whether an item belongs to the current turn: text follows its reasoning, calls follow both."""
    if kind in ("function_call", "mcp_call"):
        return True
    empty = turn.content is None and turn.tool_calls is None
    return empty and (kind == "message" or getattr(turn, "reasoning_content", None) is None)


def _join(item: Item, turn: Message) -> None:
    match item["type"]:
        case "message":
            turn.content = _joined(item["content"])
        case "reasoning":
            turn.reasoning_content = _joined(item["content"])  # pyright: ignore[reportAttributeAccessIssue] # a template's own
        case _:
            function = CalledFunction.model_construct(name=item["name"], arguments=item["arguments"])
            call = ToolCall.model_construct(id=_call_id(item), type="function", function=function)
            turn.tool_calls = [*(turn.tool_calls or ()), call]


def _stored(item: InputItem) -> Item:
    fields: dict[str, Any]
    match item:
        case MessageItem():
            parts = [item.content] if isinstance(item.content, str) else [_said(part) for part in item.content]
            fields = {"role": item.role, "content": [_text(part, item.role) for part in parts]}
        case FunctionCallItem():
            fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            fields["status"] = item.status or "completed"
            fields |= {"jinfercept": item.jinfercept.model_dump()} if item.jinfercept else {}
        case McpCallItem():
            note = item.jinfercept.model_dump() if item.jinfercept else {}
            fields = server_call(item.name, note) | {"arguments": item.arguments, "output": item.output}
            fields["status"] = item.status or "completed"
        case FunctionCallOutputItem():
            output = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
            fields = {"call_id": item.call_id, "output": output}
        case ReasoningItem():
            thoughts = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            fields = {"summary": [part.model_dump(include={"type", "text"}) for part in item.summary or ()]}
            fields["content"] = thoughts
        case ItemReference():
            raise AssertionError("references are looked up")
    own = new_item(item.type, **fields)
    return own | {"id": item.id} if item.id is not None else own


def _said(part: Any) -> str:
    return part.refusal if isinstance(part, ItemRefusalPart) else part.text


def _text(text: str, role: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []} if role == "assistant" else _given(text)


def _given(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def _joined(parts: Sequence[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
