"""`/v1/chat/completions`: makes engine requests of a conversation, and a chat completion of their outputs."""

import uuid
from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.chat.options import MAX_ROUNDS
from jinfercept.chat.tokenizer.tokenizer import EFFORTS
from jinfercept.engine.tool_executor import ToolFailed, ToolFunction, around
from jinfercept.errors import JinferceptError
from jinfercept.outputs import CompletionOutput
from jinfercept.request import Request as EngineRequest
from jinfercept.serve.http.access_log import DETAILS
from jinfercept.serve.protocols.answers import Remember, ServerToolCalls, merged_message
from jinfercept.serve.protocols.errors import ApiError, about
from jinfercept.serve.protocols.openai.chat_answer import ChatAnswer
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody, named_function
from jinfercept.serve.protocols.openai.logprobs import check_report
from jinfercept.serve.protocols.schemas import SessionHints
from jinfercept.serve.routes.engine_requests import (
    RequestHints,
    answered,
    async_calls,
    check_requests,
    opened,
    sampling_params,
    with_hints,
)
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service

_OPTIONS = ("chat_template_kwargs", "tool_choice")
"""Fields of a body with which the messages of their errors begin."""

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation. With `stream`, in server-sent events: `chat.completion.chunk` objects, then `[DONE]`."""
    service, model, hints = opened(body, request)
    name = f"chatcmpl-{uuid.uuid4().hex}"
    requests = await service.prepare(request, lambda: make_chat(service, body, hints, name), body.n or 1)
    tool_calls = server_tool_calls(service, body, requests, recorder(service, body, hints))
    answer = ChatAnswer(name, model, body, requests, tool_calls, service.tokenizer, request.scope[DETAILS])
    return await answered(service, request, requests, answer, body.stream)


def make_chat(service: Service, body: ChatBody, hints: RequestHints, name: str) -> list[EngineRequest]:
    """The requests of a body, the first named `name`. Slow: renders, tokenises, compiles grammars. Raises `ApiError` 400."""
    requests = rendered_chat(service, body, hints, name)
    check_requests(service, requests, "messages")
    report = ("top_logprobs" if body.top_logprobs else "logprobs", _logprobs(body))
    prompt = [("prompt_logprobs", body.prompt_logprobs)]
    check_report(requests, service.max_model_len, prompt, report, expert_bytes=service.expert_bytes)
    return with_hints(requests, hints)


def rendered_chat(service: Service, body: ChatBody, hints: RequestHints, name: str) -> list[EngineRequest]:
    """As `make_chat`, but the prompt may be longer than the model's context, and the requests have no hints."""
    params = sampling_params(
        body, body.max_completion_tokens or body.max_tokens, _logprobs(body), service, hints.tenant
    )
    extension = body.jinfercept or SessionHints()
    chosen = extension.server_tools
    offered = service.tools.offered(chosen, _client_tools(body)) if chosen else []
    choice = body.tool_choice
    if isinstance(choice, dict) and (allowed := choice.get("allowed_tools")):
        body, offered = _with_allowed_tools(body, {named_function(tool) for tool in allowed["tools"]}, offered)
        choice = allowed["mode"]
    tools = _tools(body)
    calls = None
    if extension.async_calls is not None:
        calls = async_calls(service, body, hints.tenant)
        if extension.async_calls.reasoning is not None:
            raise ApiError.bad("reasoning is not an option of chats", "jinfercept.async_calls.reasoning")
    options = service.chat_options(
        async_calls=calls,
        chat_template_kwargs=_template_variables(service, body),
        add_generation_prompt=body.add_generation_prompt is not False,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_rounds=_max_rounds(service, body),
    )
    declarations = [tool.declaration for tool in tools]
    for texts, field in (
        (body.messages, "messages"),
        (declarations, "tools"),
        (body.chat_template_kwargs, _OPTIONS[0]),
    ):
        service.check_chars(texts, field)
    with about(lambda error: field_of_chat(error, bool(tools))):
        messages = service.tool_history.restored(hints.cache_salt, body.messages)
        if body.max_tool_calls is not None:
            offered = _limited(offered, body.max_tool_calls)
        arguments = [*tools, *offered], options, iter([name]), hints.tenant, hints.cache_salt
        return service.llm.make_chats([messages], params, *arguments)


