"""Closes a connection whose client may still be sending (RFC 9112, 9.6).

A socket that is closed while data arrives resets the connection, and the client may lose an answer that it has not read yet.
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
    other attributes are those of the wrapped transport.

    Args:
        transport: the wrapped transport.
        loop: runs the timers.
        flush_timeout_s: seconds after any close until the socket is closed even if written data are unsent.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, flush_timeout_s: float) -> None:
        self._transport, self._loop, self._flush_timeout_s = transport, loop, flush_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
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
