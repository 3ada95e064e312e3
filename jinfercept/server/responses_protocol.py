"""The bodies of `/v1/responses` and its answers. What a model said and what it is told are *items*, flat and with ids."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from jinfercept.server.protocol import FIRST_ERROR, Body, SamplingBody, Text

MAX_ITEMS = 4096
"""Of a body, and of a conversation: what went before, what is asked and what is answered."""
MAX_TOOLS = 512
LOGPROBS = "message.output_text.logprobs"
"""What `include` calls log probabilities."""

_ID = Annotated[str, Field(min_length=1, max_length=256)]
_NAME = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Body):
    """A part of a text; nothing but text can be read."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalPart(Body):
    """What a model said instead of an answer."""

    type: Literal["refusal"]
    refusal: Text


class ThoughtPart(Body):
    """A part of what a model thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class MessageItem(Body):
    """Something said."""

    type: Literal["message"] = "message"
    id: _ID | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart | RefusalPart], Field(max_length=4096), FIRST_ERROR]


class CallNote(Body):
    """What this server notes of a call.

    Attributes:
        round: calls of one are of one turn.
        call_id: by which a template ties a result to it.
    """

    round: Annotated[int, Field(ge=0)] = 0
    call_id: _ID | None = None


class FunctionCallItem(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    id: _ID | None = None
    call_id: _ID
    name: _NAME
    arguments: Text
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    jinfercept: CallNote | None = None


class FunctionCallOutputItem(Body):
    """What came of it."""

    type: Literal["function_call_output"]
    id: _ID | None = None
    call_id: _ID
    output: Text | Annotated[list[TextPart], Field(max_length=4096), FIRST_ERROR]


class McpCallItem(Body):
    """A call that the server ran: OpenAI's item for tools that are not the client's, of whatever kind they are here."""

    type: Literal["mcp_call"]
    id: _ID | None = None
    name: _NAME
    arguments: Text
    output: Text | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None
    jinfercept: CallNote | None = None


class ReasoningItem(Body):
    """What the model thought. Without `content` there is nothing in it to be read again."""

    type: Literal["reasoning"]
    id: _ID | None = None
    summary: Annotated[list[ThoughtPart], Field(max_length=4096), FIRST_ERROR] | None = None
    content: Annotated[list[ThoughtPart], Field(max_length=4096), FIRST_ERROR] | None = None


class ItemReference(Body):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: _ID


def _kind(item: Any) -> str:
    """Which of the items it is; without a type it is a message."""
    said = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return _KINDS.get("message" if said is None else said, "") if isinstance(said, str | None) else ""


_KINDS = {
    "message": "Message",
    "function_call": "FunctionCall",
    "function_call_output": "FunctionCallOutput",
    "mcp_call": "McpCall",
    "reasoning": "Reasoning",
    "item_reference": "ItemReference",
}

InputItem = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[FunctionCallItem, Tag("FunctionCall")]
    | Annotated[FunctionCallOutputItem, Tag("FunctionCallOutput")]
    | Annotated[McpCallItem, Tag("McpCall")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[ItemReference, Tag("ItemReference")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message=f"an item is an object whose type is one of {', '.join(_KINDS)}",
    ),
]


class FunctionTool(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: _NAME
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Body):
    """A tool that has to be called."""

    type: Literal["function"]
    name: _NAME


class TextFormat(Body):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """How the answer is written."""

    format: TextFormat | None = None


class ReasoningSettings(Body):
    """How the model thinks: `none` tells the chat template so, of the others the model decides."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(SamplingBody):
    """What is said, what went before it, and how it is to be answered."""

    input: Text | Annotated[list[InputItem], Field(max_length=MAX_ITEMS), FIRST_ERROR]
    instructions: Text | None = None
    previous_response_id: _ID | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=64), FIRST_ERROR] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputTokensDetails(BaseModel):
    """Where the tokens of the input came from."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """What the tokens of the output were for."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens that a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why there is no answer."""

    code: str
    message: str


class ResponseObject(BaseModel):
    """A response as it stands; with `stream` it comes in pieces, as typed server-sent events."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    jinfercept: dict[str, Any] | None = None


class ItemList(BaseModel):
    """Some of the items that a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """It is not stored any more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
