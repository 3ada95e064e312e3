"""Errors of the wire: OpenAI's error object, with the HTTP status that clients expect."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from reprlib import Repr
from typing import Any

from starlette.exceptions import HTTPException

from jinfercept.errors import EngineError, GrammarError, JinferceptError, PromptLengthError, reduced
from jinfercept.outputs import RequestOutput
from jinfercept.sched.door import MOST_DOOR_S, RETRY_S

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_SHORT = Repr(maxstring=80, maxother=80)
_BRANCHES = {"str", "int", "float", "bool", "dict", "none"}
"""Names that pydantic gives to the branches of a union; no field has such a name."""
_OBJECTS = {"dict_type", "model_attributes_type", "model_type"}
"""Errors whose messages have names of Python's, where JSON has an object."""


class ApiError(HTTPException):
    """An error response.

    Args:
        message: for people.
        param: the wrong field of the body, `messages[0].content` for example.
        code: for programs, as OpenAI defines them.
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
        return cls(400, message, param=param, code=code)

    @classmethod
    def failed(cls, error: Exception) -> "ApiError":
        """The error of a request that an exception ends: status 500, unless it is an `ApiError`."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineError):
            return cls(500, f"the engine failed: {error.failure}", code="engine_error")
        log.error("a request failed", exc_info=error)
        return cls(500, f"the server failed: {type(error).__name__}")

    @property
    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status_code, default)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


@contextmanager
def about(param: str | Callable[[JinferceptError], str | None] | None = None) -> Iterator[None]:
    """Raises status 400 for an error that another room raises about the field `param`, which may be a function of the error."""
    try:
        yield
    except JinferceptError as error:
        code = "context_length_exceeded" if isinstance(error, PromptLengthError) else None
        raise ApiError.bad(str(error), param(error) if callable(param) else param, code) from error


@contextmanager
def renamed(fields: Mapping[str | None, str]) -> Iterator[None]:
    """Renames the fields that errors are about: those of a chat to those of another protocol."""
    try:
        yield
    except ApiError as error:
        error.param = fields.get(error.param, error.param)
        raise


def invalid_body(problems: Sequence[Any]) -> ApiError:
    """Status 400 for the deepest of several validation errors of pydantic that is not about the type of a union's branch."""

    def likely(problem: Any) -> tuple[bool, int]:
        return not problem["type"].endswith("_type"), len(problem["loc"])

    problem = max(problems, key=likely)
    param = _path(problem["loc"])
    alike = [other["msg"] for other in problems if likely(other) == likely(problem) and _path(other["loc"]) == param]
    messages = " or ".join(dict.fromkeys(alike)).replace("or Input should be", "or")
    input_note = "" if problem["type"] == "missing" else f" (got {_SHORT.repr(problem.get('input'))})"
    message = "Input should be an object" if problem["type"] in _OBJECTS else messages
    return ApiError.bad(f"{param or 'the body'}: {message}{input_note}", param or None)


def shutting_down() -> ApiError:
    """Status 503, for what comes while a server or a fleet drains."""
    return ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "1"})


def aborted() -> ApiError:
    return ApiError(503, "the server aborted the request; fix: send it again", code="aborted")


def overloaded() -> ApiError:
    """Status 429, for a new conversation that cannot come in."""
    message = "no more conversations can be served now; fix: retry later"
    return ApiError(429, message, code="overloaded", headers={"Retry-After": f"{RETRY_S}"})


def check_finish(output: RequestOutput) -> None:
    """Raise `ApiError` for an output of an aborted or failed request.

    The status is 503, 500, 400 if its grammar failed, or 429 if it has waited too long at the door.
    """
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            too_late = output.metrics.door_s > MOST_DOOR_S and not completion.num_generated
            raise overloaded() if too_late else aborted()
        if completion.finish_reason == "error" and f"{completion.stop_reason}".startswith(GrammarError.__name__):
            raise ApiError.bad(f"{completion.stop_reason}", code="grammar_error")
        if completion.finish_reason == "error":
            raise ApiError(500, f"the engine failed: {completion.stop_reason}", code="engine_error")


def _path(parts: Sequence[int | str]) -> str:
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and part.isidentifier() and part[:1].islower() and "function-" not in part:
            path += f".{part}" if path else part
    return path
