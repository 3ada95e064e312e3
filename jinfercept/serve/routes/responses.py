"""`/v1/responses`: responses that are stored, continue one another, and may be generated in the background."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from jinfercept.events import Token
from jinfercept.request import Request as EngineRequest
from jinfercept.sampling_params import SamplingParams
from jinfercept.serve.http.access_log import DETAILS
from jinfercept.serve.http.event_stream import EventStream
from jinfercept.serve.http.request_body import unless_disconnected
from jinfercept.serve.protocols.answers import ServerToolCalls, UsageCount
from jinfercept.serve.protocols.encoding import EncodedReply
from jinfercept.serve.protocols.errors import ApiError, renamed
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody, Plain
from jinfercept.serve.protocols.openai.compaction import PROMPT, encoded_summary
from jinfercept.serve.protocols.openai.logprobs import chat_logprobs, check_report
from jinfercept.serve.protocols.openai.response_chat import (
    FIELDS,
    REPORTS,
    chat_body,
    check_supported,
    messages_of,
    truncated,
    wants_logprobs,
)
from jinfercept.serve.protocols.openai.response_items import (
    check_length,
    new_item,
    read_items,
    references,
    written_text,
)
from jinfercept.serve.protocols.openai.response_schemas import (
    InputTokensBody,
    MessageItem,
    ResponsesBody,
)
from jinfercept.serve.protocols.openai.response_tools import ClientTools, FunctionTool, InputTool, ResponseToolChoice
from jinfercept.serve.protocols.openai.response_writer import ResponseWriter
from jinfercept.serve.routes.chat_completions import make_chat, rendered_chat, server_tool_calls
from jinfercept.serve.routes.conversations import PageQuery, item_page
from jinfercept.serve.routes.engine_requests import RequestHints, opened
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.routes.response_run import (
    BACKGROUND,
    EVENTS_NOT_KEPT,
    MEMORY,
    BackgroundRun,
    Generation,
    reply,
    write,
    written,
)
from jinfercept.serve.service import BODY_BYTES, Service, service_of, tenant_of
from jinfercept.serve.state.store import ANSWERED, SocketMemory, StoredResponse

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])

_CHARS_PER_TOKEN = 4
_ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user")
"""Fields of a response that its body has likewise."""
_NOT_OF_SUMMARIES = (
    *("background", "generate", "jinfercept", "stream", "text", "tool_choice", "tools", "top_logprobs"),
    *("allowed_token_ids", "logit_bias"),
    *("stop", "stop_token_ids", "structured_outputs"),
)
"""Fields of a body that its summary is written without."""


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answer a whole conversation, or the continuation of a stored response. With `stream`, in typed server-sent events."""
    generation = await _start(body, request)
    stored = generation.stored
    if stored.background is not None:
        return EventStream(stored.background.follow(0)) if body.stream else reply(stored.response)
    if body.stream:
        return EventStream(write(generation), generation.close)
    await unless_disconnected(request.receive, written(generation))
    return reply(stored.response)


@router.post("/v1/responses/compact")
async def compact_conversation(body: InputTokensBody, request: Request) -> Response:
    """The messages of the user, and a summary of the conversation that the model writes, as input for further responses."""
    if body.conversation_id:
        raise ApiError.bad("a conversation cannot be compacted; fix: give its items as input", "conversation")
    if not body.input and body.previous_response_id is None:
        raise ApiError.bad("there is nothing to compact; fix: give input or previous_response_id", "input")
    instruction = MessageItem(role="user", content=PROMPT)
    alike: dict[str, Any] = dict.fromkeys(_NOT_OF_SUMMARIES) | {"store": False}
    generation = await _start(body.model_copy(update=alike | {"input": [*body.input, instruction]}), request)
    await unless_disconnected(request.receive, written(generation))
    stored, response = generation.stored, generation.stored.response
    if not (summary := written_text(response).strip()):
        message = "the model has written no summary; fix: another temperature, or a larger max_output_tokens"
        raise ApiError.bad(message, code="empty_summary")
    users = [item for item in (*stored.before, *stored.inputs[:-1]) if item.get("role") == "user"]
    output = [*users, new_item("compaction", encrypted_content=encoded_summary(summary))]
    alike = {name: response[name] for name in ("id", "created_at", "usage")}
    return EncodedReply({**alike, "object": "response.compaction", "output": output})


