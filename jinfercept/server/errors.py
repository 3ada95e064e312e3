"""Error responses: OpenAI's error object, or Anthropic's, with the HTTP status that clients expect."""

from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match

from jinfercept.errors import EngineError, JinferceptError, PromptLengthError, reduced
from jinfercept.server.anthropic_dialect import REQUEST_ID, anthropic_error, speaks_anthropic
from jinfercept.server.encoding import EncodedReply

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_SHOWN = 256
"""Maximum characters of a method and of a path in a message."""
_SHORT = Repr(maxstring=80, maxother=80)
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
_BRANCHES = {"str", "int", "float", "bool", "dict", "none"}
"""Names that pydantic gives to the branches of a union; no field has such a name."""


class ApiError(HTTPException):
    """An error response.

    Args:
        status: HTTP status.
        message: for people.
        param: the wrong field of the body, `messages[0].content` for example.
        code: for programs, as OpenAI defines them.
        headers: of the response.
        details: for programs, in the error object of Anthropic's protocol.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code, self.details = param, code, details

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    @classmethod
    def bad(cls, message: str, param: str | None = None, code: str | None = None) -> "ApiError":
        """Status 400, for a mistake of the client."""
        return cls(400, message, param=param, code=code)

    @classmethod
    def of(cls, error: JinferceptError, param: str | None = None) -> "ApiError":
        """Status 400, for an error that another room raises about the request."""
        code = "context_length_exceeded" if isinstance(error, PromptLengthError) else None
        return cls.bad(str(error), param, code)

    @classmethod
    def failed(cls, error: EngineError) -> "ApiError":
        """Status 500, for a request that the engine has failed."""
        return cls(500, f"the engine failed: {error.failure}", code="engine_error")

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response, `{"error": {…}}`."""
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status_code, default)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; `param` names the field."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "There is no such model, response, call or route."},
    408: {"model": ErrorBody, "description": "The body did not arrive in time."},
    409: {"model": ErrorBody, "description": "A response is generated in this conversation."},
    413: {"model": ErrorBody, "description": "The body is larger than `--max-body-size`."},
    415: {"model": ErrorBody, "description": "The body is not JSON, or has an encoding other than gzip and deflate."},
    421: {"model": ErrorBody, "description": "The request names a host that is not one of `--allowed-hosts`."},
    429: {"model": ErrorBody, "description": "Too much at a time; `Retry-After` says when to retry."},
    500: {"model": ErrorBody, "description": "The engine failed."},
    503: {
        "model": ErrorBody,
        "description": "The server is shutting down, or its database does not answer or is full.",
    },
    "default": {"model": ErrorBody, "description": "Every other error."},
}
"""Error responses of the OpenAPI document, by status."""


def add_handlers(app: FastAPI) -> None:
    """Add handlers that answer every error with `ErrorBody`, or with the error object of Anthropic's protocol."""
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(EngineError, _answer_lost)
    app.add_exception_handler(Exception, _answer_failure)


def error_response(request: Request, error: ApiError) -> EncodedReply:
    """The response to a request, in the shape of its protocol."""
    body = error.body
    if speaks_anthropic(request.scope):
        request_id = request.scope.get(REQUEST_ID)
        body = anthropic_error(error.status_code, error.detail, error.param, request_id, error.details)
    return EncodedReply(body, error.status_code, error.headers)


async def _answer(request: Request, error: Exception) -> EncodedReply:
    error = cast(HTTPException, error)
    if not isinstance(error, ApiError):
        message = f"{error.detail}: {request.method[:_SHOWN]} {request.url.path[:_SHOWN]}"
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        error = ApiError(error.status_code, message, headers=headers)
    if error.status_code == 429:
        request.app.state.refused[error.code or ""] += 1
    return error_response(request, error)


def invalid_body(problems: Sequence[Any]) -> ApiError:
    """Status 400 for one of several validation errors: the deepest one that is not about the type of a union's branch.

    Args:
        problems: pydantic's error dicts, their `loc` without "body".
    """

    def likely(problem: Any) -> tuple[bool, int]:
        return not problem["type"].endswith("_type"), len(problem["loc"])

    problem = max(problems, key=likely)
    param = _path(problem["loc"])
    got = "" if problem["type"] == "missing" else f" (got {_SHORT.repr(problem.get('input'))})"
    return ApiError.bad(f"{param or 'the body'}: {problem['msg']}{got}", param or None)


async def _answer_invalid(request: Request, error: Exception) -> EncodedReply:
    """Answers a wrong query, a wrong path, or a missing body."""
    problems = cast(RequestValidationError, error).errors()
    wrong = invalid_body([{**problem, "loc": problem["loc"][1:]} for problem in problems])
    return error_response(request, wrong)


async def _answer_lost(request: Request, error: Exception) -> EncodedReply:
    failed = ApiError.failed(cast(EngineError, error))
    return error_response(request, failed)


async def _answer_failure(request: Request, error: Exception) -> EncodedReply:
    failed = ApiError(500, f"the server failed: {type(error).__name__}")
    return error_response(request, failed)


def _allowed(request: Request) -> str:
    """Methods of all routes of a path, for the header `Allow`; with GET there is HEAD (`HeadRequests`)."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    known = [name for name, scope in scopes.items() if any(_matches(route, scope) for route in request.app.routes)]
    return ", ".join(sorted([*known, "HEAD"] if "GET" in known else known))


def _matches(route: BaseRoute, scope: dict[str, Any]) -> bool:
    matched, _ = route.matches(scope)
    return matched is Match.FULL


def _path(parts: Sequence[int | str]) -> str:
    """The place of a validation error as a field name, `messages[0].content` for example."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and part.isidentifier() and part[:1].islower() and "function-" not in part:
            path += f".{part}" if path else part
    return path
