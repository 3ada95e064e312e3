"""Anthropic's protocol beside OpenAI's: which requests speak it, its keys and its error object."""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

VERSION_HEADER = b"anthropic-version"
REQUEST_ID = "jinfercept.request_id"
"""Key of a request's scope: its id, as in the header `x-request-id`."""

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by HTTP status."""


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's protocol: by its path, for `/v1/models` by the header `anthropic-version`."""
    path = f"{scope['path']}/"
    if path.startswith("/v1/messages/"):
        return True
    return path.startswith("/v1/models/") and any(name == VERSION_HEADER for name, _ in scope["headers"])


def authorizations(scope: Scope) -> list[str]:
    """The values of the header `Authorization`, for `Keys.check`. In Anthropic's protocol `x-api-key` has a key too."""
    headers = Headers(scope=scope)
    values = headers.getlist("authorization")
    if not speaks_anthropic(scope):
        return values
    keys = (f"Bearer {key}" for key in headers.getlist("x-api-key") if key)
    return list(dict.fromkeys([*values, *keys]))


def anthropic_error(
    status: int, message: str, param: str | None, request_id: str | None, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The body of an error response; its message begins with the wrong field, and `details` are for programs."""
    if param and not message.startswith(param):
        message = f"{param}: {message}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": message} | ({} if details is None else {"details": details})
    return {"type": "error", "error": error, "request_id": request_id}
