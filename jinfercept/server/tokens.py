"""`/tokenize` and `/detokenize`, as vLLM has them."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from jinfercept.chat_template import ChatTemplate
from jinfercept.errors import JinferceptError
from jinfercept.server.chat_protocol import MAX_MESSAGES, MAX_TOOLS, Message, ToolDeclaration
from jinfercept.server.errors import ApiError
from jinfercept.server.protocol import Body, Text, TokenId
from jinfercept.server.route import GuardedRoute
from jinfercept.server.service import Service, service_of

router = APIRouter(route_class=GuardedRoute, tags=["tokens"])


class TokenizeBody(Body):
    """A text, or a conversation as its template writes it."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolDeclaration], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(BaseModel):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Tokens."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**22)]


class Detokenized(BaseModel):
    """Their text, special tokens written out."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Tokenized:
    """The tokens of a text (with those that begin it, unless `add_special_tokens` is false) or of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError.bad("give either a prompt or messages", "prompt")
    tokenizer = service.tokenizer
    ids = await service.prepare(lambda: _tokens(service, body))
    strings = None
    if body.return_token_strs:
        strings = await service.prepare(lambda: [tokenizer.token_text(token) for token in ids])
    return Tokenized(count=len(ids), max_model_len=service.max_model_len, tokens=ids, token_strs=strings)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Detokenized:
    """The text of tokens."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.tokenizer
    if wrong := [token for token in body.tokens if token >= service.llm.model.config.vocab_size][:1]:
        raise ApiError.bad(f"tokens are below {service.llm.model.config.vocab_size}, not {wrong[0]}", "tokens")
    return Detokenized(prompt=await service.prepare(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    tokenizer = service.tokenizer
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    try:
        template = ChatTemplate(tokenizer, tools, service.chat_template, body.chat_template_kwargs or {}, ())
        messages = [message.as_read() for message in body.messages]
        return template.encode(template.render(messages, body.add_generation_prompt is not False))
    except JinferceptError as error:
        raise ApiError.of(error, "messages") from error
