"""Runs the application under uvicorn, with a limit of connections and two timeouts of its own. The socket is bound first, so
that a port in use is an error before the model is loaded.

On SIGTERM or SIGINT the server drains: new requests are refused (503), running ones may take `--drain-timeout` seconds more,
the rest is aborted, and the exit status is 0. What follows the drain takes what is left of those seconds, or one or two more. A
second signal ends those seconds at once.
"""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast, final

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from jinfercept.errors import ConfigError
from jinfercept.serve.access.key_limits import ServedState
from jinfercept.serve.observe.log_lines import SOCKETS
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.process import frozen_heap

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


log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 2**14
"""Size of the head of a request beyond which no more of it is read."""
BACKLOG = 1024
"""Connections that the kernel, or one turn of the event loop, may accept before they are counted, at most."""
_OTHER_FILES = 512
"""File descriptors for weights, logs and tools."""
_READ_BYTES = 2**14
"""One read. Nothing else runs until h11 has parsed it: a header line or a chunk takes microseconds however small it is."""
_SOCKET_PATH = "/v1/responses"
"""That the first request of a connection may turn into a WebSocket."""
_FRAMING = (b"content-length", b"transfer-encoding")
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 30\r\n\r\ntoo many connections are open\n"


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
        self,
        *args: Any,
        most_connections: int,
        head_timeout_s: float,
        write_timeout_s: float,
        **kwargs: Any,
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
        is_socket = self.transport.get_protocol() is not self
        if is_socket or (self.cycle is not None and not self.cycle.response_complete):
            self._head_timer = stopped(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.abort)

    def _should_upgrade(self) -> bool:
        """RFC 9110, 7.8, lets servers ignore offers: those of HTTP/2 that some clients make, and whatever has a body."""
        names = {name for name, _ in self.headers}
        is_first = self.cycle is None and self.scope["method"] == "GET" and self.scope["path"] == _SOCKET_PATH
        is_first &= self.scope["http_version"] == "1.1"
        return is_first and self._get_upgrade() == b"websocket" and names.isdisjoint(_FRAMING)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer has begun
            self.transport.close()

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self._write_timeout_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_timer = stopped(self._write_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer, self._write_timer = stopped(self._head_timer), stopped(self._write_timer)
        super().connection_lost(exc)


def reserve_files(most: int) -> int:
    """Raises the limit of open files as far as it may; returns the number of connections that may be open."""
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


SWITCH_S = 0.0005
"""Switch interval of the interpreter's lock: Python's default of 5 ms delays the event loop when tokens are sent."""
_SHUTDOWN_S = 5
"""Seconds for clients to read the ends of their responses after the drain, if so much is left."""


@final
class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before it ends. `ready` is called once it accepts connections, `drained` after the drain."""

    def __init__(
        self,
        app: ASGIApp,
        service: ServedState,
        listener: socket.socket,
        ready: Callable[[], object] = lambda: None,
        drained: Callable[[], object] = lambda: None,
    ) -> None:
        options = service.options
        protocol = partial(
            HttpProtocol,
            most_connections=reserve_files(options.max_connections),
            head_timeout_s=options.header_timeout,
            write_timeout_s=options.write_timeout,
        )
        socket_protocol = partial(
            SocketProtocol, message_timeout_s=options.body_timeout, write_timeout_s=options.write_timeout
        )
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], protocol),  # uvicorn only calls it
            loop="asyncio",  # uvloop takes one connection per turn
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws=cast(type[asyncio.Protocol], socket_protocol),
            ws_max_size=options.max_body_size,
            ws_ping_timeout=options.write_timeout,
            ws_per_message_deflate=False,  # a stream of tokens is many small frames
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=options.timeout_keep_alive,
        )
        super().__init__(config)
        self._service, self._listener = service, listener
        self._ready, self._drained = ready, drained
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def serve_until_signal(self) -> None:
        """Serve; returns after the drain."""
        try:
            self.run(sockets=[self._listener])
        finally:
            if self._service.options.uds is not None:
                Path(self._service.options.uds).unlink(missing_ok=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain, or end it at the second call. Called by signals; thread-safe."""
        if self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        timeout_s = self._service.options.drain_timeout
        if self._draining is None:
            log.info(
                "shutting down: nothing new is taken; requests have %g s to end, and a second signal ends them at once",
                timeout_s,
            )
        else:
            self._draining.cancel()
            timeout_s = 0.0
        self._draining = asyncio.ensure_future(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        await self._service.drain(timeout_s)
        left_s = timeout_s - (time.monotonic() - began_s)
        self.config.timeout_graceful_shutdown = max(1, min(_SHUTDOWN_S, round(left_s)))
        self._drained()
        self.should_exit = True


def serve_app(
    app: ASGIApp,
    service: ServedState,
    listener: socket.socket,
    ready: Callable[[], object],
    drained: Callable[[], object] = lambda: None,
) -> None:
    """Serve an application until a signal, on a socket from `listen`; other arguments as those of `DrainingServer`."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with frozen_heap():
            DrainingServer(app, service, listener, ready, drained).serve_until_signal()
    finally:
        sys.setswitchinterval(before_s)


def listen(options: ServerOptions) -> tuple[socket.socket, str]:
    """A bound socket that does not listen yet, and the URL for clients.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if options.uds is not None:
        return _listen_unix(options.uds), f"unix:{options.uds}"
    host = options.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it, bodies wait 40 ms for the client's acknowledgement
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, options.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            "the address cannot be used", got=f"{host}:{options.port}: {error}", fix="give another --host or --port"
        ) from error
    port = listener.getsockname()[1]
    return listener, f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _listen_unix(path: str) -> socket.socket:
    """A bound Unix socket; the file of a server that does not run any more is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            if _answers(path):
                raise OSError("a server listens there")
            Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError("the address cannot be used", got=f"{path}: {error}", fix="give another --uds") from error
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0
