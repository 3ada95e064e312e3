"""The body of `/v1/chat/completions` and its answer."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from jinfercept.server.protocol import FIRST_ERROR, Body, SamplingBody, Text, TokenId, Usage

MAX_MESSAGES = 16384
MAX_TOOLS = 512
_NAME = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Body):
    """A part of a message's content; only text can be read."""

    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """A part of an assistant's content, in which it declines."""

    type: Literal["refusal"]
    refusal: Text


_Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Body):
    """What a call says."""

    name: _NAME
    arguments: Text | None = None


class ToolCall(Body):
    """A call in an assistant's message."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[_Part], Field(max_length=4096), FIRST_ERROR] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024), FIRST_ERROR] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    def as_read(self) -> dict[str, Any]:
        """As a chat template reads it: `developer` is `system`, what was not given is left out."""
        said = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            said["content"] = [{"type": "text", "text": text} for text in self.texts]
        return said | {"role": "system"} if self.role == "developer" else said

    @property
    def texts(self) -> list[str]:
        """Its content."""
        if isinstance(self.content, list):
            return [part.text if isinstance(part, TextPart) else part.refusal for part in self.content]
        return [self.content or ""]


class Function(Body):
    """What a tool is."""

    name: _NAME
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDeclaration(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """By its name."""

    name: _NAME


class NamedTool(Body):
    """A tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """A conversation, and how it is to be answered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolDeclaration], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class TopLogprob(BaseModel):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that came, and what else could have."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of an answer."""

    content: list[TokenLogprob] | None


class Answer(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: Answer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    token_ids: list[TokenId] | None = None


class ChatCompletion(BaseModel):
    """The answer; with `stream` it comes in pieces, as server-sent events."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    jinfercept: dict[str, Any] | None = None
    prompt_token_ids: list[TokenId] | None = None
