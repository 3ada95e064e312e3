"""HTTP/1.1 connections: uvicorn's protocol on the h11 parser, with timeouts for heads and writes.

The parser gets the bytes as the socket delivers them. `Upgrade` is ignored, as RFC 9110 (7.8) allows: h11 reads the body of
such a request like any other.
"""

import asyncio
import re
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast, final

import h11
from h11._writers import ChunkedWriter
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from jinfercept.protocols.encoding import encode
from jinfercept.protocols.errors import ApiError
from jinfercept.server.http.connection_limits import ConnectionLimits

MAX_HEAD_BYTES = 2**15
"""Maximum size of the head of a request."""
MAX_HEADER_LINES = 100
"""Maximum lines of a head after its first, continuations counted; of a trailer too."""
_BLANK_LINE = re.compile(rb"\n\r?\n")
_PIECE_BYTES = 2**11
_MAX_BUFFERED_REQUESTS = 100
_FREE_CHUNKS = 4096
_MIN_CHUNK_BYTES = 64
_VERSION = b"HTTP/1.1 "
_PROBES_S = (0.01, 0.05, 0.25, 1.0, 4.0, 16.0, 60.0)
"""Seconds from each byte that is sent ahead to the next one; at most as many as `_VERSION` has."""
_LINGER_S = 2.0
_LINGER_BYTES = 2**26


