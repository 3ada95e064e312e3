"""Waits for the outputs of the requests that one body makes."""

from collections.abc import Callable, Mapping

from starlette.requests import Request as HttpRequest

from jinfercept.engine.async_streaming import AsyncStream
from jinfercept.events import Finished
from jinfercept.outputs import RequestOutput
from jinfercept.protocols.errors import check_finish
from jinfercept.server.http.disconnection import unless_disconnected
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