async def _start(body: ResponsesBody, request: Request) -> Generation:
    service, model, hints = opened(body, request)
    check_supported(body)
    tenant, state = hints.tenant, service.state
    name, memory = f"resp_{uuid.uuid4().hex}", request.scope.get(MEMORY)
    previous = await _previous(service, body, tenant, memory)
    referred = await state.items(references(body.input), tenant)
    stored = StoredResponse(name, tenant, body.conversation_id, request.scope.get(BODY_BYTES, 0), memory=memory)
    if previous is not None:
        stored.before, stored.body_bytes = previous.conversation, stored.body_bytes + previous.body_bytes

    def make() -> tuple[list[EngineRequest], ClientTools, ServerToolCalls]:
        own_items = read_items(body.input, stored.before, referred)
        items = [*stored.before, *own_items]
        tools = ClientTools(body.tools or (), items)
        messages = messages_of(items, body.instructions)
        requests, tool_calls = _make_chat(service, body, messages, tools, hints._replace(follows=follows), name)
        stored.response = _new_response(name, model, body, service.llm.get_default_sampling_params())
        stored.inputs = [*map(dict, own_items)]  # which the store keeps without what was computed of them
        return requests, tools, tool_calls

    follows = body.previous_response_id
    try:
        if body.conversation_id:
            follows = await state.begin_turn(stored, body.conversation_id, len(body.input))
        requests, tools, tool_calls = await service.prepare(request, make, 1, _num_bytes(previous))
        await state.begin(stored)
        usage, logprobs = UsageCount(requests, request.scope[DETAILS]), _logprobs(service, body)
        writer = ResponseWriter(stored.response, usage, tools, tool_calls, logprobs, body.generate is False)
        generation = Generation(service, await service.submit(request, requests), writer, stored)
        request.scope[DETAILS]["id"] = name
        if body.background:
            request.scope[BACKGROUND] = stored.background = BackgroundRun(generation, replayable=bool(body.stream))
        return generation
    except BaseException:
        state.abandon(stored)
        raise


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputTokensBody, request: Request) -> dict[str, Any]:
    """The number of tokens of the prompt that a body of `/v1/responses` would have. Nothing is stored."""
    service, _, hints = opened(body, request)
    check_supported(body)
    if body.conversation_id:
        raise ApiError.bad("conversation cannot be counted: its last response has usage", "conversation")
    previous = await _previous(service, body, hints.tenant)
    referred = await service.state.items(references(body.input), hints.tenant)

    def count() -> int:
        before = previous.conversation if previous else []
        items = [*before, *read_items(body.input, before, referred)]
        with renamed(FIELDS):
            chat = chat_body(body, messages_of(items, body.instructions), ClientTools(body.tools or (), items))
            [made] = rendered_chat(service, chat, hints, "count")
            return len(made.prompt_token_ids)

    counted = await service.prepare(request, count, 1, _num_bytes(previous))
    return {"object": "response.input_tokens", "input_tokens": counted}


