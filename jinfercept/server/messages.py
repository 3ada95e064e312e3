"""`/v1/messages`: Anthropic's protocol, on the requests of `/v1/chat/completions`."""

import uuid
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jinfercept.server.access_log import DETAILS
from jinfercept.server.anthropic_dialect import REQUEST_ID, AnthropicErrorBody
from jinfercept.server.disconnection import unless_disconnected
from jinfercept.server.encoding import EncodedReply
from jinfercept.server.errors import ERRORS
from jinfercept.server.guarded_route import GuardedRoute
from jinfercept.server.messages_answer import MessageAnswer, stream_format
from jinfercept.server.messages_chat import check_message_fields, count_prompt_tokens, make_message_chat
from jinfercept.server.messages_protocol import AnswerMessage, CountTokensBody, MessagesBody, TokenCount
from jinfercept.server.request_outputs import finished
from jinfercept.server.service import service_of
from jinfercept.server.session_hints import read_hints
from jinfercept.server.sse import EventStream
from jinfercept.server.unsupported_fields import check_extras

_ERRORS: dict[int | str, dict[str, Any]] = {
    **{status: described | {"model": AnthropicErrorBody} for status, described in ERRORS.items()},
    400: {"model": AnthropicErrorBody, "description": "The request is wrong; the message names the field."},
}

router = APIRouter(route_class=GuardedRoute, tags=["Anthropic"], responses=_ERRORS)


@router.post("/v1/messages", response_model=AnswerMessage)
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation. With `stream`, in typed server-sent events from `message_start` to `message_stop`."""
    service = service_of(request)
    model = service.check_model(body.model)
    check_extras(body, service.ignored)
    check_message_fields(body)
    hints = read_hints(body, request)
    name = f"msg_{uuid.uuid4().hex}"
    made = await service.prepare(request, lambda: make_message_chat(service, body, hints, name), 1)
    requests, tool_calls, is_kept = made
    answer = MessageAnswer(name, model, body, requests, tool_calls, is_kept, request.scope[DETAILS])
    if body.stream:
        stream = service.submit(requests)
        events, form = answer.stream(service, stream), stream_format(request.scope[REQUEST_ID])
        return EventStream(events, lambda: service.close(stream), form)
    outputs = await finished(service, request, service.submit(requests, ends_only=True), answer.usage.add)
    return EncodedReply(await unless_disconnected(request, answer.whole(outputs)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, request: Request) -> TokenCount:
    """The number of tokens of the prompt of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    check_extras(body, service.ignored)
    check_message_fields(body)
    hints = read_hints(body, request)
    counted = await service.prepare(request, lambda: count_prompt_tokens(service, body, hints))
    return TokenCount(input_tokens=counted)