@final
class HttpProtocol(H11Protocol):
    """One connection; `uvicorn.Config(http=...)` takes a `functools.partial` of this class with its keyword arguments.

    Args:
        head_timeout_s: seconds from the beginning of a connection, or from the first byte of a later request on it, to the end
            of the request's head; then the connection is closed.
        write_timeout_s: seconds that written data may stay unsent because the client does not read, before and after the
            connection is closed; then it is aborted, unsent data is dropped, and the request ends as if the client had
            disconnected.
        limits: counts the connections; one too many is answered 503 and closed.
    """

    def __init__(
        self, *args: Any, head_timeout_s: float, write_timeout_s: float, limits: ConnectionLimits, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout_s, self._write_timeout_s, self._limits = head_timeout_s, write_timeout_s, limits
        self.conn = _Connection()
        self._app, self.app = self.app, self._serve
        self._num_buffered = 0
        """Pipelined requests: they arrived before the previous answer was written."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._address: str | None = None
        self._lingering: LingeringTransport | None = None
        """The transport; None: the connection was not admitted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._address = _address(transport)
        if self._limits.admit(self._address):
            transport.set_write_buffer_limits(high=0)  # pause_writing as soon as anything is unsent
            self._lingering = LingeringTransport(transport, self.loop, self._write_timeout_s)
            super().connection_made(cast(asyncio.Transport, self._lingering))
            self._start_head_timer()
        else:
            error = ApiError(503, "too many connections are open", code="too_many_connections")
            transport.write(_last_answer(error))
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._lingering is None:
            return
        if self._lingering.is_closing() or self.conn.their_state is h11.MUST_CLOSE:
            self._lingering.drop(data)
        else:
            super().data_received(data)

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether the connection stays open: the client has sent all it will, and may wait for the answer to a whole request.

        A client that has closed its socket looks the same, until something is written: its system resets the connection. So a
        few bytes of the answer are written ahead that are the same whatever it says (`_probe`); the second of them fails then.
        """
        cycle, lingering = self.cycle, self._lingering
        if lingering is not None and lingering.is_half_closed:
            return True  # reading was resumed, and met the end again
        if lingering is None or lingering.is_closing() or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        lingering.is_half_closed = True
        self._probe(cycle, 0)
        return True

    def _probe(self, cycle: RequestResponseCycle, number: int) -> None:
        """Write one byte of an answer: the next one of its version, or a zero before the size of its next chunk."""
        lingering = self._lingering
        if lingering is None or lingering.is_closing() or cycle.response_complete:
            return
        if not cycle.response_started:
            lingering.write_ahead(_VERSION[number : number + 1])
        elif isinstance(self.conn.writer, ChunkedWriter):
            lingering.write(b"0")
        if number < len(_PROBES_S):
            self.loop.call_later(_PROBES_S[number], self._probe, cycle, number + 1)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._start_head_timer()

    def on_response_complete(self) -> None:
        cycle, lingering = self.cycle, self._lingering
        super().on_response_complete()
        is_half_closed = lingering is not None and lingering.is_half_closed and not lingering.is_closing()
        if is_half_closed and self.cycle is cycle:
            self.transport.close()  # all requests that were whole have their answers
        elif is_half_closed:
            self._probe(self.cycle, 0)
        if self.cycle is not cycle:
            self._num_buffered += 1
            if self._num_buffered >= _MAX_BUFFERED_REQUESTS:
                self.scope["headers"] = [*self.headers, CLOSE_HEADER]  # uvicorn's answer says so too

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application once all earlier output is sent; not if the connection closes before that."""
        cycle = self.cycle
        await self.flow.drain()
        if self.transport.is_closing():
            cycle.disconnected = True
        else:
            await self._app(scope, receive, send)

    def _should_upgrade(self) -> bool:
        return False

    def send_400_response(self, msg: str) -> None:
        """Answers 400 or 431 in the shape of every error, unless an answer has begun, and closes the connection."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_last_answer(self.conn.refusal or ApiError.bad(msg)))
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lingering is None:
            return
        self._limits.release(self._address)
        self._lingering.connection_lost()
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self._write_timeout_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._close_now()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self._close_now()

    def _close_now(self) -> None:
        assert self._lingering is not None
        self._lingering.close_now()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._close_now)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _address(transport: asyncio.Transport) -> str | None:
    """The client's IP address; None: it has none, or has disconnected."""
    client = get_remote_addr(transport)
    return client and client[0]


def _last_answer(error: ApiError) -> bytes:
    """An answer that is written without the parser, after which the connection is closed."""
    body = encode(error.body)
    status = HTTPStatus(error.status_code)
    head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


@final
class _Connection(h11.Connection):
    """h11's parser, with bounds on the lines of heads and trailers and on the number of chunks of a body.

    A line or a chunk takes a few microseconds however small it is, and nothing else runs until all that one read delivered is
    parsed. So h11, which parses heads and trailers as soon as it has their ends, is fed in small pieces.
    """

    refusal: ApiError | None = None
    """The answer to a head or a trailer that is too large; None: there is none."""
    _chunks = 0
    _body_left = 0
    """Bytes of the body's `Content-Length` that h11 has not parsed."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._waiting = bytearray()
        """Received data that h11 has not been fed yet."""

    @property
    def writer(self) -> object:
        """What writes the body of the answer."""
        return self._writer

    def receive_data(self, data: bytes) -> None:
        self._waiting += data

    def next_event(self) -> Any:
        while True:
            if self.their_state is h11.IDLE:
                self._check_lines()
            try:
                event = super().next_event()
            except ValueError as error:  # of Python's `int`
                raise h11.RemoteProtocolError("Content-Length has too many digits") from error
            if event is not h11.NEED_DATA or not self._waiting:
                break
            self._feed()
        if isinstance(event, h11.Request):
            self._chunks = _FREE_CHUNKS
            headers = dict(event.headers)
            self._body_left = 0 if b"transfer-encoding" in headers else int(headers.get(b"content-length", 0))
        elif isinstance(event, h11.Data):
            self._body_left -= len(event.data)
            self._chunks += len(event.data) // _MIN_CHUNK_BYTES - event.chunk_start
            if self._chunks < 0:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event

    def _feed(self) -> None:
        self._check_lines()
        size = max(_PIECE_BYTES, self._body_left)
        super().receive_data(bytes(self._waiting[:size]))
        del self._waiting[:size]

    def _check_lines(self) -> None:
        """Checks the size of the head or the trailer with which the unparsed data begin.

        Raises:
            RemoteProtocolError: it is too large.
        """
        unparsed, _ = self.trailing_data
        end = blank.end() if (blank := _BLANK_LINE.search(unparsed)) else len(unparsed)
        if end > MAX_HEAD_BYTES or unparsed.count(b"\n", 0, end) > MAX_HEADER_LINES + 2:
            most = f"{MAX_HEADER_LINES} lines and {MAX_HEAD_BYTES} bytes"
            self.refusal = ApiError(431, f"the head of the request is too large: send at most {most}")
            raise h11.RemoteProtocolError(self.refusal.detail)


@final
class LingeringTransport:
    """A transport whose `close` ends the writing side first.

    The socket is closed once the client has closed it too, or has sent `_LINGER_BYTES` more, or after `_LINGER_S` seconds. All
    other attributes are those of the wrapped transport.

    Args:
        loop: runs the timers.
        flush_timeout_s: seconds after any close until the socket is closed even if written data are unsent.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, flush_timeout_s: float) -> None:
        self._transport, self._loop, self._flush_timeout_s = transport, loop, flush_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._dropped = self._num_ahead = 0
        self.is_half_closed = False
        """Whether the client has ended its side."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._timer is None and not self._transport.is_closing():
            self._transport.write(data[self._num_ahead :])
            self._num_ahead = 0

    def write_ahead(self, data: bytes) -> None:
        """Write the first bytes of what `write` gets next."""
        self._transport.write(data)
        self._num_ahead += len(data)

    def close(self) -> None:
        if self.is_half_closed:
            self.close_now()
        elif not self.is_closing():
            self._timer = self._loop.call_later(_LINGER_S, self.close_now)
            self._start_abort_timer()
            with suppress(OSError):  # the client has reset the connection
                self._transport.write_eof()
            self._transport.resume_reading()

    def close_now(self) -> None:
        """Closes the socket as soon as the written data are sent, or cannot be sent."""
        if self._timer is not None:
            self._timer.cancel()
        self._start_abort_timer()
        self._transport.close()

    def connection_lost(self) -> None:
        """Cancels the timers, since the socket is closed."""
        for timer in (self._timer, self._abort_timer):
            if timer is not None:
                timer.cancel()

    def drop(self, data: bytes) -> None:
        """Counts and drops data that arrive after `close`."""
        self._dropped += len(data)
        if self._dropped > _LINGER_BYTES:
            self.close_now()

    def _start_abort_timer(self) -> None:
        if self._abort_timer is None:
            self._abort_timer = self._loop.call_later(self._flush_timeout_s, self._transport.abort)
