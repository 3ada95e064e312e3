"""Passes events of all streams from the engine's thread to the event loop, with one wake-up for all pending events."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, final

Delivery = tuple[Callable[[Any], None], Any]


@final
class EventBridge:
    """A queue of callbacks for the event loop that runs when it is made; `post` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Delivery] = deque()
        self._woken = False

    def post(self, put: Callable[[Any], None], event: Any) -> None:
        """Call `put(event)` on the event loop, in order. Raises `RuntimeError` if the loop is closed."""
        self._pending.append((put, event))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the queue is emptied: an event posted from now on wakes the loop again
        while self._pending:
            put, event = self._pending.popleft()
            put(event)
