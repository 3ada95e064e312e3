"""Messages of a conversation: checks, order, the forms that chat templates take, and when two messages are equal."""

import hashlib
import json
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any

from jinfercept.calls import Call
from jinfercept.errors import RequestError, nearest, shown

Message = Mapping[str, Any]
"""OpenAI-style: `role`, `content`, and `tool_calls` or `tool_call_id`.

An assistant's reasoning may stand beside it as `reasoning_content`, the name in templates, DeepSeek and older vLLM, or as
`reasoning`, the name in vLLM now; the template decides whether the model reads it again.
"""


_ROLES = ("system", "developer", "user", "assistant", "tool")


def call_message(call: Call) -> dict[str, Any]:
    """Write a call as an entry of an assistant's message."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_ids(messages: Sequence[Message]) -> frozenset[str]:
    ids = (call.get("id") for message in messages for call in message.get("tool_calls") or ())
    return frozenset(call_id for call_id in ids if isinstance(call_id, str))


WRITTEN_CALLS = "written_calls"
"""Field of a checked message: its calls as text, which belongs behind its content. Clients cannot set it."""

ArgumentForm = Callable[[Any], Any]
"""Makes the arguments of a call, as a client gives them, those that a template reads."""


def checked_message(message: object) -> dict[str, Any]:
    """Check a message and return it as templates take it, with text parts joined. Its calls may be in any of `ARGUMENT_FORMS`.

    Raises `RequestError` if it is no message.
    """
    if not isinstance(message, dict | Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("a message has a role", got=shown(message), fix='{"role": "user", "content": "…"}')
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        what = f"the role of a message is one of {', '.join(_ROLES)}"
        raise RequestError(what, got=f"{shown(role)}{nearest(role, _ROLES)}", fix="give one of them")
    if content in (None, [], ()) and role not in ("assistant", "tool"):
        raise RequestError(f"a message of the role {role} has content", got=shown(message), fix="give a text")
    if message.get("function_call") is not None:
        fix = "give the call in tool_calls, and its result the role tool"
        raise RequestError("a message has no function_call", got=shown(message["function_call"]), fix=fix)
    if not isinstance(content, str) and isinstance(content, Sequence):
        content = _joined(content)
    if not isinstance(content, str | None):
        raise RequestError("a message's content is text", got=shown(message), fix="give a string, or text parts")
    checked = {**message, "content": content or ""}
    checked.pop(WRITTEN_CALLS, None)
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        if not isinstance(thought, str):
            raise RequestError("a message's reasoning is text", got=shown(thought), fix="give a string")
        checked |= {"reasoning_content": thought, "reasoning": thought}  # templates read the one, some the other
    calls = checked.pop("tool_calls", None) or ()
    if calls:
        checked["tool_calls"] = _checked_calls(calls)
    return checked


def _joined(parts: Sequence[Any]) -> object:
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else texts


def results_behind_calls[M](messages: Iterable[M], read: Callable[[Any], Message] = lambda message: message) -> list[M]:
    """Put the results of each turn directly after it, in the order of its calls; other messages follow them.

    Templates tie results to calls by their places: a result elsewhere is read as that of another call, or not at all.

    Args:
        read: gives the fields of a message; by default the message itself, which is checked.
    """
    rows = [(message, read(message)) for message in messages]
    if not [fields for _, fields in rows if fields["role"] == "tool"]:
        return [message for message, _ in rows]
    return [each for message, results in _with_results(rows) for each in (message, *chain(*results))]


def one_call_a_turn(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every call its own message of the assistant, before its result."""
    split: list[dict[str, Any]] = []
    for message, results in _with_results((message, message) for message in messages):
        if len(results) < 2:
            split += (message, *chain(*results))
            continue
        for index, (call, own) in enumerate(zip(message["tool_calls"], results, strict=True)):
            split += (message | {"tool_calls": [call], "content": "" if index else message["content"]}, *own)
    return split


