"""A route class that checks the API key, and then reads a JSON body within limits of time and size."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from jinfercept.serve.http.access_log import DETAILS, TRACE
from jinfercept.serve.http.request_body import whole_body
from jinfercept.serve.protocols.anthropic.dialect import authorizations
from jinfercept.serve.protocols.encoding import encode
from jinfercept.serve.protocols.errors import ApiError, invalid_body
from jinfercept.serve.service import BODY_BYTES, KEY, Service, service_of

_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
"""Makes all digits 0, and E an e."""
_EXPONENTS = (b"0e000", b"0e+000")
_MOST_DIGITS = 200
SMALL_BYTES = 2**14
"""Largest body that is parsed on the event loop, which takes less than a millisecond."""
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
}
"""Routes that generate, with the `gen_ai.operation.name` of their traces."""


FRAME = "jinfercept.frame"
"""Key of a request's scope: whether its body is a frame of a WebSocket, which has fields of its own and always streams."""


def parsed(body: bytes) -> Any:
    """A JSON body as an object. Raises `ApiError` 400 for what is no JSON."""
    try:
        data = from_json(body, allow_inf_nan=False)
        shapes = body.translate(_SHAPES)
        if b"0" * _MOST_DIGITS in shapes or any(map(shapes.__contains__, _EXPONENTS)):
            encode(data)  # JSON has no infinity, as which a large number may have been read
        return data
    except ValueError as error:
        surrogate = " (half of a surrogate pair is no text)" if "hex escape" in str(error) else ""
        raise ApiError.bad(f"the body is not JSON: {error}{surrogate}", code="invalid_json") from None


def validated(data: Any, model: TypeAdapter[Any] | None) -> Any:
    """A body as a model. Raises `ApiError` 400 for what does not fit the model."""
    try:
        return data if model is None else model.validate_python(data)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None


class GuardedRoute(APIRoute):
    """The route of an `APIRouter(route_class=GuardedRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        handler = super().get_route_handler()
        kind: Any = self.body_field and self.body_field.field_info.annotation
        model = TypeAdapter[Any](kind) if kind else None
        operation = _OPERATIONS.get(self.path)

        async def handle(request: Request) -> Response:
            service = service_of(request)
            tenant = service.keys.check(*authorizations(request.scope))
            request.scope[KEY] = tenant
            if tenant:
                request.scope[DETAILS]["key"] = service.keys.name(tenant)
            if service.tracing is not None and operation is not None and request.method == "POST":
                from jinfercept.serve.observe.traces import RequestTrace

                details = request.scope[DETAILS]
                TRACE.set(RequestTrace(service.tracing, operation, self.path, request.scope, details))
            return await handler(_JsonRequest(request, service, model))

        return handle


class _JsonRequest(Request):
    """A request with a strict JSON body: no NaN, no lone surrogates, bounded nesting."""

    def __init__(self, request: Request, service: Service, model: TypeAdapter[Any] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._service, self._model = service, model
        self._read: bytes | None = None

    async def body(self) -> bytes:
        if self._read is None:
            self._read = await whole_body(self, self._service)
            kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self._read and kind != "application/json":
                raise ApiError(415, "the body has to be JSON: send Content-Type: application/json")
        return self._read

    async def json(self) -> Any:
        """The body as the route's pydantic model, which FastAPI takes unchanged; a large body is parsed in a thread."""
        body = await self.body()
        self.scope[BODY_BYTES] = len(body)

        def read() -> Any:
            data = parsed(body)
            if self.scope.get(FRAME):
                data = {name: value for name, value in data.items() if name != "type"} | {"stream": True}
            return validated(data, self._model)

        return read() if len(body) <= SMALL_BYTES else await self._service.prepare(self, read)
