"""`/v1/completions`: continuations of texts."""

import uuid
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.request import Request as EngineRequest
from jinfercept.serve.http.access_log import DETAILS
from jinfercept.serve.protocols.errors import ApiError, about
from jinfercept.serve.protocols.openai.completion_answer import (
    CompletionAnswer,
    CompletionBody,
    TokensAnswer,
    TokensBody,
)
from jinfercept.serve.protocols.openai.logprobs import check_report
from jinfercept.serve.routes.engine_requests import (
    RequestHints,
    answered,
    async_calls,
    check_length,
    check_requests,
    opened,
    sampling_params,
    with_hints,
)
from jinfercept.serve.routes.guarded_route import GuardedRoute, validated
from jinfercept.serve.service import Service

DEFAULT_MAX_TOKENS = 16
_COMPLETION = TypeAdapter(CompletionBody)

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Continue a text, or several. With `stream`, in server-sent events: `text_completion` objects, then `[DONE]`."""
    return await _completed(body, request, CompletionAnswer)


@router.post("/inference/v1/generate", include_in_schema=False)
async def generate_tokens(given: TokensBody, request: Request) -> Response:
    """Continue token ids with token ids, as an engine of vLLM does for trainers."""
    fields = {"prompt": given.token_ids, "model": given.model, "return_token_ids": True, "stream": False}
    return await _completed(validated(given.sampling_params | fields, _COMPLETION), request, TokensAnswer)


async def _completed(body: CompletionBody, request: Request, form: type[CompletionAnswer]) -> Response:
    service, model, hints = opened(body, request)
    calls = async_calls(service, body, hints.tenant)
    if calls is None and body.jinfercept is not None and body.jinfercept.wants_server_tools:
        message = (
            "a text completion calls no tools without jinfercept.async_calls: use /v1/chat/completions, or give them"
        )
        raise ApiError.bad(message, "jinfercept.server_tools", "unsupported_parameter")
    name = f"cmpl-{uuid.uuid4().hex}"
    number = len(_prompts(body)) * (body.n or 1)
    requests = await service.prepare(request, lambda: make_completions(service, body, hints, name, calls), number)
    answer = form(name, model, body, requests, service.llm.tokenizer, request.scope[DETAILS])
    return await answered(service, request, requests, answer, body.stream)


def make_completions(
    service: Service, body: CompletionBody, hints: RequestHints, name: str, calls: AsyncCalls | None
) -> list[EngineRequest]:
    """The requests of a body, whose ids begin with `name`. Slow: tokenises, compiles grammars. Raises `ApiError` 400.

    `calls` says how they call the server's tools in markup; None: not.
    """
    if body.echo and body.stream and body.logprobs is not None:
        raise ApiError.bad("echo with logprobs cannot be streamed; fix: stream false", "echo", "unsupported_parameter")
    prompts = _prompts(body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ApiError.bad("max_tokens must be at least 1 without echo", "max_tokens")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None and prompt_logprobs is None:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    params = sampling_params(body, max(1, max_tokens), body.logprobs, service, hints.tenant)
    ids = (f"{name}-{index}" for index in range(len(prompts)))
    asked_tools = body.jinfercept.server_tools if body.jinfercept is not None else None
    tools = service.tools.offered(asked_tools, ())
    with about("prompt"):
        engine_prompts = [_prompt(service, prompt, body.add_special_tokens is not False) for prompt in prompts]
        requests = service.llm.make_requests(engine_prompts, params, tools, None, ids, hints.tenant, calls)
    check_requests(service, requests, "prompt")
    reports = [("prompt_logprobs", prompt_logprobs), ("logprobs", body.logprobs if body.echo else None)]
    report, size = ("logprobs", body.logprobs), service.expert_bytes
    check_report(requests, service.max_model_len, reports, report, per_choice=True, expert_bytes=size)
    return with_hints(requests, hints)


def _prompts(body: CompletionBody) -> list[Any]:
    prompt = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def _prompt(service: Service, prompt: str | list[int], add_special_tokens: bool) -> str | dict[str, Any]:
    if isinstance(prompt, str):
        service.check_chars(prompt, "prompt")
        if add_special_tokens:
            return prompt
        return {"prompt": prompt, "prompt_token_ids": service.tokenizer.encode(prompt)}
    check_length(service, len(prompt), "prompt")
    return {"prompt_token_ids": prompt}
