"""`/inbox`: lists, answers and declines calls that wait for a person. A key has its own calls, an operator's key all calls.

The arguments of calls are shown. With a database the calls of all its servers are listed; an answer to a call at another server
reaches it at its next heartbeat.
"""

import re
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from jinfercept.errors import RequestError
from jinfercept.protocols.encoding import EncodedReply
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.schemas import Body, Text
from jinfercept.server.routes.guarded_route import GuardedRoute
from jinfercept.server.service import service_of, tenant_of
from jinfercept.state import inbox_rows
from jinfercept.state.inbox_rows import TakenAnswer
from jinfercept.tools.inbox import Inbox

router = APIRouter(route_class=GuardedRoute, tags=["tools"])

_CALL_ID = re.compile(r"[0-9a-f]{12}")
_CallId = Annotated[str, Field(max_length=64)]


class WaitingCall(BaseModel):
    """A waiting call; times are seconds since 1970."""

    id: str
    tool: str
    arguments: dict[str, Any]
    request_id: str
    asked_at: float
    expires_at: float


class WaitingCalls(BaseModel):
    """Waiting calls, the oldest first."""

    data: list[WaitingCall]


class AnswerBody(Body):
    """The result of a call, for the model."""

    text: Text


class DeclineBody(Body):
    """The reason for declining a call, for the model."""

    why: Annotated[str, Field(max_length=10_000)] = ""


class Taken(BaseModel):
    """Id of the call that was answered or declined."""

    id: str


@router.get("/inbox", response_model=WaitingCalls)
async def list_calls(request: Request) -> Response:
    """The waiting calls, of all servers that share a database."""
    calls = [asdict(pending) for pending in _inbox(request).pending(_watched(request))]
    service, watched = service_of(request), _watched(request)
    if service.database.outlives:
        tenant = tenant_of(request)
        calls += await service.database.run(
            tenant, lambda session: inbox_rows.other_calls(session, service.server, watched), only_reads=True
        )
        calls.sort(key=lambda call: call["asked_at"])
    shown = [{name: call[name] for name in WaitingCall.model_fields} for call in calls]
    return EncodedReply({"data": shown})


@router.post("/inbox/{call_id}/answer")
async def answer(call_id: _CallId, body: AnswerBody, request: Request) -> Taken:
    """Give a call its result."""
    service_of(request).check_chars(body.text, "text")
    try:
        _inbox(request).answer(call_id, body.text, _watched(request))
    except RequestError as error:
        await _leave(request, TakenAnswer(call_id, body.text, is_declined=False), error)
    return Taken(id=call_id)


@router.post("/inbox/{call_id}/decline")
async def decline(call_id: _CallId, request: Request, body: DeclineBody | None = None) -> Taken:
    """Give a call the result that it is declined."""
    why = body.why if body else ""
    try:
        _inbox(request).decline(call_id, why, _watched(request))
    except RequestError as error:
        await _leave(request, TakenAnswer(call_id, why, is_declined=True), error)
    return Taken(id=call_id)


async def _leave(request: Request, answer: TakenAnswer, error: RequestError) -> None:
    """Leave an answer for the server at which a call waits. Raises 404 if it waits at none."""
    service, watched = service_of(request), _watched(request)
    was_left = service.database.outlives and _CALL_ID.fullmatch(answer.id)
    if was_left:
        was_left = await service.database.run(
            tenant_of(request), lambda session: inbox_rows.leave_answer(session, service.server, watched, answer)
        )
    if not was_left:
        raise ApiError(404, str(error), param="call_id", code="call_not_found") from error


def _watched(request: Request) -> str | None:
    """The tenant whose calls are shown; None: all tenants."""
    return service_of(request).keys.watched_by(tenant_of(request))


def _inbox(request: Request) -> Inbox:
    inbox = service_of(request).inbox
    if inbox is None:
        raise ApiError(404, "no tool of the server asks a person", code="no_inbox")
    return inbox