def _with_results[M](messages: Iterable[tuple[M, Message]]) -> list[tuple[M, list[list[M]]]]:
    """Pair each message with the results of its calls. A result without a call is a message by itself.

    Clients number calls anew in each turn, or leave ids out. So a result belongs to the last turn that has a call with its id;
    without an id, a call with its name, or any call. In that turn it goes to the first call without a result. A further result
    of a call belongs to it until the next turn. After that it stays in its place, where the model reads the late result of a
    future. Consecutive messages of the assistant are one turn.
    """
    rows: list[tuple[M, list[list[M]]]] = []
    calls: dict[
        Any, tuple[int, deque[list[M]]]
    ] = {}  # number of the turn and results, by id, by (name,), and "" for any
    turn, before = 0, ""
    for message, fields in messages:
        role = fields["role"]
        turn += role == "assistant" != before
        before = role
        if role == "tool":
            name = (str(fields.get("name")),)
            number, results = calls.get(_id(fields, "tool_call_id") or (name if name in calls else ""), (0, deque()))
            while len(results) > 1 and results[0]:
                results.popleft()
            if results and (number == turn or not results[0]):
                results[0].append(message)
                continue
        own: list[list[M]] = []
        for call in fields.get("tool_calls") or ():
            own.append([])
            for key in (_id(call, "id"), (str(call["function"].get("name")),), ""):
                if calls.get(key, (0,))[0] != turn:
                    calls[key] = turn, deque()
                calls[key][1].append(own[-1])
        rows.append((message, own))
    return rows


def _id(fields: Mapping[str, Any], name: str) -> str:
    return str(fields.get(name) or "")


def with_arguments(messages: list[dict[str, Any]], form: ArgumentForm) -> list[dict[str, Any]]:
    """Convert the arguments of all calls to a form."""

    def formed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": form(function.get("arguments"))}}

    return [
        {**message, "tool_calls": [*map(formed, calls)]} if (calls := message.get("tool_calls")) else message
        for message in messages
    ]


def _checked_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        fix = "leave them out, or give calls"
        raise RequestError("tool_calls of a message must be a list", got=shown(calls), fix=fix)
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            fix = "give them as OpenAI does"
            raise RequestError("an entry of tool_calls is not a tool call", got=shown(call), fix=fix)
    return [dict(call) for call in calls]


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments or "{}")
        if "\\u" not in arguments:
            return value
        # halves of surrogate pairs are replaced
        whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return json.loads(whole)
    return arguments


def _object(arguments: Any) -> dict[str, Any]:
    value = _value(arguments)
    if isinstance(value, dict):
        return value
    return {} if value is None else {"arguments": value}


def _text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


ARGUMENT_FORMS: tuple[ArgumentForm, ...] = (_value, _object, _text)
"""How a template may want the arguments of calls: most take any JSON value, some only objects, some a text."""


_COMPARED = frozenset({"role", "content", "tool_calls"})
_UNREAD = _COMPARED | (
    {"reasoning", "reasoning_content"}
    | {"annotations", "audio", "function_call", "id", "index", "jinfercept", "parsed", "refusal", "status"}
    | {"provider_specific_fields"}
)
"""Fields of an assistant's message that are compared in another way, or that no template reads."""


_ENCODER = json.JSONEncoder(sort_keys=True, default=str)


def digests(first: Any, messages: Sequence[Message]) -> list[str]:
    """Compute the digests of a conversation: first before its messages, then up to each of them.

    `first` is the digest before them, or JSON values. The messages are checked.
    """
    chain = [first if isinstance(first, str) else hashlib.sha256(_encoded(first)).hexdigest()]
    for message in messages:
        chain.append(hashlib.sha256(chain[-1].encode() + _compared(message)).hexdigest())
    return chain


def _compared(message: Message) -> bytes:
    # equal messages have equal bytes although clients leave reasoning out and write arguments anew
    role, content, calls = message["role"], message["content"], message.get("tool_calls", ())
    if role == "assistant":
        content = content.strip()
    written = [
        [call.get("id"), call["function"].get("name"), _value(call["function"].get("arguments"))] for call in calls
    ]
    unread = _UNREAD if role == "assistant" else _COMPARED
    more = {key: value for key, value in message.items() if key not in unread and value is not None}
    head = _encoded([role, written, more]) if written or more else _of_role(role)
    return head + b"\0" + content.encode(errors="surrogatepass")  # JSON has no such byte


@lru_cache(maxsize=16)
def _of_role(role: str) -> bytes:
    return _encoded([role, [], {}])


def _encoded(value: Any) -> bytes:
    try:
        return _ENCODER.encode(value).encode()
    except RecursionError:
        # nested too deeply: equal to no other value
        return secrets.token_bytes()
