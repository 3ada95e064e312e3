"""Passes the response of a replica on to a client while it is made, and ends it as its route says where that cannot go on."""

import logging
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any, final

from starlette.datastructures import MutableHeaders
from starlette.types import Send

from jinfercept.fleet.replicas import DETAILS, Messages, ReplicaLostError, Ticket
from jinfercept.serve.protocols.encoding import DONE, encode_event
from jinfercept.serve.protocols.errors import ApiError

LOST = "replica_lost"
"""Code of errors of requests whose replica has ended."""

_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_TAIL_BYTES = 2**16


def lost_error() -> ApiError:
    """Status 503, for a request whose replica has ended before its answer began."""
    message = "the replica that worked on the request has ended; send the request again"
    return ApiError(503, message, code=LOST, headers={"Retry-After": "1"})


def last_event(error: ApiError, path: str, last: bytes) -> bytes:
    """The event with which a stream ends for an error, behind `last`, the end of what was sent of it."""
    if path.startswith("/v1/responses"):
        numbers = _NUMBER.findall(last[-_TAIL_BYTES:])
        event = {
            "type": "error",
            "code": error.code,
            "message": error.detail,
            "param": None,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return encode_event(event, "error")
    if path.startswith("/v1/messages"):
        return encode_event({"type": "error", "error": {"type": "api_error", "message": error.detail}}, "error")
    return encode_event(error.body) + DONE


log = logging.getLogger("jinfercept.serve")


@final
class Relay:
    """One response. `details` are fields of the replica's log line."""

    def __init__(self, path: str, ticket: Ticket, send: Send) -> None:
        self._path, self._ticket, self._send = path, ticket, send
        self._head: dict[str, Any] | None = None
        self._streams = False
        self._ended = False
        self._last = b""
        self.began = False
        self.details: dict[str, Any] = {}

    async def run(self, answer: AsyncGenerator[Messages]) -> None:
        """Send the response. Raises `ReplicaLostError` before anything was sent.

        Later a stream ends with an error event, and any other response without its end.
        """
        try:
            async for messages in answer:
                for message in messages:
                    await self._pass(message)
        except ReplicaLostError:
            if not self.began:
                raise
            log.warning("a replica has ended while it answered %s", self._path[:256])
            await self.fail(lost_error())
        finally:
            await answer.aclose()
        if self._head is not None and not self.began:  # it has ended before its first byte
            raise ReplicaLostError

    async def fail(self, error: ApiError) -> None:
        """End the response with an error: the last event of a stream, or no end. Raises it if nothing was sent."""
        self.details["finish_reason"] = "error"
        if not self.began:
            raise error
        if self._streams and not self._ended:
            await self._send_body(last_event(error, self._path, self._last), False)

    async def _pass(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.details.update(message.get("details", {}))
            self._head = self._named(message)
            content_types = [value for name, value in self._head["headers"] if name == b"content-type"]
            self._streams = any(value.startswith(b"text/event-stream") for value in content_types)
            if self._streams:
                await self._begin()
        elif message["type"] == "http.response.body":
            await self._begin()
            await self._send_body(message.get("body", b""), message.get("more_body", False))
        elif message["type"] == DETAILS:
            self.details.update(message["details"])

    def _named(self, message: Mapping[str, Any]) -> dict[str, Any]:
        head = {"type": message["type"], "status": message["status"], "headers": list(message["headers"])}
        route = self._ticket.route
        if route is not None:
            headers = MutableHeaders(scope=head)
            headers["x-jinfercept-replica"] = route.replica
            headers["x-jinfercept-route"] = route.reason
        return head

    async def _begin(self) -> None:
        if not self.began:
            assert self._head is not None
            self.began = True
            await self._send(self._head)

    async def _send_body(self, body: bytes, more: bool) -> None:
        self._last = body or self._last
        self._ended = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
