"""Answers every exception of a route with the error object of the request's protocol."""

from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request

from jinfercept.errors import EngineError
from jinfercept.serve.protocols.anthropic.dialect import REQUEST_ID, anthropic_error, speaks_anthropic
from jinfercept.serve.protocols.encoding import EncodedReply
from jinfercept.serve.protocols.errors import ApiError, invalid_body

_BASE_URLS = (
    "; fix: the base URL of OpenAI's clients ends in /v1, that of Anthropic's does not; /openapi.json has all routes"
)
_SHOWN = 256
"""Maximum characters of a method and of a path in a message."""


def add_handlers(app: FastAPI) -> None:
    """Add handlers that answer every error with OpenAI's error object, or with the error object of Anthropic's protocol."""
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(EngineError, _answer_failure)
    app.add_exception_handler(Exception, _answer_failure)


def error_response(request: HTTPConnection, error: ApiError) -> EncodedReply:
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
        message += _BASE_URLS if error.status_code == 404 else ""
        error = ApiError(error.status_code, message, headers=error.headers)
    if error.status_code == 429:
        request.app.state.refused[error.code or ""] += 1
    return error_response(request, error)


async def _answer_invalid(request: Request, error: Exception) -> EncodedReply:
    problems = cast(RequestValidationError, error).errors()
    wrong = invalid_body([{**problem, "loc": problem["loc"][1:]} for problem in problems])
    return error_response(request, wrong)


async def _answer_failure(request: Request, error: Exception) -> EncodedReply:
    return error_response(request, ApiError.failed(error))
