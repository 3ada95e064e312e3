"""Schemas of Anthropic's `/v1/messages`: the body and its content blocks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from jinfercept.serve.protocols.schemas import (
    Body,
    Extensions,
    Fraction,
    Keyword,
    Messages,
    ModelName,
    Name,
    OutputPart,
    Parts,
    Positive,
    ShortText,
    Stops,
    Temperature,
    Text,
    Tools,
    TopK,
    type_of,
)

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_EDIT = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER}
_EDIT |= {"insert_text": _TEXT, "view_range": {"type": "array", "items": _NUMBER}}
_PATHS = {"old_path": _TEXT, "new_path": _TEXT}
_COMMANDS = ("view", "create", "str_replace", "insert")
_TOOLS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "bash": ("Runs a command in a shell that lasts.", {"command": _TEXT, "restart": {"type": "boolean"}}, ()),
    "text_editor": (
        "Views a file or folder, creates a file, replaces a text that a file has once, or inserts one behind a line.",
        {"command": {"type": "string", "enum": [*_COMMANDS]}, **_EDIT},
        ("command", "path"),
    ),
    "memory": (
        "Views and edits files in /memories, which later conversations have, too.",
        {"command": {"type": "string", "enum": [*_COMMANDS, "delete", "rename"]}, **_EDIT, **_PATHS},
        ("command",),
    ),
}
"""Descriptions, arguments and required arguments by the types of tools, without their dates."""


def declared(tool: Any) -> Any:
    """A tool of a body; one of these with its description and schema."""
    kind = type_of(tool)
    if not isinstance(kind, str) or (name := kind.rpartition("_")[0]) not in _TOOLS:
        return tool
    description, properties, required = _TOOLS[name]
    schema = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {**tool, "type": "custom", "description": description, "input_schema": schema}


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: Text


def text_block(text: str) -> TextBlock:
    return TextBlock.model_construct(type="text", text=text)


class ThinkingBlock(Body):
    """Reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Body):
    """Encrypted reasoning of another server's answer, which no model here can read: it is left out."""

    type: Literal["redacted_thinking"]
    data: Text | None = None


class ToolUseBlock(Body):
    """A call in an assistant's message. Models may write arguments that are no object."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Any


class ProviderToolBlock(Body):
    """A call or a result of a tool that the provider of an earlier answer ran: it is left out."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ]


def _as_text(block: Any) -> Any:
    """A block of a body; a document or a search result as the block of text that the model reads, its title first."""
    kind = type_of(block)
    if kind not in ("document", "search_result"):
        return block
    source, holder = block.get("source"), block
    if isinstance(source, dict):
        holder = source
        if (form := source.get("type")) not in ("text", "content"):
            message = "{kind} blocks whose source is {form} are not supported: send a source of type text"
            raise PydanticCustomError("unsupported_source", message, {"kind": kind, "form": f"{form}"[:80]})
    content = next((holder[name] for name in ("data", "text", "content") if name in holder), None)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    read = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    texts = [text for text in read if isinstance(text, str)]
    if not isinstance(parts, list) or len(texts) < len(parts):
        raise PydanticCustomError("no_text", "{kind} blocks are supported where all they have is text", {"kind": kind})
    heads = (block.get("title"), block.get("context"), source)
    text = "\n\n".join([*(head for head in heads if isinstance(head, str)), *texts])
    return {"type": "text", "text": text}


class UnsupportedBlock(Body):
    """A block that models of text cannot read; refused."""

    type: Literal["image", "container_upload", "browser_state"]

    @model_validator(mode="after")
    def _refused(self) -> Self:
        raise PydanticCustomError(
            "unsupported_block", "{kind} blocks are not supported: send text blocks", {"kind": self.type}
        )


class ToolReferenceBlock(Body):
    """A deferred tool that a search has found; the model reads its declaration here."""

    type: Literal["tool_reference"]
    tool_name: Name


class OtherResultBlock(OutputPart):
    """A block of another type, such as an image; the model reads that it is there."""


def _result_kind(block: Any) -> str:
    kind = type_of(block)
    if not isinstance(kind, str):
        return ""
    return kind if kind in ("text", "tool_reference") else "other"


_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[OtherResultBlock, Tag("other")],
    Discriminator(
        _result_kind,
        custom_error_type="block_type",
        custom_error_message="a block is an object with a type, which is a text",
    ),
    BeforeValidator(_as_text),
]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Parts[_ResultBlock] | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ProviderToolBlock
    | UnsupportedBlock,
    Field(discriminator="type"),
    BeforeValidator(_as_text),
]


class InputMessage(Body):
    """A message of a conversation; one of the system stands in the turn of the user."""

    role: Literal["user", "assistant", "system"]
    content: Text | Parts[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        """The blocks of the content; a text is one."""
        return self.content if isinstance(self.content, list) else [text_block(self.content)]


class InputTool(Body):
    """A tool that the client runs.

    Attributes:
        defer_loading: the prompt declares the tool where a result refers to it, not at its beginning.
    """

    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]
    defer_loading: bool | None = None


class ProviderTool(Body):
    """A tool of a type that is not supported, as those that Anthropic runs: it is left out."""

    type: ShortText


def _tool_kind(tool: Any) -> str:
    kind = type_of(tool)
    return "Other" if isinstance(kind, str) and kind != "custom" else "Input"


_Tool = Annotated[
    Annotated[InputTool, Tag("Input")] | Annotated[ProviderTool, Tag("Other")],
    Discriminator(_tool_kind),
    BeforeValidator(declared),
]


class MessagesToolChoice(Body):
    """Which tools the model may call or has to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_name", "tool_choice has a name if its type is tool, otherwise none")
        return self


class ThinkingConfig(Body):
    """Whether the model reasons. `budget_tokens` and `display` have no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputFormat(Body):
    """The JSON schema of an answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Form of the answer, and the effort to reason, of which a template may know some."""

    effort: Keyword | None = None
    format: OutputFormat | None = None


class CountTokensBody(Extensions):
    """A conversation whose tokens are counted.

    Attributes:
        output_format: the older name of the format in `output_config`.
    """

    model: ModelName | None = None
    messages: Messages[InputMessage]
    system: Text | Parts[TextBlock] | None = None
    tools: Tools[_Tool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """A conversation, and the parameters of its answer."""

    max_tokens: Positive
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
