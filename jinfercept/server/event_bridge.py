"""Events of all streams, from the engine's thread to the event loop: one wake-up for as many as there are."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, final

Delivery = tuple[Callable[[Any], None], Any]


@final
class EventBridge:
    """Belongs to the loop that runs where it is made; `post` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mail: deque[Delivery] = deque()
        self._woken = False

    def post(self, put: Callable[[Any], None], event: Any) -> None:
        """Call `put(event)` on the loop, soon and in order. Raises `RuntimeError` if the loop is closed."""
        self._mail.append((put, event))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the mail is taken: what comes now wakes again
        while self._mail:
            put, event = self._mail.popleft()
            put(event)
