"""Converts a body of `/v1/responses`, and the stored items of its conversation, to a body of `/v1/chat/completions`."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, final

from jinfercept.calls import Call
from jinfercept.chat.futures import placeholder
from jinfercept.chat.messages import call_message, results_behind_calls
from jinfercept.chat.system_messages import SYSTEM_ROLES
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody, Plain
from jinfercept.serve.protocols.openai.compaction import INTRODUCTION, summary_in
from jinfercept.serve.protocols.openai.response_items import CALL_OUTPUTS, Item, joined
from jinfercept.serve.protocols.openai.response_schemas import LOGPROBS, ResponsesBody
from jinfercept.serve.protocols.openai.response_tools import CLIENT_CALLS, ClientTools, called_function, declared_text
from jinfercept.serve.protocols.schemas import MAX_MESSAGES, TRAINING_FIELDS, SamplingBody

FIELDS: Mapping[str | None, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "logprobs": "top_logprobs",
}
"""Fields of `/v1/responses` by the chat's field with the same meaning."""
REPORTS = 5
"""Events that carry the log probabilities of a token: its own, and the ends of its text, part, item and response."""
_TOO_LONG = "context_length_exceeded"
_METADATA_LIMITS = (16, 64, 512)
"""Maximum pairs, characters of a name, characters of a value."""


def check_supported(body: ResponsesBody) -> None:
    """Raise 400 for fields and values that `/v1/responses` does not support."""
    defaults = {"n": 1, "response_format": None, "prompt_logprobs": None, "return_token_ids": False}
    defaults |= {"return_routed_experts": False, **dict.fromkeys(TRAINING_FIELDS, False)}
    for name, harmless in defaults.items():
        if getattr(body, name) not in (None, harmless):
            raise ApiError.bad(f"{name} is not supported in responses", name, "unsupported_parameter")
    for name, what, fix in (
        ("prompt", "prompt templates are", "leave prompt out"),
        ("context_management", "compaction at a threshold is", "POST /v1/responses/compact"),
    ):
        if (body.model_extra or {}).get(name):
            raise ApiError.bad(f"{what} not supported; fix: {fix}", name, "unsupported_parameter")
    if body.background and body.store is False:
        raise ApiError.bad("background: true needs store: true", "background")
    if body.conversation is not None and body.previous_response_id is not None:
        raise ApiError.bad("conversation and previous_response_id are both given; fix: leave one out", "conversation")
    check_metadata(body.metadata or {})


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise 400 for metadata beyond OpenAI's limits."""
    pairs, name_length, value_length = _METADATA_LIMITS
    fits = len(metadata) <= pairs and all(
        len(name) <= name_length and isinstance(value, str) and len(value) <= value_length
        for name, value in metadata.items()
    )
    if not fits:
        limits = f"{pairs} texts of {value_length} characters, under names of {name_length}"
        raise ApiError.bad(f"metadata are at most {limits}", "metadata")


def truncated[T](messages: list[Plain], make: Callable[[list[Plain]], T]) -> T:
    """The request of a conversation, without the oldest messages if it is too long: of the longest end that fits.

    An end begins with a message of the user, behind the leading messages of the system. Raises the error of `make` if not even
    the last one fits.
    """
    messages = results_behind_calls(messages)  # no end separates a result from its call
    try:
        return make(messages)
    except ApiError as error:
        if error.code != _TOO_LONG:
            raise
        too_long = error
    is_system = [message["role"] in SYSTEM_ROLES for message in messages]
    head = is_system.index(False) if False in is_system else len(messages)
    starts = [place for place in range(head + 1, len(messages)) if messages[place]["role"] == "user"]
    fitting: T | None = None

    def fits(start: int) -> bool:
        nonlocal fitting
        try:
            fitting = make([*messages[:head], *messages[start:]])
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            return False
        return True

    bisect_left(starts, True, key=fits)  # the last one that fits is the longest
    if fitting is None:
        raise too_long
    return fitting


