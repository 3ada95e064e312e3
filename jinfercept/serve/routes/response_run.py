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
BACKGROUND = "jinfercept.background"
"""Key of a request's scope: the `BackgroundRun` of its response, if that is generated in the background."""
MEMORY = "jinfercept.memory"
"""Key of a request's scope: the `SocketMemory` of its WebSocket."""


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
    """A response that is generated without a connected client (`store.BackgroundRuns`)."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        if (trace := TRACE.get()) is not None:
            trace.hold()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        service = self._generation.service
        service.request_started()
        try:
            async for _ in write(self._generation):
                pass
        finally:
            service.request_ended()
            if (trace := TRACE.get()) is not None:
                trace.release()

    async def ended(self) -> None:
        """Return when the response has ended."""
        await asyncio.wait((self._task,))

    async def cancel(self) -> None:
        self._generation.writer.cancel()
        self._generation.stream.abort()
        await asyncio.wait((self._task,), timeout=_ABORT_S)
        self._task.cancel()  # it may still run calls of the server's tools
        await asyncio.wait((self._task,))
