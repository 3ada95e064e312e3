"""Schemas of `/v1/completions`: the body."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from jinfercept.serve.protocols.schemas import (
    FIRST_ERROR,
    Body,
    ModelName,
    Natural,
    NumBest,
    SamplingBody,
    Text,
    TokenId,
)

MAX_PROMPTS = 2048

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=2**22), FIRST_ERROR]


def _kind(prompt: Any) -> str:
    """Tag of a prompt's type, by its first item: the other types are not tried, so errors are about the type that is meant."""
    if not isinstance(prompt, list) or not prompt:
        return "Texts" if isinstance(prompt, list) else "Text"
    return {int: "Ids", list: "IdLists"}.get(type(prompt[0]), "Texts")


Prompts = Annotated[
    Annotated[Text, Tag("Text")]
    | Annotated[Ids, Tag("Ids")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), FIRST_ERROR, Tag("Texts")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS), FIRST_ERROR, Tag("IdLists")],
    Discriminator(_kind),
]
"""A text, its token ids, or several of one kind."""


class CompletionBody(SamplingBody):
    """Prompts, and the parameters of their continuations."""

    prompt: Prompts
    max_tokens: Natural | None = None
    logprobs: Annotated[NumBest | None, BeforeValidator(lambda number: int(number) if number is True else number)] = (
        None
    )
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokensBody(Body):
    """Token ids, and the parameters of their continuations by vLLM's names."""

    model: ModelName | None = None
    token_ids: Ids
    sampling_params: dict[str, Any]
