"""Schemas of `/v1/responses`: the body, whose input is a text or a flat list of *items* with ids."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from jinfercept.serve.protocols.openai.chat_schemas import RefusalPart, TextPart
from jinfercept.serve.protocols.openai.compaction import summary_in
from jinfercept.serve.protocols.openai.response_tools import InputTool, ResponseToolChoice, is_of_client
from jinfercept.serve.protocols.schemas import (
    FIRST_ERROR,
    Body,
    Keyword,
    Name,
    Natural,
    NumBest,
    OutputPart,
    Parts,
    Positive,
    ResponseFormat,
    SamplingBody,
    ShortText,
    Text,
    Tools,
    read_file,
    read_part,
    type_of,
)

MAX_ITEMS = 4096
"""Maximum items of a body, and of a conversation with its output."""
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests log probabilities."""

_Status = Literal["in_progress", "completed", "incomplete"] | None


_Part = Annotated[TextPart | RefusalPart, BeforeValidator(read_part)]
_Tools = Tools[InputTool]
_Output = Text | Parts[Annotated[OutputPart, BeforeValidator(read_file)]]


class _InputItem(Body):
    """Base of all items."""

    id: Name | None = None


class MessageItem(_InputItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Parts[_Part]


class CallNote(Body):
    """Extension of the items of calls.

    Attributes:
        round: number of the round; calls of one round are of one turn.
        call_id: id of the call in the chat template.
        future: name of the placeholder that the model read at the call; None: it read the result there.
        read_after: number of further items of the conversation behind which the model read the result of a future; None: it
            read it as the result of another call, which waited for it.
    """

    round: Natural = 0
    call_id: Name | None = None
    future: Name | None = None
    read_after: Natural | None = None


class _CallItem(_InputItem):
    """Base of the calls that the client runs."""

    status: _Status = None
    jinfercept: CallNote | None = None


class FunctionCallItem(_CallItem):
    """A call of a tool that the client runs."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: Text


class CustomToolCallItem(_CallItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    input: Text


class ShellAction(Body):
    """A command for the client's shell."""

    command: Parts[Text]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    working_directory: Text | None = None
    user: Text | None = None


class LocalShellCallItem(_CallItem):
    """A call of the client's shell."""

    type: Literal["local_shell_call"]
    call_id: Name | None = None
    action: ShellAction


class ToolSearchCallItem(_CallItem):
    """A call of the client's search for tools."""

    type: Literal["tool_search_call"]
    call_id: Name | None = None
    arguments: Any = None


class ToolSearchOutputItem(_InputItem):
    """The tools that a search of the client has found; the model reads their declarations here."""

    type: Literal["tool_search_output"]
    call_id: Name
    tools: _Tools


class AdditionalToolsItem(_InputItem):
    """Further tools of the body."""

    type: Literal["additional_tools"]
    tools: _Tools


class CallOutputItem(_InputItem):
    """The result of a call that the client ran. Without a `call_id`, `id` is that of the call, or of its item."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: Name | None = None
    output: _Output


class McpCallItem(_InputItem):
    """A call that the server ran, with OpenAI's item type for tools that the client does not run."""

    type: Literal["mcp_call"]
    name: Name
    arguments: Text
    output: Text | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None
    jinfercept: CallNote | None = None


class ReasoningItem(_InputItem):
    """Reasoning of the model. Without texts in `content` it adds nothing to the conversation."""

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None


def _is_summary(content: str) -> str:
    if summary_in(content) is None:
        raise PydanticCustomError("compaction", "this is no summary that /v1/responses/compact of this server has made")
    return content


class CompactionItem(_InputItem):
    """The summary of what came before, of `/v1/responses/compact`."""

    type: Literal["compaction"]
    encrypted_content: Annotated[Text, AfterValidator(_is_summary)]


class ItemReference(Body):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: Name


_LEFT_OUT = (
    *("code_interpreter_call", "computer_call", "file_search_call", "image_generation_call", "mcp_approval_request"),
    *("mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call"),
)
"""Types of items that OpenAI's own tools add to an answer."""


class OtherItem(Body):
    """An item of a tool that the provider of an earlier answer ran: it is left out. Items of other types are refused."""

    type: ShortText

    @model_validator(mode="after")
    def _is_left_out(self) -> Self:
        if self.type not in _LEFT_OUT:
            raise PydanticCustomError("item_type", "items of type {kind} are not supported", {"kind": self.type[:80]})
        return self


def _kind(item: Any) -> str:
    """Tag of an item's type; without a type it is a message."""
    if not isinstance(item, dict | Body):
        return ""
    kind = type_of(item)
    if kind in ("tool_search_call", "tool_search_output") and not is_of_client(item):
        return "Other"
    return _KINDS.get("message" if kind is None else kind, "Other") if isinstance(kind, str | None) else ""


_KINDS = {
    "message": "Message",
    "function_call": "FunctionCall",
    "function_call_output": "CallOutput",
    "custom_tool_call": "CustomToolCall",
    "custom_tool_call_output": "CallOutput",
    "local_shell_call": "LocalShellCall",
    "local_shell_call_output": "CallOutput",
    "tool_search_call": "ToolSearchCall",
    "tool_search_output": "ToolSearchOutput",
    "additional_tools": "AdditionalTools",
    "mcp_call": "McpCall",
    "reasoning": "Reasoning",
    "compaction": "Compaction",
    "item_reference": "ItemReference",
}

InputItem = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[FunctionCallItem, Tag("FunctionCall")]
    | Annotated[CustomToolCallItem, Tag("CustomToolCall")]
    | Annotated[LocalShellCallItem, Tag("LocalShellCall")]
    | Annotated[CallOutputItem, Tag("CallOutput")]
    | Annotated[ToolSearchCallItem, Tag("ToolSearchCall")]
    | Annotated[ToolSearchOutputItem, Tag("ToolSearchOutput")]
    | Annotated[AdditionalToolsItem, Tag("AdditionalTools")]
    | Annotated[McpCallItem, Tag("McpCall")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[CompactionItem, Tag("Compaction")]
    | Annotated[ItemReference, Tag("ItemReference")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="an item is an object whose type, if it has one, is a text",
    ),
]


def _listed(given: Any) -> Any:
    if not isinstance(given, str | list):
        raise PydanticCustomError("input_type", "Input should be a text or a list of items")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


_Items = Parts[InputItem]
_Input = Annotated[_Items, BeforeValidator(_listed, json_schema_input_type=Text | _Items)]


class TextFormat(ResponseFormat):
    """The format of the answer."""

    name: ShortText | None = None
    description: Text | None = None
    strict: bool | None = None


class TextSettings(Body):
    """`text` of a body."""

    format: TextFormat | None = None


class ReasoningSettings(Body):
    """`reasoning` of a body: effort `none` sets `enable_thinking=False` for the chat template, others `reasoning_effort` where
    it takes them."""

    effort: Keyword | None = None
    summary: Keyword | None = None


class ConversationReference(Body):
    """`conversation` of a body."""

    id: Name


class ResponsesBody(SamplingBody):
    """Input, the response that it continues, and the parameters of the answer.

    Attributes:
        generate: false: the prompt is computed for a response that continues this one, which has no output.
    """

    input: _Input
    instructions: Text | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationReference | None = None
    store: bool | None = None
    background: bool | None = None
    generate: bool | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Natural | None = None
    top_logprobs: NumBest | None = None
    tools: _Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Annotated[list[ShortText], Field(max_length=64), FIRST_ERROR] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the response is a turn of."""
        conversation = self.conversation
        return conversation.id if isinstance(conversation, ConversationReference) else conversation


class InputTokensBody(ResponsesBody):
    """What a response would be made of, for counting, or a conversation for compaction."""

    input: _Input = Field(default_factory=list)
