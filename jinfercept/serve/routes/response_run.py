"""Generates responses: for a connected client, or in the background."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, final

from starlette.responses import Response

from jinfercept.engine.streaming import AsyncStream
from jinfercept.events import Finished
from jinfercept.serve.http.access_log import TRACE
from jinfercept.serve.protocols.encoding import EncodedReply, LargeReply, Lazy, encode_event, encode_long_event
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.logprobs import SMALL_ENTRIES, num_reported
from jinfercept.serve.protocols.openai.response_items import Item
from jinfercept.serve.protocols.openai.response_writer import ResponseWriter
from jinfercept.serve.service import Service
from jinfercept.serve.state.store import StoredResponse

_ABORT_S = 1.0
"""Seconds that an aborted request may take to end."""
_EVENT_BYTES = 64
"""Overhead of a stored event in memory."""
BACKGROUND = "jinfercept.background"
"""Key of a request's scope: the `BackgroundRun` of its response, if that is generated in the background."""
MEMORY = "jinfercept.memory"
"""Key of a request's scope: the `SocketMemory` of its WebSocket."""
EVENTS_NOT_KEPT = (
    "the events of this response are not kept here: it was created without stream, there was no room for them, "
    "or another server generated it; fix: poll the response"
)
_MOST_JOINED = 256
"""Maximum stored events that are sent at a time."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A response and what generates it. The events of `stream` have the transcript of its chat."""

    service: Service
    stream: AsyncStream
    writer: ResponseWriter
    stored: StoredResponse

    async def close(self) -> None:
        """Abort the response if it has not ended, and settle it."""
        try:
            await self.service.close(self.stream)
        finally:  # closing may be cancelled
            self.writer.cancel()
            for _ in self.writer.fail(ApiError(499, "the client has gone")):
                pass
            self.service.state.end(self.stored)


async def write(generation: Generation) -> AsyncGenerator[bytes]:
    """Server-sent events of a response; the last one is final after errors too. If the generator is closed early, the
    response is aborted. What is to be stored is stored before the last event.
    """
    writer = generation.writer
    try:
        for shown in writer.begin():
            yield await _event(generation, shown)
        try:
            async for event in generation.stream:
                if isinstance(event, Finished):
                    event = await writer.settled(event)
                for shown in writer.take(event):
                    yield await _event(generation, shown)
        except Exception as error:
            for shown in writer.fail(ApiError.failed(error)):
                yield await _event(generation, shown)
    finally:
        await generation.close()


async def written(generation: Generation) -> None:
    """Generate a response to its end. Raises `ApiError` if it failed."""
    writer, events = generation.writer, write(generation)
    try:
        async for _ in events:
            pass
    finally:
        await events.aclose()
    if writer.error is not None:
        raise writer.error


def reply(response: Mapping[str, Any]) -> Response:
    """An HTTP response with a response in its current state; a large one is copied, and encoded while it is sent."""
    if _num_reported(response) <= SMALL_ENTRIES:
        return EncodedReply(response)
    return LargeReply({**response, "output": [_copied(item) for item in response["output"]]})


async def _event(generation: Generation, event: Mapping[str, Any]) -> bytes:
    """An encoded event, of a final response once that is stored; one with many log probabilities is encoded in a thread."""
    writer = generation.writer
    if writer.response["completed_at"] is not None:
        try:
            await generation.service.state.finish(generation.stored)
        except ApiError as error:
            event = writer.unsaved(error, {**event})
    name = event["type"]
    if name.endswith(".delta") or _num_reported(writer.response) <= SMALL_ENTRIES:
        return encode_event(event, name)
    return await encode_long_event(event, name)


def _num_reported(response: Mapping[str, Any]) -> int:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return num_reported(sum(len(part["logprobs"]) for part in parts), response["top_logprobs"])


def _copied(item: Item) -> Item:
    """A copy of an item that the writer does not change."""
    if item["type"] != "message":
        return {**item}
    return {**item, "content": [{**part, "logprobs": Lazy([*part["logprobs"]])} for part in item["content"]]}


@final
class BackgroundRun:
    """A response that is generated without a connected client (`store.BackgroundRuns`).

    Args:
        replayable: whether its events are stored for `follow`.
    """

    def __init__(self, generation: Generation, replayable: bool) -> None:
        self._service = generation.service
        self._running: Generation | None = generation  # until the response ends
        self._replayable, self._events, self._num_bytes = replayable, list[bytes](), 0
        self._changed = asyncio.Event()
        if (trace := TRACE.get()) is not None:
            trace.hold()
        self._task = asyncio.ensure_future(self._run(generation))

    async def _run(self, generation: Generation) -> None:
        self._service.request_started()
        try:
            async for event in write(generation):
                if self._replayable:
                    self._store(generation.stored, event)
        finally:
            self._service.request_ended()
            self._running = None
            self._changed.set()
            if (trace := TRACE.get()) is not None:
                trace.release()

    def _store(self, stored: StoredResponse, event: bytes) -> None:
        events = self._service.state.events
        if not self._events or events.peek(stored.name) is self:
            self._events.append(event)
            self._num_bytes += _EVENT_BYTES + len(event)
            events.put(stored.tenant, stored.name, self, self._num_bytes)
        if events.peek(stored.name) is not self:
            self._replayable = False
            self._events.clear()
        self._changed.set()

    async def ended(self) -> None:
        """Return when the response has ended."""
        await asyncio.wait((self._task,))

    async def cancel(self) -> None:
        if self._running is not None:
            self._running.writer.cancel()
            self._running.stream.abort()
        await asyncio.wait((self._task,), timeout=_ABORT_S)
        self._task.cancel()  # it may still run calls of the server's tools
        await asyncio.wait((self._task,))

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        if not self._replayable:
            raise ApiError.bad(EVENTS_NOT_KEPT, "stream")
        return self._follow(start)

    async def _follow(self, start: int) -> AsyncGenerator[bytes]:
        while True:
            if not self._replayable:
                raise ApiError(503, "there is no room to keep events: poll the response", code="events_not_kept")
            if news := self._events[start : start + _MOST_JOINED]:
                start += len(news)
                yield b"".join(news)
            elif self._task.done():
                return
            else:
                self._changed.clear()
                await self._changed.wait()
