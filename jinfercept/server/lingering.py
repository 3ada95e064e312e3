"""The close of a connection whose client may still be sending (RFC 9112, 9.6).

A socket that is closed while data arrives resets the connection, and the client may lose the answer before it has read it.
"""

import asyncio
from contextlib import suppress
from typing import Any, final

_LINGER_S = 2.0
_LINGER_BYTES = 2**26


@final
class LingeringTransport:
    """A transport whose `close` ends the writing side first.

    The socket is closed once the client has closed it too, or has sent `_LINGER_BYTES` more, or after `_LINGER_S` seconds. All
    other attributes are those of the transport inside.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if not self.is_closing():
            self._timer = self._loop.call_later(_LINGER_S, self._transport.close)
            with suppress(OSError):  # the client has reset the connection
                self._transport.write_eof()
            self._transport.resume_reading()

    def close_now(self) -> None:
        """Closes the socket as soon as what was written is sent."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def drop(self, data: bytes) -> None:
        """Counts data that came after `close`."""
        self._dropped += len(data)
        if self._dropped > _LINGER_BYTES:
            self.close_now()
