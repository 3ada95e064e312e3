"""`/v1/responses`: responses that are stored, continue one another, and may be generated in the background."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from jinfercept.events import Token
from jinfercept.protocols.encoding import EncodedReply, encode
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.chat_schemas import ChatBody, Message
from jinfercept.protocols.openai.logprobs import chat_logprobs, check_report
from jinfercept.protocols.openai.response_chat import (
    REPORTS,
    chat_body,
    check_supported,
    renamed,
    truncated,
    wants_logprobs,
)
from jinfercept.protocols.openai.response_items import (
    Item,
    check_length,
    read_items,
    references,
    tools_of_items,
    types_left_out,
)
from jinfercept.protocols.openai.response_messages import messages_of
from jinfercept.protocols.openai.response_schemas import (
    DeletedResponse,
    InputTokenCount,
    InputTokensBody,
    ItemList,
    ResponseObject,
    ResponsesBody,
)
from jinfercept.protocols.openai.response_tool_schemas import FunctionTool, InputTool, ResponseToolChoice
from jinfercept.protocols.openai.response_tools import ClientTools
from jinfercept.protocols.openai.response_tools import types_left_out as tool_types_left_out
from jinfercept.protocols.openai.response_writer import ResponseWriter
from jinfercept.protocols.server_tool_calls import ServerToolCalls
from jinfercept.protocols.unsupported_fields import check_extras, log_left_out
from jinfercept.protocols.usage import UsageCount
from jinfercept.request import Request as EngineRequest
from jinfercept.sampling_params import SamplingParams
from jinfercept.server.http.access_log import DETAILS
from jinfercept.server.http.disconnection import unless_disconnected
from jinfercept.server.http.event_stream import EventStream
from jinfercept.server.observe.tracing.current import TRACE
from jinfercept.server.routes.chat_completions import make_chat, rendered_chat, server_tool_calls
from jinfercept.server.routes.engine_requests import RequestHints, read_hints
from jinfercept.server.routes.guarded_route import GuardedRoute
from jinfercept.server.routes.response_run import BACKGROUND, BackgroundRun, Generation, reply, write, written
from jinfercept.server.service import BODY_BYTES, Service, service_of, tenant_of
from jinfercept.state.conversation_rows import ConversationTurn
from jinfercept.state.stored_response import StoredResponse

router = APIRouter(route_class=GuardedRoute, tags=["OpenAI"])

_CHARS_PER_TOKEN = 4
_ANSWERED = ("completed", "incomplete")
"""Statuses of responses that a follow-up can continue."""
_PAGE_BYTES = 2**24
"""Bytes of items after which a page ends, whatever its limit."""


@router.post("/v1/responses", response_model=ResponseObject)
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answer a whole conversation, or the continuation of a stored response. With `stream`, in typed server-sent events."""
    service = service_of(request)
    model = service.check_model(body.model)
    check_extras(body, service.ignored)
    check_supported(body)
    log_left_out("items", types_left_out(body.input), service.ignored)
    given_tools = [*(body.tools or ()), *tools_of_items(body.input)]
    log_left_out("tools", tool_types_left_out(given_tools), service.ignored)
    tenant, responses = tenant_of(request), service.responses
    previous = await _previous(service, body.previous_response_id, tenant)
    check_length(body.input, previous.num_items if previous else 0)
    referred = await responses.items(references(body.input), tenant) if references(body.input) else {}
    name = f"resp_{uuid.uuid4().hex}"
    number = 1 if isinstance(body.input, str) else len(body.input)
    turn = await responses.begin_turn(body.conversation_id, tenant, name, number) if body.conversation_id else None
    try:
        generation = await _begun(service, body, request, model, name, previous, turn, referred)
    except BaseException:
        responses.abandon(name)
        raise
    if (run := generation.stored.background) is not None:
        return EventStream(run.follow(0)) if body.stream else reply(generation.stored.response)
    if body.stream:
        return EventStream(write(generation), generation.close)
    await unless_disconnected(request, written(generation))
    return reply(generation.stored.response)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputTokensBody, request: Request) -> InputTokenCount:
    """The number of tokens of the prompt that a body of `/v1/responses` would have. Nothing is stored."""
    service, tenant = service_of(request), tenant_of(request)
    service.check_model(body.model)
    check_extras(body, service.ignored)
    check_supported(body)
    if body.conversation_id:
        raise ApiError.bad("conversation cannot be counted: its last response has usage", "conversation")
    previous = await _previous(service, body.previous_response_id, tenant)
    check_length(body.input, previous.num_items if previous else 0)
    referred = await service.responses.items(references(body.input), tenant) if references(body.input) else {}

    def count() -> int:
        before = previous.conversation if previous else []
        items = [*before, *read_items(body.input, before, referred)]
        messages = messages_of(items, body.instructions)
        try:
            chat = chat_body(body, messages, ClientTools(body.tools or (), items))
            [made] = rendered_chat(service, chat, read_hints(body, request), "count")
            return len(made.prompt_token_ids)
        except ApiError as error:
            raise renamed(error) from error

    counted = await service.prepare(request, count, 1, _num_bytes(previous))
    return InputTokenCount(object="response.input_tokens", input_tokens=counted)


