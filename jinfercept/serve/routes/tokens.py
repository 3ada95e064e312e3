"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from jinfercept.serve.protocols.encoding import encode
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody, ReadMessage, ReadTool
from jinfercept.serve.protocols.schemas import FIRST_ERROR, Body, Extensions, Messages, ModelName, Text, TokenId, Tools
from jinfercept.serve.routes.chat_completions import rendered_chat
from jinfercept.serve.routes.engine_requests import RequestHints, read_hints
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service, service_of

router = APIRouter(route_class=GuardedRoute, tags=["tokens"])


class TokenizeBody(Extensions):
    """A text, or a conversation that the chat template renders."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Messages[ReadMessage] | None = None
    tools: Tools[ReadTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Tokens."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**22), FIRST_ERROR]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """The tokens of a text (with those that begin it, unless `add_special_tokens` is false) or of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError.bad("give either a prompt or messages", "prompt")
    hints = read_hints(body, request)
    tokenized = await service.prepare(request, lambda: _tokenized(service, body, hints))
    return Response(tokenized, media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of tokens."""
    service = service_of(request)
    service.check_model(body.model)
    return {"prompt": await service.prepare(request, lambda: _text(service, body.tokens))}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, str | None]:
    """The texts of the special tokens, and the chat template."""
    return service_of(request).tokenizer.texts


def _text(service: Service, tokens: list[int]) -> str:
    vocab_size = service.llm.model.config.vocab_size
    service.check_chars(tokens, "tokens")
    if (largest := max(tokens, default=0)) >= vocab_size:
        raise ApiError.bad(f"token ids must be below {vocab_size}; got {largest}", "tokens")
    return service.tokenizer.decode(tokens, skip_special_tokens=False)


def _tokenized(service: Service, body: TokenizeBody, hints: RequestHints) -> bytes:
    """The tokens of a text, or of the prompt that `/v1/chat/completions` makes of a conversation."""
    if body.messages is None:
        service.check_chars(body.prompt, "prompt")
        ids = service.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    else:
        chat = ChatBody.model_construct(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
        [request] = rendered_chat(service, chat, hints, "tokens")
        ids = list(request.prompt_token_ids)
    texts = [service.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return encode({"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": texts})
