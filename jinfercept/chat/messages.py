"""Messages of a conversation, in the form that chat templates take."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.request import Call

Message = Mapping[str, Any]
"""OpenAI-style: `role`, `content`, and `tool_calls` or `tool_call_id`.

An assistant's reasoning may stand beside it as `reasoning_content`, the name in templates, DeepSeek and older vLLM, or as
`reasoning`, the name in vLLM now; the template decides whether the model reads it again.
"""


def call_message(call: Call) -> dict[str, Any]:
    """A call as it stands in an assistant's message."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def checked_message(message: object) -> dict[str, Any]:
    """A message as templates take it: text parts joined, arguments as objects. Raises `RequestError` for anything else."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("a message has a role", got=repr(message)[:80], fix='{"role": "user", "content": "…"}')
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else parts
    if not isinstance(content, str | None):
        raise RequestError("a message's content is text", got=repr(message)[:80], fix="give a string, or text parts")
    checked = {**message, "content": content or ""}
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        checked |= {"reasoning_content": thought, "reasoning": thought}  # templates read the one, some the other
    calls = checked.pop("tool_calls", None) or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(
            "a message's tool_calls are a list", got=repr(calls)[:80], fix="leave them out, or give calls"
        )
    if calls:
        checked["tool_calls"] = [_call_with_object(call) for call in calls]
    return checked


def one_call_a_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every call in an assistant's message of its own, before its result."""
    split: list[dict[str, Any]] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        results: list[dict[str, Any]] = []
        while left and left[0]["role"] == "tool":
            results.append(left.popleft())
        for index, call in enumerate(calls):
            split.append(message | {"tool_calls": [call], "content": "" if index else message["content"]})
            split += [result for result in results if result.get("tool_call_id") == call.get("id")]
    return split


def _call_with_object(call: object) -> dict[str, Any]:
    """A call with its arguments parsed, if they are JSON."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError("a message's tool_calls are calls", got=repr(call)[:80], fix="give them as OpenAI does")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}