async def _begun(
    service: Service,
    body: ResponsesBody,
    request: Request,
    model: str,
    name: str,
    previous: StoredResponse | None,
    turn: ConversationTurn | None,
    referred: Mapping[str, Item],
) -> Generation:
    """Begin the response of a body: prepare its request, store it, submit it.

    Args:
        referred: the items to which the body refers, by id.
    """
    tenant, responses = tenant_of(request), service.responses
    follows = turn.last_response_id if turn else body.previous_response_id
    hints = replace(read_hints(body, request), follows=follows)
    if (trace := TRACE.get()) is not None:
        trace.name_conversation(body.conversation_id)

    def make() -> tuple[list[EngineRequest], ClientTools, ServerToolCalls, StoredResponse]:
        before = turn.items if turn else previous.conversation if previous else []
        own_items = read_items(body.input, before, referred)
        items = [*before, *own_items]
        tools = ClientTools(body.tools or (), items)
        messages = messages_of(items, body.instructions)
        requests, tool_calls = _make_chat(service, body, messages, tools, hints, name)
        response = _new_response(name, model, body, service.llm.get_default_sampling_params())
        body_bytes = request.scope.get(BODY_BYTES, 0)
        inputs = [*map(dict, own_items)]  # which the store keeps without what was computed of them
        return requests, tools, tool_calls, StoredResponse(tenant, response, previous, inputs, body_bytes=body_bytes)

    requests, tools, tool_calls, stored = await service.prepare(request, make, 1, _num_bytes(previous))
    await responses.begin(stored)
    usage = UsageCount(requests, request.scope[DETAILS])
    writer = ResponseWriter(stored.response, usage, tools, tool_calls, _logprobs(service, body))
    stream = service.submit(requests, patient=bool(body.background))
    generation = Generation(service, stream, writer, stored)
    request.scope[DETAILS]["id"] = name
    if body.background:
        request.scope[BACKGROUND] = stored.background = BackgroundRun(generation, replayable=bool(body.stream))
    responses.start(stored)
    return generation


def _make_chat(
    service: Service, body: ResponsesBody, messages: list[Message], tools: ClientTools, hints: RequestHints, name: str
) -> tuple[list[EngineRequest], ServerToolCalls]:
    """The request of a body with its whole conversation, and the runner of its calls of server tools. Slow, as `make_chat`."""

    def make(messages: list[Message]) -> tuple[ChatBody, list[EngineRequest]]:
        chat = chat_body(body, messages, tools)
        return chat, make_chat(service, chat, hints, name)

    try:
        chat, requests = truncated(messages, make) if body.truncation == "auto" else make(messages)
        best = (body.top_logprobs or 0) if wants_logprobs(body) else None
        check_report(requests, service.max_model_len, (), ("top_logprobs", best), copies=REPORTS)
        return requests, server_tool_calls(service, chat, requests, lambda turns: None)  # all turns are stored
    except ApiError as error:
        raise renamed(error) from error


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def get_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """A stored response as it stands. With `stream`, the events of one that was created with `background` and `stream`."""
    stored = await _stored(request, response_id)
    if not stream:
        return reply(stored.response)
    if stored.background is None:
        raise ApiError.bad("only a response with background: true can be streamed again", "stream")
    return EventStream(stored.background.follow(0 if starting_after is None else starting_after + 1))


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response and release its context. A response that is generated in the background is cancelled."""
    service = service_of(request)
    stored = await service.responses.delete(response_id, tenant_of(request))
    if stored.background is not None and stored.is_open:
        await stored.background.cancel()
    service.llm.engine.release(response_id)
    return EncodedReply({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a response in the background. A response that has ended is unchanged."""
    stored = await _stored(request, response_id)
    if stored.background is None:
        raise ApiError.bad("only a response with background: true can be cancelled: close other connections")
    if stored.is_open:
        await stored.background.cancel()
        stored = await _stored(request, response_id)
    return reply(stored.response)


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """A page of the items of the conversation that a response answers, without instructions.

    A page has fewer items than `limit` if they are long.
    """
    service = service_of(request)
    stored = await service.responses.load(response_id, tenant_of(request))
    return await service.prepare(request, lambda: _page(stored, limit, order, after))


