"""What a client is told when something cannot be done: OpenAI's error object, with the status that its clients expect."""

from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match

from jinfercept.errors import EngineError, JinferceptError, PromptLengthError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_SHOWN = 256
"""Characters of a method and of a path in a message."""
_SHORT = Repr(maxstring=80, maxother=80)
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_BRANCHES = {"str", "int", "float", "bool", "dict", "none"}
"""Names that pydantic gives to the branches of a union; no field has them."""


class ApiError(HTTPException):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: for a person.
        param: the field of the body that is wrong, `messages[0].content` for example.
        code: for a program, as OpenAI has them.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @classmethod
    def bad(cls, message: str, param: str | None = None, code: str | None = None) -> "ApiError":
        """A mistake of the client's (400)."""
        return cls(400, message, param=param, code=code)

    @classmethod
    def of(cls, error: JinferceptError, param: str | None = None) -> "ApiError":
        """A mistake that was found beyond the protocol (400)."""
        code = "context_length_exceeded" if isinstance(error, PromptLengthError) else None
        return cls.bad(str(error), param, code)

    @classmethod
    def failed(cls, error: EngineError) -> "ApiError":
        """The engine lost the request (500)."""
        return cls(500, f"the engine failed: {error.failure}", code="engine_error")

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {…}}`."""
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status_code, default)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; `param` names the field."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "There is no such model, or no such thing."},
    408: {"model": ErrorBody, "description": "The body did not arrive in time."},
    413: {"model": ErrorBody, "description": "The body is larger than `--max-body-size`."},
    415: {"model": ErrorBody, "description": "The body is not JSON."},
    429: {"model": ErrorBody, "description": "The queue is full; `Retry-After` says when to come again."},
    500: {"model": ErrorBody, "description": "The engine failed."},
    503: {"model": ErrorBody, "description": "The server is shutting down."},
    "default": {"model": ErrorBody, "description": "Every other error."},
}
"""For the OpenAPI document."""


def add_handlers(app: FastAPI) -> None:
    """Answer every error in one shape."""
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(EngineError, _answer_lost)
    app.add_exception_handler(Exception, _answer_failure)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    error = cast(HTTPException, error)
    if not isinstance(error, ApiError):
        message = f"{error.detail}: {request.method[:_SHOWN]} {request.url.path[:_SHOWN]}"
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        error = ApiError(error.status_code, message, headers=headers)
    return JSONResponse(error.body, error.status_code, error.headers)


def invalid_body(problems: Sequence[Any]) -> ApiError:
    """Of several problems the one that is most likely meant: branches of a union that are of another type were not.

    Args:
        problems: as pydantic has them, their places without "body".
    """

    def likely(problem: Any) -> tuple[bool, int]:
        return not problem["type"].endswith("_type"), len(problem["loc"])

    problem = max(problems, key=likely)
    param = _path(problem["loc"])
    got = "" if problem["type"] == "missing" else f" (got {_SHORT.repr(problem.get('input'))})"
    return ApiError.bad(f"{param or 'the body'}: {problem['msg']}{got}", param or None)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """Of a query, a path, or a body that is missing."""
    problems = cast(RequestValidationError, error).errors()
    wrong = invalid_body([{**problem, "loc": problem["loc"][1:]} for problem in problems])
    return JSONResponse(wrong.body, wrong.status_code)


async def _answer_lost(request: Request, error: Exception) -> JSONResponse:
    failed = ApiError.failed(cast(EngineError, error))
    return JSONResponse(failed.body, failed.status_code)


async def _answer_failure(request: Request, error: Exception) -> JSONResponse:
    failed = ApiError(500, f"the server failed: {type(error).__name__}")
    return JSONResponse(failed.body, failed.status_code)


def _allowed(request: Request) -> str:
    """Methods that the resource knows; the route that was asked names its own only."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    known = [name for name, scope in scopes.items() if any(_matches(route, scope) for route in request.app.routes)]
    return ", ".join(known)


def _matches(route: BaseRoute, scope: dict[str, Any]) -> bool:
    matched, _ = route.matches(scope)
    return matched is Match.FULL


def _path(parts: Sequence[int | str]) -> str:
    """`messages[0].content` of where a problem was found."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and part.isidentifier() and part[:1].islower() and "function-" not in part:
            path += f".{part}" if path else part
    return path
