"""Schemas of `/v1/chat/completions`: the body."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from jinfercept.serve.protocols.schemas import (
    FIRST_ERROR,
    Body,
    Keyword,
    Messages,
    Name,
    Natural,
    NumBest,
    OutputPart,
    Parts,
    Positive,
    SamplingBody,
    ShortText,
    Text,
    Tools,
    read_file,
    read_part,
    type_of,
)
from jinfercept.values import json_object

CUSTOM_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def with_grammar(description: Any, syntax: Any, definition: Any) -> Any:
    """The description of a custom tool, with the grammar of its input: the model reads it, and it is not enforced."""
    if not definition:
        return description
    grammar = f"The input follows this {syntax or ''} grammar:".replace("  ", " ")
    return "\n\n".join(filter(None, [description, f"{grammar}\n{definition}"]))


def custom_input(arguments: str) -> str:
    """The input in the arguments of a call; all that the model wrote if they have none."""
    written = json_object(arguments).get("input")
    return written if isinstance(written, str) else arguments


def declared(tool: Any) -> Any:
    """A tool of a chat, the declaration of a custom one as that of a function."""
    if (custom := _custom(tool)) is None:
        return tool
    form = custom.get("format")
    grammar = form.get("grammar") if isinstance(form, dict) else None
    description, (syntax, definition) = custom.get("description"), _texts(grammar, "syntax", "definition")
    if isinstance(description, str | None):
        description = with_grammar(description, syntax, definition)
    function = {"name": custom.get("name"), "description": description, "parameters": CUSTOM_INPUT}
    return {"type": "custom", "function": function}


def called(call: Any) -> Any:
    """A call in a message, that of a custom tool as one of a function. One without a type is of a function."""
    if (custom := _custom(call)) is None:
        is_bare = isinstance(call, dict) and call.get("type") in (None, "")
        return {**call, "type": "function"} if is_bare else call
    [text] = _texts(custom, "input")
    function = {"name": custom.get("name"), "arguments": json.dumps({"input": text}, ensure_ascii=False)}
    return {"id": call.get("id"), "function": function}


def chosen(choice: Any) -> Any:
    """A tool that has to be called, a custom one as a function."""
    return choice if (custom := _custom(choice)) is None else {"type": "function", "function": custom}


def _custom(part: Any) -> dict[str, Any] | None:
    custom = part.get("custom") if isinstance(part, dict) and part.get("type") == "custom" else None
    return custom if isinstance(custom, dict) else None


def _texts(part: Any, *names: str) -> list[str]:
    values = [part.get(name) if isinstance(part, dict) else None for name in names]
    return [value if isinstance(value, str) else "" for value in values]


class TextPart(Body):
    """A text part of a message's content, also with the names of `/v1/responses`."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(Body):
    """A part of an assistant's content: a refusal."""

    type: Literal["refusal"]
    refusal: Text


class ThinkingPart(Body):
    """A part of an assistant's content: reasoning, as Mistral's clients send it."""

    type: Literal["thinking"]
    thinking: Text | Parts[TextPart]

    @property
    def thought(self) -> str:
        return self.thinking if isinstance(self.thinking, str) else "".join(part.text for part in self.thinking)


_Part = Annotated[TextPart | RefusalPart | ThinkingPart, Field(discriminator="type"), BeforeValidator(read_part)]


class CalledFunction(Body):
    """The function of a call, with its arguments as JSON."""

    name: Name
    arguments: Text | None = None


class ToolCall(Body):
    """A call in an assistant's message."""

    id: ShortText | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts[_Part] | None = None
    name: ShortText | None = None
    tool_calls: (
        Annotated[list[Annotated[ToolCall, BeforeValidator(called)]], Field(max_length=1024), FIRST_ERROR] | None
    ) = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="before")
    @classmethod
    def _noted(cls, message: Any) -> Any:
        parts = message.get("content") if isinstance(message, dict) and message.get("role") == "tool" else None
        return {**message, "content": [*map(_note, parts)]} if isinstance(parts, list) else message

    def read(self) -> dict[str, Any]:
        """The message for a chat template: `developer` becomes `system`, missing fields are left out."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            parts = [part for part in self.content if not isinstance(part, ThinkingPart)]
            texts = [part.text if isinstance(part, TextPart) else part.refusal for part in parts]
            message["content"] = [{"type": "text", "text": text} for text in texts]
            if thoughts := "".join(part.thought for part in self.content if isinstance(part, ThinkingPart)):
                message.setdefault("reasoning_content", thoughts)
        return message | {"role": "system"} if self.role == "developer" else message


def _note(part: Any) -> Any:
    with suppress(PydanticCustomError):
        part = read_file(part)
    kind = type_of(part)
    if not isinstance(kind, str) or kind in ("text", "refusal", "thinking"):
        return part
    return {"type": "text", "text": OutputPart.model_construct(type=kind[:80], text=part.get("text")).shown()}


class Function(Body):
    """Declaration of a function."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDeclaration(Body):
    """A tool that the client runs."""

    type: Literal["function", "custom"]
    function: Function

    def read(self) -> dict[str, Any]:
        """The tool for a chat template."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(Body):
    """Name of a function."""

    name: Name


class NamedTool(Body):
    """A tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


def named_function(tool: Mapping[str, Any]) -> str:
    """The name of the function of a tool, or of a choice of one."""
    return tool["function"]["name"]


class AllowedFunctions(Body):
    """The tools that the model may call.

    Attributes:
        mode: `required`: one of them has to be called.
    """

    mode: Literal["auto", "required"]
    tools: Tools[Annotated[NamedTool, BeforeValidator(chosen)]]


class AllowedTools(Body):
    """A choice of some of the tools; the prompt declares no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


Plain = dict[str, Any]
"""A part of a body as the chat template reads it. Other dialects make these of their own bodies."""
if TYPE_CHECKING:
    ReadMessage = ReadTool = ReadChoice = Plain
else:
    ReadMessage = Annotated[Message, AfterValidator(Message.read)]
    ReadTool = Annotated[ToolDeclaration, BeforeValidator(declared), AfterValidator(ToolDeclaration.read)]
    ReadChoice = Annotated[
        NamedTool | AllowedTools, Field(discriminator="type"), BeforeValidator(chosen), AfterValidator(Body.model_dump)
    ]


class ChatBody(SamplingBody):
    """A conversation, and the parameters of its answer.

    Attributes:
        max_tool_calls: calls of the server's tools that are run.
    """

    messages: Messages[ReadMessage]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumBest | None = None
    max_tool_calls: Natural | None = None
    tools: Tools[ReadTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ReadChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Keyword | None = None