def _page(stored: StoredResponse, limit: int, order: str, after: str | None) -> Response:
    items = [*stored.before, *stored.inputs]
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError.bad(f"no item of this list has the id {after[:200]!r}", "after")
        items = items[places[-1] + 1 :]
    shown: list[bytes] = []
    num_bytes = 0
    for item in items[:limit]:
        if num_bytes < _PAGE_BYTES:
            shown.append(encode(item))
            num_bytes += len(shown[-1])
    number = len(shown)
    first, last = (items[0]["id"], items[number - 1]["id"]) if number else (None, None)
    head = encode({"object": "list", "first_id": first, "last_id": last, "has_more": len(items) > number})
    return Response(head[:-1] + b',"data":[' + b",".join(shown) + b"]}", media_type="application/json")


async def _stored(request: Request, response_id: str) -> StoredResponse:
    return await service_of(request).responses.find(response_id, tenant_of(request))


async def _previous(service: Service, previous_id: str | None, tenant: str) -> StoredResponse | None:
    """The response that a body continues. Raises 404 and 400."""
    if previous_id is None:
        return None
    field = "previous_response_id"
    try:
        previous = await service.responses.load(previous_id, tenant)
    except ApiError as error:
        if error.status_code != 404:
            raise
        raise ApiError(404, error.detail, param=field, code="previous_response_not_found") from error
    if previous.response["status"] not in _ANSWERED:
        raise ApiError.bad(f"the previous response is {previous.response['status']}", field)
    if (conversation := previous.response.get("conversation")) is not None:
        raise ApiError.bad(f"this response belongs to a conversation: send {conversation['id']!r} instead", field)
    return previous


def _num_bytes(previous: StoredResponse | None) -> int:
    """Bytes of the conversation that a body continues, about."""
    usage = previous.response["usage"] if previous is not None else None
    return _CHARS_PER_TOKEN * usage["total_tokens"] if usage else 0


def _new_response(name: str, model: str, body: ResponsesBody, defaults: SamplingParams) -> dict[str, Any]:
    """The object of a response before any output.

    Args:
        defaults: sampling parameters where the body does not say otherwise.
    """
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
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
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
        "user": body.user,
    } | _call_lists(body)


def _shown_tool(tool: InputTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return tool.model_dump(include={"type", "name", "description", "parameters", "strict"})
    return tool.model_dump(exclude_none=True)


def _call_lists(body: ResponsesBody) -> dict[str, Any]:
    """The object `jinfercept` before any call."""
    hints = body.jinfercept
    if hints is None or not hints.wants_server_tools:
        return {}
    return {"jinfercept": {"server_calls": []} | ({"cancelled": []} if hints.async_calls is not None else {})}


def _logprobs(service: Service, body: ResponsesBody) -> Any:
    """A function that reports log probabilities of tokens; None if the body requests none."""
    if not wants_logprobs(body):
        return None
    top, tokenizer = body.top_logprobs or 0, service.tokenizer

    def report(tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return list(chat_logprobs([(token.token_id, token.logprobs) for token in tokens], top, tokenizer)["content"])

    return report
