"""Responses while they are written: for somebody who listens, or in the background."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, final

from starlette.responses import Response

from jinfercept.engine.async_streaming import AsyncStream
from jinfercept.errors import EngineError
from jinfercept.events import Finished
from jinfercept.server.encoding import EncodedReply, LargeReply, Lazy
from jinfercept.server.errors import ApiError
from jinfercept.server.report_size import SMALL_ENTRIES, num_reported
from jinfercept.server.responses_items import Item
from jinfercept.server.responses_writer import ResponseWriter
from jinfercept.server.service import Service
from jinfercept.server.sse import event, long_event

_ABORT_S = 1.0
"""Seconds in which the engine ends what it was told to."""
_EVENT_BYTES = 64
"""Of an event that is kept, beside its text."""
_MOST_JOINED = 256
"""Events that are copied at a time for a client."""

log = logging.getLogger(__name__)


async def write(service: Service, stream: AsyncStream, writer: ResponseWriter) -> AsyncGenerator[bytes]:
    """Server-sent events, the last one final, whatever happens. Closed before its end, it gives the response up.

    Args:
        stream: of the response's request, read as a chat.
    """
    try:
        for said in writer.begin():
            yield await _event(writer, said)
        try:
            async for told in stream:
                if isinstance(told, Finished):
                    told = await writer.settled(told)
                for said in writer.take(told):
                    yield await _event(writer, said)
        except EngineError as error:
            for said in writer.fail(ApiError.failed(error)):
                yield await _event(writer, said)
        except Exception as error:
            log.exception("a response failed")
            for said in writer.fail(ApiError(500, f"the engine failed: {type(error).__name__}")):
                yield await _event(writer, said)
    finally:
        try:
            await service.close(stream)
        finally:  # it may be cancelled meanwhile
            writer.cancel()
            for _ in writer.fail(ApiError(499, "the client has gone")):
                pass
            service.responses.settle(writer.response["id"])


async def written(service: Service, stream: AsyncStream, writer: ResponseWriter) -> None:
    """Write it to the end.

    Raises:
        ApiError: there is no answer.
    """
    events = write(service, stream, writer)
    try:
        async for _ in events:
            pass
    finally:
        await events.aclose()
    if writer.error is not None:
        raise writer.error


def reply(response: Mapping[str, Any]) -> Response:
    """A response as it stands; a large one is encoded while it is sent, whatever is written of it meanwhile."""
    if _num_reported(response) <= SMALL_ENTRIES:
        return EncodedReply(response)
    return LargeReply({**response, "output": [_copied(item) for item in response["output"]]})


async def _event(writer: ResponseWriter, said: Mapping[str, Any]) -> bytes:
    """One event; one that shows many log probabilities is encoded in a thread."""
    name = said["type"]
    if name.endswith(".delta") or _num_reported(writer.response) <= SMALL_ENTRIES:
        return event(said, name)
    return await long_event(said, name)


def _num_reported(response: Mapping[str, Any]) -> int:
    """Log probabilities in a response."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return num_reported(sum(len(part["logprobs"]) for part in parts), response["top_logprobs"])


def _copied(item: Item) -> Item:
    """An item of an output that does not change any more."""
    if item["type"] != "message":
        return {**item}
    return {**item, "content": [{**part, "logprobs": Lazy([*part["logprobs"]])} for part in item["content"]]}


@final
class BackgroundRun:
    """A response that is written whether somebody listens or not. See `responses_store.Background`.

    Args:
        kept: whether its events can be followed.
    """

    def __init__(self, service: Service, stream: AsyncStream, writer: ResponseWriter, kept: bool) -> None:
        self._service = service
        self._running: tuple[AsyncStream, ResponseWriter] | None = (stream, writer)  # until it is over
        self._kept, self._events = kept, list[bytes]()
        self._changed = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(stream, writer))

    async def _run(self, stream: AsyncStream, writer: ResponseWriter) -> None:
        self._service.entered()
        try:
            async for said in write(self._service, stream, writer):
                if self._kept:
                    self._keep(writer.response["id"], said)
        finally:
            self._service.left()
            self._running = None
            self._changed.set()

    def _keep(self, response_id: str, said: bytes) -> None:
        """Keep an event, or none at all once there is no room for them."""
        responses, num_bytes = self._service.responses, _EVENT_BYTES + len(said)
        if responses.charge(response_id, num_bytes):
            self._events.append(said)
        else:
            self._kept = False
            responses.charge(response_id, -sum(_EVENT_BYTES + len(event) for event in self._events))
            self._events.clear()
        self._changed.set()

    async def cancel(self) -> None:
        if self._running is not None:
            stream, writer = self._running
            writer.cancel()
            stream.abort()
        await asyncio.wait((self._task,), timeout=_ABORT_S)
        self._task.cancel()  # else a tool runs that the engine knows nothing of
        await asyncio.wait((self._task,))

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        if not self._kept:
            raise ApiError.bad("its events were not kept: create it with stream, and with room for them", "stream")
        return self._follow(start)

    async def _follow(self, start: int) -> AsyncGenerator[bytes]:
        while True:
            if not self._kept:
                raise ApiError(503, "there is no room to keep events: poll the response", code="events_not_kept")
            if news := self._events[start : start + _MOST_JOINED]:
                start += len(news)
                yield b"".join(news)
            elif self._task.done():
                return
            else:
                self._changed.clear()
                await self._changed.wait()
