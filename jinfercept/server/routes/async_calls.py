"""Asynchronous calls of the server's tools: the options of a body."""

from typing import Any

from jinfercept.errors import RequestError
from jinfercept.intercept.call_markup import AsyncCalls
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.schemas import Extensions
from jinfercept.server.service import Service

_FIELD = "jinfercept.async_calls"


def async_calls(service: Service, body: Extensions, tenant: str) -> AsyncCalls | None:
    """How a body's calls run while its requests go on, within the limits of the server; None if it does not say so.

    Args:
        tenant: of the requests.

    Raises:
        ApiError: 400, for a limit above the server's, marks of reasoning that are not known, and a body without server tools.
    """
    extension = body.jinfercept
    if extension is None or extension.async_calls is None:
        return None
    if not extension.wants_server_tools:
        raise ApiError.bad("asynchronous calls are those of the server's tools: give server_tools too", _FIELD)
    asked, most = extension.async_calls, service.options.max_pending_calls
    if asked.max_pending is not None and asked.max_pending > most:
        raise ApiError.bad(f"max_pending may be {most} here, not {asked.max_pending}", f"{_FIELD}.max_pending")
    said: dict[str, Any] = {name: value for name in ("calls", "on_end") if (value := getattr(asked, name)) is not None}
    if asked.reasoning is not None:
        said["reasoning"] = None if asked.reasoning == "none" else asked.reasoning
    shared = service.pending_calls.of(tenant)
    try:
        delimiters = service.options.delimiters()
        return AsyncCalls(**said, max_pending=asked.max_pending or most, delimiters=delimiters, shared_limit=shared)
    except RequestError as error:
        raise ApiError.of(error, f"{_FIELD}.reasoning") from error
