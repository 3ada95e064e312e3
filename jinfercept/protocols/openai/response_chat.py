"""Converts a body of `/v1/responses` to one of `/v1/chat/completions`, of which the requests are made."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from jinfercept.chat.messages import results_behind_calls
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.chat_schemas import MAX_MESSAGES, ChatBody, Message
from jinfercept.protocols.openai.response_schemas import LOGPROBS, ResponsesBody
from jinfercept.protocols.openai.response_tools import ClientTools
from jinfercept.protocols.schemas import TRAINING_FIELDS, ResponseFormat, SamplingBody

_FIELDS = {
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
    if (body.model_extra or {}).get("prompt") is not None:
        raise ApiError.bad(
            "prompt templates are not supported; fix: leave prompt out", "prompt", "unsupported_parameter"
        )
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


def truncated[T](messages: list[Message], make: Callable[[list[Message]], T]) -> T:
    """The request of a conversation, without the oldest messages if it is too long: of the longest end that fits.

    An end begins with a message of the user, behind the leading messages of the system. Raises the error of `make` if not even
    the last one fits.
    """
    messages = results_behind_calls(messages, attrgetter("as_read"))  # no end separates a result from its call
    try:
        return make(messages)
    except ApiError as error:
        if error.code != _TOO_LONG:
            raise
        too_long = error
    is_system = [message.role in ("system", "developer") for message in messages]
    head = is_system.index(False) if False in is_system else len(messages)
    starts = [place for place in range(head + 1, len(messages)) if messages[place].role == "user"]
    request: T | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        try:
            request = make([*messages[:head], *messages[starts[middle] :]])
            high = middle
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            low = middle + 1
    if request is None:
        raise too_long
    return request


def renamed(error: ApiError) -> ApiError:
    """An error about a chat, with the field of `/v1/responses`."""
    error.param = _FIELDS.get(error.param, error.param) if error.param else None
    return error


def chat_body(body: ResponsesBody, messages: Sequence[Message], tools: ClientTools) -> ChatBody:
    """The chat that a body is.

    Args:
        messages: the whole conversation.
        tools: the body's, as functions.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise ApiError.bad(f"a conversation has between 1 and {MAX_MESSAGES} messages, not {len(messages)}", "input")
    alike = {name: getattr(body, name) for name in SamplingBody.model_fields}
    fields: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "logprobs": wants_logprobs(body),
        "top_logprobs": body.top_logprobs,
        "tools": tools.declarations,
        "tool_choice": tools.chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": _response_format(body),
    }
    return ChatBody.model_construct(**(alike | fields))


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the body requests log probabilities."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def _response_format(body: ResponsesBody) -> ResponseFormat | None:
    form = body.text.format if body.text else None
    if form is None:
        return None
    return ResponseFormat.model_construct(type=form.type, schema_=form.schema_)
