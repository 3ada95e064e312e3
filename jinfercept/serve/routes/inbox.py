"""`/inbox`: lists, answers and declines calls that wait for a person. A key has its own calls, an operator's key all calls.

The arguments of calls are shown. The calls are those that this server runs.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
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


_SHOWN = ("id", "tool", "arguments", "request_id", "asked_at", "expires_at")
"""Fields of a waiting call in the list; times are seconds since 1970."""


class AnswerBody(Body):
    """The result of a call, for the model."""

    text: Text


class DeclineBody(Body):
    """The reason for declining a call, for the model."""

    why: Annotated[str, Field(max_length=10_000)] = ""


@router.get("/inbox")
async def list_calls(request: Request) -> Response:
    """The waiting calls, the oldest first."""
    calls = [asdict(pending) for pending in _inbox(request).pending(_watched(request))]
    return EncodedReply({"data": [{name: call[name] for name in _SHOWN} for call in calls]})


@router.post("/inbox/{call_id}/answer")
async def answer(call_id: _CallId, body: AnswerBody, request: Request) -> dict[str, str]:
    """Give a call its result."""
    service_of(request).check_chars(body.text, "text")
    return _taken(call_id, _inbox(request).answer, body.text, request)


@router.post("/inbox/{call_id}/decline")
async def decline(call_id: _CallId, request: Request, body: DeclineBody | None = None) -> dict[str, str]:
    """Give a call the result that it is declined."""
    return _taken(call_id, _inbox(request).decline, body.why if body else "", request)


def _taken(call_id: str, take: Callable[[str, str, str | None], None], text: str, request: Request) -> dict[str, str]:
    try:
        take(call_id, text, _watched(request))
    except RequestError as error:
        raise ApiError(404, str(error), param="call_id", code="call_not_found") from error
    return {"id": call_id}


def _watched(request: Request) -> str | None:
    return service_of(request).keys.watched_by(tenant_of(request))


def _inbox(request: Request) -> Inbox:
    inbox = service_of(request).inbox
    if inbox is None:
        raise ApiError(404, "no tool of the server asks a person", code="no_inbox")
    return inbox
