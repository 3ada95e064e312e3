"""Outputs of the requests that one body makes: waited for, and checked to be answers."""

from collections.abc import Callable, Mapping

from starlette.requests import Request as HttpRequest

from jinfercept.engine.async_streaming import AsyncStream
from jinfercept.errors import GrammarError
from jinfercept.events import Finished
from jinfercept.request import RequestOutput
from jinfercept.server.disconnection import unless_disconnected
from jinfercept.server.errors import ApiError
from jinfercept.server.service import Service


async def finished(
    service: Service, request: HttpRequest, stream: AsyncStream, note: Callable[[RequestOutput], object]
) -> Mapping[str, RequestOutput]:
    """The outputs of a stream by request id, once all requests are finished. They are aborted if the client disconnects.

    Args:
        note: called with every output, those of aborted and failed requests included.

    Raises:
        ApiError: 499 if the client disconnects, 503 if the server aborts a request, 500 if the engine fails one.
    """

    async def all_outputs() -> Mapping[str, RequestOutput]:
        try:
            async for event in stream:
                if isinstance(event, Finished):
                    check_finish(event.output)
            return stream.outputs
        finally:
            await service.close(stream)
            for output in stream.outputs.values():
                note(output)

    return await unless_disconnected(request, all_outputs())


def check_finish(output: RequestOutput) -> None:
    """Raise `ApiError` for the output of an aborted or failed request: 503, 500, or 400 if its grammar failed."""
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise ApiError(503, "the server gave the request up", code="aborted")
        if completion.finish_reason == "error" and f"{completion.stop_reason}".startswith(GrammarError.__name__):
            raise ApiError.bad(f"{completion.stop_reason}", code="grammar_error")
        if completion.finish_reason == "error":
            raise ApiError(500, f"the engine failed: {completion.stop_reason}", code="engine_error")
