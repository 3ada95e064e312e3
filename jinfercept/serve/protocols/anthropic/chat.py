"""Converts a body of Anthropic's `/v1/messages` to one of `/v1/chat/completions`, of which the request is made."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from jinfercept.calls import Call
from jinfercept.chat.messages import call_message
from jinfercept.chat.system_messages import with_leading_system
from jinfercept.serve.protocols.anthropic.schemas import (
    ContentBlock,
    CountTokensBody,
    InputMessage,
    InputTool,
    MessagesBody,
    OtherResultBlock,
    ProviderTool,
    ProviderToolBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_block,
)
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody, Plain
from jinfercept.serve.protocols.schemas import MAX_MESSAGES, Extensions, ResponseFormat

_FIELDS: Mapping[str | None, str] = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Fields of `/v1/messages` by the chat's field with the same meaning."""
_UNSUPPORTED = ("compaction", "container", "mcp_servers", "thread")
"""Fields of Anthropic's protocol that are not supported; others without a meaning here are ignored."""
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of an error for which Anthropic's client sends the whole conversation instead."""
_BILLING = "x-anthropic-billing-header:"
"""Beginning of a block of Claude Code's system prompt that is for Anthropic's accounts and differs between requests."""
_PLACES: dict[str, tuple[type[Any], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, ProviderToolBlock),
    "system": (TextBlock,),
}
"""Kinds of blocks by the roles of messages that may have them."""


def check_message_fields(body: CountTokensBody) -> None:
    """Raise 400 for fields and values that `/v1/messages` does not support."""
    for name in _UNSUPPORTED:
        if (body.model_extra or {}).get(name):
            details = _NO_THREADS if name == "thread" else None
            raise ApiError(400, f"{name} is not supported", param=name, details=details)


def fields_of(body: CountTokensBody) -> Mapping[str | None, str]:
    """The fields of a body by the chat's field with the same meaning."""
    return _FIELDS if body.output_format is None else {**_FIELDS, "response_format": "output_format"}


def chat_body(body: CountTokensBody) -> ChatBody:
    """The chat that a body is. Raises `ApiError`: 400 for what a chat has no place for."""
    if isinstance(body, MessagesBody) and body.messages[-1].role == "assistant":
        message = "the last message is the assistant's, and the beginning of an answer cannot be given here"
        raise ApiError.bad(f"{message}: end with a message of the user", f"messages[{len(body.messages) - 1}]")
    fields: dict[str, Any] = {name: getattr(body, name) for name in Extensions.model_fields}
    own = [tool for tool in body.tools or () if isinstance(tool, InputTool)]
    hosted = [tool for tool in body.tools or () if isinstance(tool, ProviderTool)]  # left out of the prompt
    defers = not any(tool.type.startswith("tool_search") for tool in hosted)  # else nothing finds them
    deferred = {tool.name: tool for tool in own if tool.defer_loading and defers}
    messages = _messages(body, deferred)
    tools = [tool for tool in own if not tool.defer_loading or tool.name not in deferred]
    thinks = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    fields |= {
        "messages": messages,
        "tools": [_declared(tool) | {"deferred": bool(tool.defer_loading and defers)} for tool in tools],
        **_tool_choice(body),
        "chat_template_kwargs": thinks | (body.chat_template_kwargs or {}),
        "reasoning_effort": body.output_config and body.output_config.effort,
        "response_format": _response_format(body),
    }
    if isinstance(body, MessagesBody):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            **{name: getattr(body, name) for name in ("stream", "temperature", "top_p", "top_k")},
        }
    return ChatBody.model_construct(**fields)


def _declared(tool: InputTool) -> Plain:
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.input_schema}}


def _tool_choice(body: CountTokensBody) -> dict[str, Any]:
    chosen = body.tool_choice
    if chosen is None:
        return {}
    named = {"type": "function", "function": {"name": chosen.name}} if chosen.name is not None else None
    return {
        "tool_choice": named or {"any": "required"}.get(chosen.type, chosen.type),
        "parallel_tool_calls": not chosen.disable_parallel_tool_use,
    }