def chat_body(body: ResponsesBody, messages: Sequence[Plain], tools: ClientTools) -> ChatBody:
    """The chat that a body is, with the messages of the whole conversation."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise ApiError.bad(f"a conversation has between 1 and {MAX_MESSAGES} messages, not {len(messages)}", "input")
    alike = {name: getattr(body, name) for name in SamplingBody.model_fields}
    fields: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": 1 if body.generate is False else body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "logprobs": wants_logprobs(body),
        "top_logprobs": body.top_logprobs,
        "tools": tools.declarations,
        "tool_choice": tools.chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": body.text and body.text.format,
    }
    return ChatBody.model_construct(**(alike | fields))


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the body requests log probabilities."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def messages_of(items: Iterable[Item], instructions: str | None) -> list[Plain]:
    """The messages of a conversation. Reasoning, text and calls of one turn are one message.

    Incomplete calls of the client's tools are left out, but for those with a result.
    """
    items = list(items)
    messages = _Messages(instructions, {item["call_id"] for item in items if item["type"] in CALL_OUTPUTS})
    late: dict[int, list[Plain]] = defaultdict(
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


_GLUES = {"content": "", "reasoning_content": "\n\n"}
"""What stands between the texts of a turn, by the field of its message."""


@final
class _Messages:
    """The messages of the items that were added. The calls of `answered` have a result of the client's."""

    def __init__(self, instructions: str | None, answered: Container[str]) -> None:
        self._answered = answered
        self._messages = list[Plain]()  # with lists of texts in turns of the assistant
        if instructions is not None:
            self._messages.append({"role": "system", "content": instructions})
        self._names: dict[str, str] = {}  # of the functions that were called, by the ids of calls
        self._turn: Plain | None = None  # the last one of the assistant, if an item may belong to it
        self._round = 0  # of its last calls
        self._has_results = False  # of calls of that turn

    def add(self, message: Plain) -> None:
        """Add a message after which another turn of the assistant begins."""
        self._messages.append(message)
        self._turn = None

    def whole(self) -> list[Plain]:
        return [
            message | {name: glue.join(message[name]) for name, glue in _GLUES.items() if name in message}
            if message["role"] == "assistant"
            else message
            for message in self._messages
        ]

    def add_item(self, item: Item) -> None:
        match item["type"]:
            case kind if kind in CALL_OUTPUTS:
                name = self._names.get(item["call_id"])
                self._messages.append(_client_result(item, name))
                if self._turn is not None and "tool_calls" in self._turn:
                    self._turn = None
            case "message" if item["role"] != "assistant":
                role = "system" if item["role"] == "developer" else item["role"]
                self.add({"role": role, "content": joined(item["content"])})
            case "compaction":
                summary = summary_in(item["encrypted_content"])
                assert summary is not None
                self.add({"role": "user", "content": INTRODUCTION + summary})
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
        if (
            turn is None
            or self._has_results
            or ("tool_calls" not in turn and not turn.keys().isdisjoint({"content", field}))
        ):
            turn = self._begin_turn(item)  # content stands behind reasoning
        turn.setdefault(field, []).append(text)

    def _add_call(self, item: Item, call_id: str, name: str, arguments: str) -> None:
        turn, number = self._turn, _note(item).get("round", 0)
        if turn is None or ("tool_calls" in turn and self._round != number):
            turn = self._begin_turn(item)
        self._round = number
        turn.setdefault("tool_calls", []).append(call_message(Call(name, arguments, id=call_id)))

    def _begin_turn(self, item: Item) -> Plain:
        self._has_results, self._round = False, _note(item).get("round", 0)
        self._turn = {"role": "assistant"}
        self._messages.append(self._turn)
        return self._turn


def _client_result(item: Item, name: str | None) -> Plain:
    content = declared_text(item["tools"]) if item["type"] == "tool_search_output" else item["output"]
    named = {} if name is None else {"name": name}
    return {"role": "tool", "tool_call_id": item["call_id"], **named, "content": content}


def _result(item: Item, text: str) -> Plain:
    return {"role": "tool", "tool_call_id": _server_call_id(item), "name": item["name"], "content": text}


def _read_after(item: Item) -> int | None:
    note = _note(item)
    is_future = item["type"] == "mcp_call" and item["output"] is not None and note.get("future") is not None
    return note.get("read_after") if is_future else None


def _server_call_id(item: Item) -> str:
    return _note(item).get("call_id") or item["id"]


def _note(item: Item) -> dict[str, Any]:
    return item.get("jinfercept") or {}
