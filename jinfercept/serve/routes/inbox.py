"""`/inbox`: lists, answers and declines calls that wait for a person. A key has its own calls, an operator's key all calls.

The arguments of calls are shown. The calls are those that this server runs.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from jinfercept.errors import RequestError
from jinfercept.serve.protocols.encoding import EncodedReply
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.schemas import Body, Keyword, Text
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.service import service_of, tenant_of
from jinfercept.tools.inbox import Inbox

router = APIRouter(route_class=GuardedRoute, tags=["tools"])

_CallId = Keyword


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
    """The waiting calls."""
    calls = [asdict(pending) for pending in _inbox(request).pending(_watched(request))]
    return EncodedReply({"data": [{name: call[name] for name in WaitingCall.model_fields} for call in calls]})


@router.post("/inbox/{call_id}/answer")
async def answer(call_id: _CallId, body: AnswerBody, request: Request) -> Taken:
    """Give a call its result."""
    service_of(request).check_chars(body.text, "text")
    return _taken(call_id, _inbox(request).answer, body.text, request)


@router.post("/inbox/{call_id}/decline")
async def decline(call_id: _CallId, request: Request, body: DeclineBody | None = None) -> Taken:
    """Give a call the result that it is declined."""
    return _taken(call_id, _inbox(request).decline, body.why if body else "", request)


def _taken(call_id: str, take: Callable[[str, str, str | None], None], text: str, request: Request) -> Taken:
    try:
        take(call_id, text, _watched(request))
    except RequestError as error:
        raise ApiError(404, str(error), param="call_id", code="call_not_found") from error
    return Taken(id=call_id)


def _watched(request: Request) -> str | None:
    """The tenant whose calls are shown; None: all tenants."""
    return service_of(request).keys.watched_by(tenant_of(request))


def _inbox(request: Request) -> Inbox:
    inbox = service_of(request).inbox
    if inbox is None:
        raise ApiError(404, "no tool of the server asks a person", code="no_inbox")
    return inbox
