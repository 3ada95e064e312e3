"""The protocol of WebSockets: uvicorn's, with limits of what a client makes it write, buffer and assemble."""

import asyncio
import logging
from typing import Any, final

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from jinfercept.serve.observe.log_lines import SOCKETS

_MOST_FRAMES = 1024
"""Maximum frames of one message: each is an object, however small it is."""
_MOST_AT_ONCE = 256
"""Maximum frames of one read, which has at most 256 KiB: each takes time of the event loop, however small it is."""
_PIECE_BYTES = 4096
"""Bytes of a read that are taken apart before its frames are counted."""


@final
class SocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket; `uvicorn.Config(ws=...)` takes a `functools.partial` of this class with its keyword argument.

    Args:
        message_timeout_s: seconds in which a message has to arrive that has begun; then the connection is aborted.
        write_timeout_s: seconds that a written frame may stay unsent because the client does not read; then the connection
            is aborted.
    """

    def __init__(self, *args: Any, message_timeout_s: float, write_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logging.getLogger(SOCKETS)
        self._message_timeout_s, self._write_timeout_s = message_timeout_s, write_timeout_s
        self._message_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_read = 0  # frames of the last read

    def data_received(self, data: bytes) -> None:
        self._num_read = 0
        for start in range(0, len(data), _PIECE_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _PIECE_BYTES])
        if self.conn.handshake_exc is not None and not self.transport.is_closing():
            # a head that is too long: uvicorn neither sends the answer nor closes
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        if not (self.frames or self.conn.reader.buffer):
            self._message_timer = stopped(self._message_timer)
        elif self._message_timer is None:
            self._message_timer = self.loop.call_later(self._message_timeout_s, self.transport.abort)

    def handle_events(self) -> None:
        self._num_read += len(self.conn.events)
        if self._num_read > _MOST_AT_ONCE:
            self._fail(CloseCode.POLICY_VIOLATION, "too many frames at a time")
        else:
            super().handle_events()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        self.read_paused = True  # until the application accepts: the state machine takes no frames before
        self.transport.pause_reading()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # no pong to a client that does not read: pongs would pile up

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MOST_FRAMES:
            self._fail(CloseCode.MESSAGE_TOO_BIG, "the message has too many frames")
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        try:
            self.frames = [b"".join(self.frames)]
            if self.curr_msg_data_type == "text":
                self.frames[0].decode()
        except UnicodeDecodeError:  # uvicorn would log a traceback
            self._fail(CloseCode.INVALID_DATA, "the message is not UTF-8")
        else:
            super().send_receive_event_to_app()

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # refused; uvicorn would log that it was not answered

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self._write_timeout_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_timer = stopped(self._write_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._message_timer, self._write_timer = stopped(self._message_timer), stopped(self._write_timer)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if not self.transport.is_closing():  # uvicorn would write to a connection whose client has said goodbye
            super().shutdown()


def stopped(timer: asyncio.TimerHandle | None) -> None:
    """Cancel a timer, if there is one."""
    if timer is not None:
        timer.cancel()