def _limited(tools: Sequence[ChatTool], most: int) -> list[ChatTool]:
    """Tools of whose calls together so many are run; the model reads that the others were not."""
    numbers = count(1)

    def limited(function: ToolFunction) -> ToolFunction:
        def run(arguments: str) -> object:
            if next(numbers) > most:
                raise ToolFailed(f"not run: max_tool_calls is {most}")
            return function(arguments)

        return around(function, run)

    executed = [(tool, tool.tool) for tool in tools if tool.tool is not None]
    return [replace(chat, tool=replace(tool, function=limited(tool.function))) for chat, tool in executed]


def _template_variables(service: Service, body: ChatBody) -> dict[str, Any]:
    """Variables of the template by a body's effort, where the template takes it, and by its `chat_template_kwargs`."""
    effort = body.reasoning_effort
    own: dict[str, Any] = {"enable_thinking": False} if effort == "none" else {}
    if effort in EFFORTS and service.tokenizer.takes_effort(effort, bool(body.tools), service.chat_template):
        own = {"reasoning_effort": effort}
    return own | (body.chat_template_kwargs or {})


def _with_allowed_tools(
    body: ChatBody, allowed: Set[str], offered: Sequence[ChatTool]
) -> tuple[ChatBody, list[ChatTool]]:
    """A body with those of its tools that are allowed, and the allowed ones of the server's. Raises 400 for unknown ones."""
    if missing := sorted(allowed - _client_tools(body) - {tool.name for tool in offered}):
        raise ApiError.bad(f"tool_choice names unknown tools: {', '.join(missing)[:200]}", "tool_choice")
    tools = [tool for tool in body.tools or () if named_function(tool) in allowed]
    return body.model_copy(update={"tools": tools}), [tool for tool in offered if tool.name in allowed]


def field_of_chat(error: JinferceptError, tools: bool) -> str:
    """The field of a body, with tools or without, that an error of a chat is about."""
    field = "tools" if tools and "tool" in error.what else "messages"
    return next((name for name in _OPTIONS if error.what.startswith(name)), field)


def server_tool_calls(
    service: Service, body: ChatBody, requests: Sequence[EngineRequest], remember: Remember
) -> ServerToolCalls:
    """Runs the calls of the server's tools in the outputs of a body's requests."""
    return ServerToolCalls(
        requests, _client_tools(body), _max_rounds(service, body), service.max_model_len, remember, service.note_calls
    )


def recorder(service: Service, body: ChatBody, hints: RequestHints) -> Remember:
    """Stores the turns that the client does not see, unless the body says that no follow-up comes."""

    def remember(completion: CompletionOutput) -> None:
        if not hints.follow_up.last:
            shown = merged_message(completion, _client_tools(body))
            service.tool_history.remember(hints.tenant, hints.cache_salt, [*body.messages, shown], completion.messages)

    return remember


def _client_tools(body: ChatBody) -> frozenset[str]:
    return frozenset(map(named_function, body.tools or ()))


def _max_rounds(service: Service, body: ChatBody) -> int:
    """Maximum rounds of calls that the server runs. Raises 400 for more than the server allows."""
    most, requested = service.options.max_tool_rounds, body.jinfercept and body.jinfercept.max_rounds
    if requested is not None and requested > most:
        raise ApiError.bad(f"max_rounds must be at most {most}; got {requested}", "jinfercept.max_rounds")
    return min(MAX_ROUNDS, most) if requested is None else requested


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError.bad("top_logprobs are allowed only with logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _tools(body: ChatBody) -> list[ChatTool]:
    """The body's tools. Raises 400 for a wrong declaration."""
    with about("tools"):
        tools = chat_tools(body.tools)
    deferred = [tool.get("deferred", False) for tool in body.tools or ()]
    return [replace(tool, is_deferred=is_deferred) for tool, is_deferred in zip(tools, deferred, strict=True)]