def _response_format(body: CountTokensBody) -> ResponseFormat | None:
    form = body.output_config.format if body.output_config else None
    if None not in (form, body.output_format) and form != body.output_format:
        raise ApiError.bad("output_config.format and output_format differ: leave one out", "output_format")
    form = form or body.output_format
    return None if form is None else ResponseFormat.model_construct(type="json_schema", schema_=form.schema_)


def _messages(body: CountTokensBody, deferred: dict[str, InputTool]) -> list[Plain]:
    """The messages of a chat. A turn with results becomes one message for each, and one for each text beside them.

    Args:
        deferred: tools that the prompt declares where a result first refers to them, by name; those are removed.
    """
    system = body.system
    if not isinstance(system, str):  # what differs between requests of one conversation is not for the model
        system = _joined([block for block in system or () if not block.text.startswith(_BILLING)])
    messages: list[Plain] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}  # of the tools that were called, by the ids of calls
    for role, blocks in _turns(body.messages):
        if role == "assistant":
            messages.append(_assistant_message(blocks, names))
        elif role == "system":
            messages.append({"role": "system", "content": _joined(blocks)})
        else:
            messages += _user_messages(blocks, names, deferred)
    if len(messages) > MAX_MESSAGES:
        limit = f"a conversation has at most {MAX_MESSAGES} messages, results of calls counted"
        raise ApiError.bad(f"{limit}; got {len(messages)}", "messages")
    return with_leading_system(messages) if any(message["role"] == "system" for message in messages[1:]) else messages


def _turns(messages: Sequence[InputMessage]) -> list[tuple[str, list[Any]]]:
    """The blocks of messages by role; those of one role in a row are one turn, but for the system's.

    Raises:
        ApiError: 400, for a block that belongs into a message of another role.
    """
    turns: list[tuple[str, list[Any]]] = []
    for number, message in enumerate(messages):
        for place, block in enumerate(message.blocks):
            if not isinstance(block, _PLACES[message.role]):
                field = f"messages[{number}].content[{place}]"
                raise ApiError.bad(f"a message of role {message.role} must not have {block.type} blocks", field)
        if not turns or message.role == "system" or turns[-1][0] != message.role:
            turns.append((message.role, []))
        turns[-1][1].extend(message.blocks)
    return turns


def _user_messages(blocks: Sequence[Any], names: Mapping[str, str], deferred: dict[str, InputTool]) -> Iterator[Plain]:
    """The messages of a user's turn; `names` and `deferred` as in `_messages`."""
    for is_text, group in groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            yield {"role": "user", "content": _joined(group)}
        else:
            for block in group:
                name = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
                text = _result_text(block, deferred)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, **name, "content": text}
    if not blocks:
        yield {"role": "user", "content": ""}


def _result_text(block: ToolResultBlock, deferred: dict[str, InputTool]) -> str:
    texts: list[str] = []
    for part in [text_block(block.content)] if isinstance(block.content, str) else block.content or ():
        if isinstance(part, TextBlock):
            texts.append(part.text)
        elif isinstance(part, OtherResultBlock):
            texts.append(part.shown())
        else:
            tool = deferred.pop(part.tool_name, None)
            declared = _declared(tool) if tool else {"name": part.tool_name}
            texts.append(json.dumps(declared, ensure_ascii=False))
    text = "\n\n".join(texts)
    return f"error: {text}" if block.is_error else text


def _assistant_message(blocks: Sequence[ContentBlock], names: dict[str, str]) -> Plain:
    thoughts = "\n\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = list[Plain]()
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            arguments = json.dumps(block.input, ensure_ascii=False)  # the parser of the body limits how deep it is
            calls.append(call_message(Call(block.name, arguments, id=block.id)))
    content = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thought = {"reasoning_content": thoughts} if thoughts else {}
    return {"role": "assistant", "content": content, **thought} | ({"tool_calls": calls} if calls else {})


def _joined(blocks: Iterable[TextBlock]) -> str:
    """Blocks of text as one text, with a blank line between two of them."""
    return "\n\n".join(block.text for block in blocks)
