"""HTTP/1.1 connections: uvicorn's protocol on the h11 parser, with a limit of connections and timeouts for heads and writes."""

import asyncio
import logging
import sys
from contextlib import suppress
from typing import Any, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 2**14
"""Size of the head of a request beyond which no more of it is read."""
BACKLOG = 1024
"""Connections that the kernel, or one turn of the event loop, may accept before they are counted, at most."""
_OTHER_FILES = 512
"""File descriptors for weights, logs and tools."""
_READ_BYTES = 2**14
"""One read. Nothing else runs until h11 has parsed it: a header line or a chunk takes microseconds however small it is."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 29\r\n\r\ntoo many connections are open\n"


@final
class HttpProtocol(H11Protocol):
    """One connection; `uvicorn.Config(http=...)` takes a `functools.partial` of this class with its keyword arguments.

    Args:
        most_connections: further ones are answered 503 and closed.
        head_timeout_s: seconds from the beginning of a connection, or from the first byte behind a request, to the end of the
            next head; then the connection is closed.
        write_timeout_s: seconds that written data may stay unsent because the client does not read; then the connection is
            aborted, and the request ends as if the client had disconnected.
    """

    def __init__(
        self, *args: Any, most_connections: int, head_timeout_s: float, write_timeout_s: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._most_connections = most_connections
        self._head_timeout_s, self._write_timeout_s = head_timeout_s, write_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self._most_connections:
            self.transport = transport
            transport.write(_FULL)
            transport.close()
            return
        transport.max_size = _READ_BYTES
        transport.set_write_buffer_limits(high=0)  # pause_writing as soon as anything is unsent
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def _time_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer = _stopped(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.abort)

    def _should_upgrade(self) -> bool:
        return False  # RFC 9110, 7.8, lets servers ignore the offers of HTTP/2 that some clients make

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer has begun
            self.transport.close()

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self._write_timeout_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_timer = _stopped(self._write_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer, self._write_timer = _stopped(self._head_timer), _stopped(self._write_timer)
        super().connection_lost(exc)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def reserve_files(most: int) -> int:
    """Raises the process's limit of open files to the number that a server needs, as far as it may.

    Returns:
        Connections that may be open.
    """
    if sys.platform == "win32":  # has no such limit
        return most
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + BACKLOG + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return most
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        most = most * soft // needed
        log.warning("at most %d connections at once: this process may open %d files (ulimit -Hn)", most, soft)
    return most
