"""Hints of a client about a request: its session, its follow-up, its priority, its tenant."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request as HttpRequest

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.schemas import MAX_SESSION_ID, Extensions
from jinfercept.request import FollowUp, Request
from jinfercept.server.access.keys import isolation
from jinfercept.server.observe.tracing.current import TRACE
from jinfercept.server.service import service_of, tenant_of


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request.

    Attributes:
        tenant: of the request.
        salt: of its pages and its session, which are found only with the same salt.
        session_id: of the session that a follow-up names; None without one.
        expected_s: seconds until the follow-up; None if unknown.
        priority: smaller ones are served first; within the range of the key.
        weight: of the key.
        release: no follow-up comes, so the context is not retained.
        follows: id of the finished request that this one continues.
    """

    tenant: str = ""
    salt: str = ""
    session_id: str | None = None
    expected_s: float | None = None
    priority: int = 0
    weight: float = 1.0
    release: bool = False
    follows: str | None = None


def read_hints(body: Extensions, request: HttpRequest) -> RequestHints:
    """The hints in a body and in the header `x-session-id`; the body's object `jinfercept` takes precedence.

    Raises:
        ApiError: 400, for a header that is too long.
    """
    extension = body.jinfercept
    header = request.headers.get("x-session-id")
    if header is not None and len(header) > MAX_SESSION_ID:
        raise ApiError.bad(f"a session's name has at most {MAX_SESSION_ID} characters", "x-session-id")
    session = (extension.session_id if extension else None) or body.session_id or header or None
    if (trace := TRACE.get()) is not None:
        trace.name_conversation(session)
    tenant, keys = tenant_of(request), service_of(request).keys
    asked = (extension.priority if extension and extension.priority is not None else body.priority) or 0
    return RequestHints(
        tenant=tenant,
        salt=isolation(tenant, body.cache_salt),
        session_id=session,
        expected_s=extension.expected_s if extension else None,
        priority=keys.priority(tenant, asked),
        weight=keys.rules(tenant).weight,
        release=bool(extension and extension.release),
    )


def with_hints(requests: Sequence[Request], hints: RequestHints) -> list[Request]:
    """The requests of one body with their hints.

    The context of each is retained for a follow-up; of several answers to one prompt, that of the first.
    """
    follow_up = FollowUp(hints.session_id or "", hints.expected_s, last=hints.release)
    return [
        replace(
            request,
            cache_salt=hints.salt,
            tenant=hints.tenant,
            priority=hints.priority,
            weight=hints.weight,
            follows=hints.follows,
            follow_up=follow_up if request.leader is None else None,
        )
        for request in requests
    ]
