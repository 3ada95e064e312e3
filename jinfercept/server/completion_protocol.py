"""The body of `/v1/completions` and its answer."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from jinfercept.server.protocol import SamplingBody, Text, TokenId, Usage

MAX_PROMPTS = 2048

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=2**22)]
Prompts = (
    Text
    | Ids
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)
"""A text, its token ids, or several of one kind."""


class CompletionBody(SamplingBody):
    """Texts, and how they go on."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(BaseModel):
    """Of the tokens of a text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One of `n` continuations of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


class Completion(BaseModel):
    """The answer; with `stream` it comes in pieces, as server-sent events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
