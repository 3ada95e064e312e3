"""`/v1/messages`: Anthropic's protocol, on the requests of `/v1/chat/completions`."""

import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jinfercept.request import Request as EngineRequest
from jinfercept.serve.http.access_log import DETAILS
from jinfercept.serve.protocols.answers import ServerToolCalls
from jinfercept.serve.protocols.anthropic.answer import MessageAnswer, stream_format
from jinfercept.serve.protocols.anthropic.chat import (
    chat_body,
    check_message_fields,
    fields_of,
)
from jinfercept.serve.protocols.anthropic.dialect import REQUEST_ID
from jinfercept.serve.protocols.anthropic.schemas import CountTokensBody, MessagesBody
from jinfercept.serve.protocols.errors import renamed
from jinfercept.serve.routes.chat_completions import make_chat, recorder, rendered_chat, server_tool_calls
from jinfercept.serve.routes.engine_requests import RequestHints, answered, opened
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import Service

router = APIRouter(route_class=GuardedRoute, tags=["Anthropic"])


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation. With `stream`, in typed server-sent events from `message_start` to `message_stop`."""
    service, model, hints = opened(body, request)
    check_message_fields(body)
    name = f"msg_{uuid.uuid4().hex}"
    requests, tool_calls = await service.prepare(request, lambda: make_message_chat(service, body, hints, name), 1)
    answer = MessageAnswer(name, model, body, requests, tool_calls, request.scope[DETAILS])
    form = stream_format(request.scope[REQUEST_ID])
    return await answered(service, request, requests, answer, body.stream, form)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, request: Request) -> dict[str, int]:
    """The number of tokens of the prompt of a conversation."""
    service, _, hints = opened(body, request)
    check_message_fields(body)
    counted = await service.prepare(request, lambda: _count_tokens(service, body, hints))
    return {"input_tokens": counted}


def make_message_chat(
    service: Service, body: MessagesBody, hints: RequestHints, name: str
) -> tuple[list[EngineRequest], ServerToolCalls]:
    """The request of a body, and the runner of its calls of server tools. Slow, as `make_chat`; `name` is the request's id."""
    with renamed(fields_of(body)):
        chat = chat_body(body)
        requests = make_chat(service, chat, hints, name)
        return requests, server_tool_calls(service, chat, requests, recorder(service, chat, hints))


def _count_tokens(service: Service, body: CountTokensBody, hints: RequestHints) -> int:
    with renamed(fields_of(body)):
        [request] = rendered_chat(service, chat_body(body), hints, "count")
        return len(request.prompt_token_ids)