def _make_chat(
    service: Service, body: ResponsesBody, messages: list[Plain], tools: ClientTools, hints: RequestHints, name: str
) -> tuple[list[EngineRequest], ServerToolCalls]:

    def make(messages: list[Plain]) -> tuple[ChatBody, list[EngineRequest]]:
        chat = chat_body(body, messages, tools)
        return chat, make_chat(service, chat, hints, name)

    with renamed(FIELDS):
        chat, requests = truncated(messages, make) if body.truncation == "auto" else make(messages)
        best = (body.top_logprobs or 0) if wants_logprobs(body) else None
        check_report(requests, service.max_model_len, (), ("top_logprobs", best), copies=REPORTS)
        return requests, server_tool_calls(service, chat, requests, lambda completion: None)  # all turns are stored


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """A stored response as it stands. With `stream`, the events of one that was created with `background` and `stream`."""
    stored = await _stored(request, response_id)
    if not stream:
        return reply(stored.response)
    if not stored.response["background"]:
        raise ApiError.bad("only a response with background: true can be streamed again", "stream")
    if stored.background is None:
        raise ApiError.bad(EVENTS_NOT_KEPT, "stream")
    return EventStream(stored.background.follow(0 if starting_after is None else starting_after + 1))


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response and release its context. A response that is generated in the background is cancelled."""
    service = service_of(request)
    stored = await service.state.delete(response_id, tenant_of(request))
    if stored.background is not None and stored.is_open:
        await stored.background.cancel()
    service.llm.engine.release(response_id)
    return EncodedReply({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a response in the background. A response that has ended is unchanged."""
    stored = await _stored(request, response_id)
    if not stored.response["background"]:
        raise ApiError.bad("only a response with background: true can be cancelled: close other connections")
    if stored.is_open:
        assert stored.background is not None
        await stored.background.cancel()
        stored = await _stored(request, response_id)
    return reply(stored.response)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, request: Request, page: Annotated[PageQuery, Query()]) -> Response:
    """A page of the items of the conversation that a response answers. It has fewer items than `limit` if they are long."""
    service = service_of(request)
    stored = await service.state.find(response_id, tenant_of(request), whole=True)
    return await service.prepare(request, lambda: item_page([*stored.before, *stored.inputs], page))


async def _stored(request: Request, response_id: str) -> StoredResponse:
    return await service_of(request).state.find(response_id, tenant_of(request))


async def _previous(
    service: Service, body: ResponsesBody | InputTokensBody, tenant: str, memory: SocketMemory | None = None
) -> StoredResponse | None:
    """The response that a body continues, loaded with its conversation. Raises 404 and 400, also for too many items."""
    if (previous_id := body.previous_response_id) is None:
        check_length(len(body.input), 0)
        return None
    field = "previous_response_id"
    kept = memory.find(previous_id) if memory is not None else None
    if kept is not None and body.store is not False:
        raise ApiError.bad(
            "what continues a response that is not stored is not stored either; fix: store: false", "store"
        )
    try:
        previous = kept or await service.state.find(previous_id, tenant, whole=True)
    except ApiError as error:
        if error.status_code != 404:
            raise
        raise ApiError(404, error.detail, param=field, code="previous_response_not_found") from error
    if previous.response["status"] not in ANSWERED:
        raise ApiError.bad(f"the previous response is {previous.response['status']}", field)
    if (conversation := previous.response.get("conversation")) is not None:
        raise ApiError.bad(f"this response belongs to a conversation: send {conversation['id']!r} instead", field)
    check_length(len(body.input), len(previous.conversation))
    return previous


def _num_bytes(previous: StoredResponse | None) -> int:
    usage = previous.response["usage"] if previous is not None else None
    return _CHARS_PER_TOKEN * usage["total_tokens"] if usage else 0


def _new_response(name: str, model: str, body: ResponsesBody, defaults: SamplingParams) -> dict[str, Any]:
    form, reasoning, chosen = body.text and body.text.format, body.reasoning, body.tool_choice
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        **{name: getattr(body, name) for name in _ECHOED},
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "store": body.store is not False,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
        "tool_choice": chosen.model_dump(exclude_none=True)
        if isinstance(chosen, ResponseToolChoice)
        else chosen or "auto",
        "tools": [_shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    } | _call_lists(body)


def _shown_tool(tool: InputTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return tool.model_dump(include={"type", "name", "description", "parameters", "strict"})
    return tool.model_dump(exclude_none=True)


def _call_lists(body: ResponsesBody) -> dict[str, Any]:
    hints = body.jinfercept
    if hints is None or not hints.wants_server_tools:
        return {}
    return {"jinfercept": {"server_calls": []} | ({"cancelled": []} if hints.async_calls is not None else {})}


def _logprobs(service: Service, body: ResponsesBody) -> Any:
    if not wants_logprobs(body):
        return None
    top, tokenizer = body.top_logprobs or 0, service.tokenizer

    def report(tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return list(chat_logprobs([(token.token_id, token.logprobs) for token in tokens], top, tokenizer)["content"])

    return report
