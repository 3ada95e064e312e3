"""A TCP connection between two hosts, and the frames on it: a length, a kind, and bytes that the kind explains.

Frames are neither signed nor encrypted once two hosts have proved to each other that they know the token (`handshake`).
"""

import socket
import struct
import threading
import time
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple, final

_HEAD = struct.Struct("<IB")
_BUFFER_BYTES = 4 << 20
"""Of the kernel's, each way: many steps ahead of a host that is busy."""
MOST_BYTES = 1 << 30
"""Of a frame."""


class Kind(IntEnum):
    """The kinds of frames."""

    CHALLENGE = 0
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    HEARTBEAT = 4
    NUMBERS = 5
    FORWARD = 6
    SAMPLE = 7
    RESET = 8
    CLOSE = 9
    FAILED = 10


class Frame(NamedTuple):
    """A kind, and the bytes that it explains."""

    kind: Kind
    body: bytes


@final
class HostLink:
    """One end of a connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._connection = connection
        self._lock = threading.Lock()

    @property
    def peer(self) -> str:
        """The other end's address."""
        try:
            return str(self._connection.getpeername()[0])
        except OSError:
            return "an address that is gone"

    def limit(self, seconds: float | None) -> None:
        """Let every later call that waits for longer than this raise `TimeoutError`; None: wait for ever."""
        self._connection.settimeout(seconds)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a frame; waits only while the kernel's buffer is full. Raises `OSError` if the connection is gone."""
        with self._lock:
            self._connection.sendall(_HEAD.pack(len(body), kind) + body)

    def send_if_free(self, kind: Kind, body: bytes = b"") -> None:
        """`send`, unless another thread is sending."""
        if self._lock.acquire(blocking=False):
            try:
                self._connection.sendall(_HEAD.pack(len(body), kind) + body)
            finally:
                self._lock.release()

    @property
    def is_closed(self) -> bool:
        """Whether the other end has closed the connection. Not while another thread receives."""
        limit_s = self._connection.gettimeout()
        try:
            self._connection.settimeout(0)
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._connection.settimeout(limit_s)

    def receive(self, most_bytes: int = MOST_BYTES, deadline_s: float | None = None) -> Frame:
        """The next frame.

        Args:
            deadline_s: monotonic seconds at which the whole frame has to be there; None: `limit` holds for each of its parts.

        Raises:
            OSError: the connection is gone, what comes is no frame, or it is late.
        """
        length, kind = _HEAD.unpack(self._read(_HEAD.size, deadline_s))
        if length > most_bytes or kind not in Kind._value2member_map_:
            raise ConnectionError(f"no frame: kind {kind}, {length} bytes")
        return Frame(Kind(kind), self._read(length, deadline_s))

    def close(self) -> None:
        """End the connection; a thread in `receive` gets an error."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size: int, deadline_s: float | None) -> bytes:
        data = bytearray(size)
        view, num_read = memoryview(data), 0
        while num_read < size:
            if deadline_s is not None:
                self.limit(max(0.001, deadline_s - time.monotonic()))
            count = self._connection.recv_into(view[num_read:])
            if not count:
                raise ConnectionResetError("the connection was closed")
            num_read += count
        return bytes(data)
