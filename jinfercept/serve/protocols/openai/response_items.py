"""Converts the items of a body of `/v1/responses` to stored items.

Stored items are dicts, with the same form for input and output.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.chat_schemas import RefusalPart
from jinfercept.serve.protocols.openai.response_schemas import (
    MAX_ITEMS,
    AdditionalToolsItem,
    CallOutputItem,
    CompactionItem,
    CustomToolCallItem,
    FunctionCallItem,
    InputItem,
    ItemReference,
    LocalShellCallItem,
    McpCallItem,
    MessageItem,
    OtherItem,
    ReasoningItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from jinfercept.serve.protocols.openai.response_tools import CLIENT_CALLS, InputTool, NamespaceTool

Item = dict[str, Any]
"""A stored item: `id`, `type`, `status`, and the fields of its type."""

SERVER_LABEL = "jinfercept"

CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output")
"""Types of the items of results of calls that the client ran."""

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "mcp_call": "mcp",
    "reasoning": "rs",
    "compaction": "cmp",
}


def new_item(kind: str, status: str = "completed", **fields: Any) -> Item:
    return {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind, "status": status, **fields}


def server_call(name: str, note: dict[str, Any]) -> dict[str, Any]:
    """Fields of a call that the server runs, before its arguments are known."""
    fixed = {"output": None, "error": None, "server_label": SERVER_LABEL, "approval_request_id": None}
    return {"name": name, "arguments": "", **fixed, "jinfercept": note}


def check_length(num_added: int, num_before: int, param: str = "input") -> None:
    """Raise 400 if a conversation has too many items. Items without text count too."""
    if num_before + num_added > MAX_ITEMS:
        message = (
            f"a conversation has at most {MAX_ITEMS} items; this one has {num_before}, and {num_added} would be added"
        )
        raise ApiError.bad(message, param, "too_many_items")


def references(body_input: Sequence[InputItem]) -> set[str]:
    """Ids of the stored items that a body refers to."""
    return {item.id for item in body_input if isinstance(item, ItemReference)}


def read_items(
    body_input: Sequence[InputItem],
    before: Iterable[Item],
    referred: Mapping[str, Item],
    *,
    check_calls: bool = True,
) -> list[Item]:
    """The stored items of a body. Slow: a body may have half a million parts.

    Args:
        before: the conversation that it continues.
        referred: items of stored responses by the ids of `references`.
        check_calls: whether each result needs its call before it.

    Raises:
        ApiError: 400 for a result without its call.
    """
    call_ids: dict[str, str] = {}
    for item in before:
        call_ids |= _call_ids(item)
    items: list[Item] = []
    for index, part in enumerate(body_input):
        if isinstance(part, OtherItem):
            continue
        item = referred[part.id] if isinstance(part, ItemReference) else _converted(part)
        call_ids |= _call_ids(item)
        if item["type"] in CALL_OUTPUTS:
            call_id = call_ids.get(item["call_id"])
            if call_id is None and (check_calls or not item["call_id"]):
                raise ApiError.bad(f"no earlier item is the call {item['call_id']!r}", f"input[{index}].call_id")
            if call_id != item["call_id"]:
                item = item | {"call_id": call_id or item["call_id"]}
        items.append(item)
    return items


def _call_ids(item: Item) -> dict[str, str]:
    """The id of a client's call, by the ids that its result may name. A result of the local shell may name the item."""
    if item["type"] not in CLIENT_CALLS:
        return {}
    call_id = item["call_id"]
    return {call_id: call_id} | ({item["id"]: call_id} if item["type"] == "local_shell_call" else {})


def _converted(item: InputItem) -> Item:
    fields: dict[str, Any]
    match item:
        case MessageItem():
            if isinstance(item.content, str):
                parts = [item.content]
            else:
                parts = [p.refusal if isinstance(p, RefusalPart) else p.text for p in item.content]
            fields = {"role": item.role, "content": [_text(part, item.role) for part in parts]}
        case FunctionCallItem() | CustomToolCallItem() | LocalShellCallItem() | ToolSearchCallItem():
            fields = _call_fields(item)
        case ToolSearchOutputItem():
            fields = {"execution": "client", "call_id": item.call_id, "tools": _dumped(item.tools)}
        case AdditionalToolsItem():
            fields = {"role": "developer", "tools": _dumped(item.tools)}
        case McpCallItem():
            note = _read_fields(item.jinfercept) if item.jinfercept else {}
            fields = server_call(item.name, note) | {"arguments": item.arguments, "output": item.output}
            fields["status"] = item.status or "completed"
        case CallOutputItem():
            output = item.output if isinstance(item.output, str) else "".join(part.shown() for part in item.output)
            if item.call_id is None:
                return new_item(item.type, call_id=item.id or "", output=output)
            fields = {"call_id": item.call_id, "output": output}
        case ReasoningItem():
            thoughts = [{"type": "reasoning_text", "text": text} for text in _texts(item.content)]
            fields = {"summary": [{"type": "summary_text", "text": text} for text in _texts(item.summary)]}
            fields["content"] = thoughts
        case CompactionItem():
            fields = {"encrypted_content": item.encrypted_content}
        case ItemReference() | OtherItem():
            raise AssertionError("references are looked up, and items of other types left out")
    own = new_item(item.type, **fields)
    return own | {"id": item.id} if item.id is not None else own


def _dumped(tools: Sequence[InputTool]) -> list[dict[str, Any]]:
    return [
        _read_fields(tool, exclude={"tools"}, exclude_none=True)
        | ({"tools": _dumped(tool.tools)} if isinstance(tool, NamespaceTool) else {})
        for tool in tools
    ]


def _read_fields(part: BaseModel, **options: Any) -> dict[str, Any]:
    return part.model_dump(include=set(type(part).model_fields), **options)


def _call_fields(
    item: FunctionCallItem | CustomToolCallItem | LocalShellCallItem | ToolSearchCallItem,
) -> dict[str, Any]:
    fields: dict[str, Any] = item.model_dump(include={"name", CLIENT_CALLS[item.type]})
    fields |= item.model_dump(include={"namespace"}, exclude_none=True)
    if isinstance(item, LocalShellCallItem):
        fields["action"] = _read_fields(item.action) | {"type": "exec"}
    if isinstance(item, ToolSearchCallItem):
        fields["execution"] = "client"
    fields["call_id"] = item.call_id or item.id or f"call_{secrets.token_hex(16)}"
    fields["status"] = item.status or "completed"
    return fields | ({"jinfercept": _read_fields(item.jinfercept)} if item.jinfercept else {})


def _texts(parts: Any) -> list[str]:
    listed = [parts] if isinstance(parts, str | dict) else parts if isinstance(parts, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in listed]
    return [text for text in texts if isinstance(text, str)]


def _text(text: str, role: str) -> dict[str, Any]:
    answer = {"type": "output_text", "text": text, "annotations": list[Any]()}
    return answer if role == "assistant" else {"type": "input_text", "text": text}


def written_text(response: Mapping[str, Any]) -> str:
    """The text of the messages in a response."""
    return "".join(joined(item["content"]) for item in response["output"] if item["type"] == "message")


def joined(parts: Sequence[dict[str, Any]]) -> str:
    """The text of stored parts."""
    return "".join(part["text"] for part in parts)
