"""What a client says of a request besides what it asks: its session, when it comes back, how urgent it is, whose it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request as HttpRequest

from jinfercept.request import Keep, Request
from jinfercept.server.errors import ApiError
from jinfercept.server.keys import isolation
from jinfercept.server.protocol import MAX_SESSION_ID, Extensions
from jinfercept.server.service import service_of


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Of one request.

    Attributes:
        owner: whose key it was asked with.
        salt: of what it leaves behind; sessions too are found only with the same one.
        session_id: by which the follow-up will be known; None without one.
        expected_s: seconds until the follow-up, if the client knows.
        priority: a smaller one is served first; within what the key may ask for.
        release: nobody will come back for it.
        follows: id of the finished request that it goes on from.
    """

    owner: str = ""
    salt: str = ""
    session_id: str | None = None
    expected_s: float | None = None
    priority: int = 0
    release: bool = False
    follows: str | None = None


def read_hints(body: Extensions, request: HttpRequest) -> RequestHints:
    """From the body, or from the header `x-session-id`; the body's `jinfercept` object comes first.

    Raises:
        ApiError: 400, for a header that is too long.
    """
    said = body.jinfercept
    header = request.headers.get("x-session-id")
    if header is not None and len(header) > MAX_SESSION_ID:
        raise ApiError.bad(f"a session's name has at most {MAX_SESSION_ID} characters", "x-session-id")
    session = (said.session_id if said else None) or body.session_id or header or None
    owner = request.scope["jinfercept.key"]
    asked = (said.priority if said and said.priority is not None else body.priority) or 0
    return RequestHints(
        owner=owner,
        salt=isolation(owner, body.cache_salt),
        session_id=session,
        expected_s=said.expected_s if said else None,
        priority=service_of(request).keys.priority(owner, asked),
        release=bool(said and said.release),
    )


def with_hints(requests: Sequence[Request], hints: RequestHints) -> list[Request]:
    """The requests that are made of one body, as the engine is to take them.

    The context of each is kept for whoever goes on from it; of several answers to one prompt, that of the first.
    """
    keep = Keep(hints.session_id or "", hints.expected_s, last=hints.release)
    return [
        replace(
            request,
            cache_salt=hints.salt,
            tenant=hints.owner,
            priority=hints.priority,
            follows=hints.follows,
            keep=keep if request.leader is None else None,
        )
        for request in requests
    ]
