"""uvicorn's connections, with a limit to their patience: the head of a request has to arrive in time, and in bounds, and
what is answered has to be taken in time.
"""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jinfercept.server.encoding import encode
from jinfercept.server.errors import ApiError

MAX_HEAD_BYTES = 2**16
_BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
)
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


def patient_protocol(timeout_s: float, write_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn.

    Args:
        timeout_s: from the beginning of a connection, or of the next request on it, to the end of the request's head.
        write_timeout_s: for which a client may leave unread what is written to it; then its connection is cut, what is not
            sent is dropped, and its request ends as if it had gone.
    """

    class PatientProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._deadline: asyncio.TimerHandle | None = None
            self._unread: asyncio.TimerHandle | None = None
            self._head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._wait()
            if self._deadline is not None:
                self._head_bytes += len(data)
                data = _without_upgrade(data)
            super().data_received(data)
            if self._deadline is not None and self._head_bytes > MAX_HEAD_BYTES:
                self._end()

        def send_400_response(self, msg: str) -> None:
            said = encode(ApiError.bad(msg).body)
            self.transport.write(_BAD_REQUEST % len(said) + said)
            self.transport.close()

        def on_headers_complete(self) -> None:
            self._unwait()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwait()
            self._taken()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            self._unread = self.loop.call_later(write_timeout_s, self.transport.abort)
            super().pause_writing()

        def resume_writing(self) -> None:
            self._taken()
            super().resume_writing()

        def _taken(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _wait(self) -> None:
            self._head_bytes = 0
            self._deadline = self.loop.call_later(timeout_s, self._end)

        def _unwait(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _end(self) -> None:
            self._unwait()
            if not self.transport.is_closing():
                self.transport.close()

    return PatientProtocol


def _without_upgrade(data: bytes) -> bytes:
    """A request's head that asks for no other protocol (HTTP/2, as Java's client does): the parser would drop its body."""
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nX-Upgrade:", head) + end + body
