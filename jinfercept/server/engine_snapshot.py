"""A look at the engine from the event loop: at its own thread's convenience, between two steps, where nothing moves."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple, final

from jinfercept.server.errors import ApiError
from jinfercept.server.service import Service

_PATIENCE_S = 2.0
"""Seconds that a step may take before an older look is shown in its stead."""


class SnapshotValue[T](NamedTuple):
    """What was seen, and when, on the monotonic clock."""

    seen: T
    at_s: float


@final
class EngineSnapshot[T]:
    """One question to the engine of a service, asked as often as anybody wants to know.

    Args:
        look: runs on the engine's thread, or under its lock while that rests; copies what it returns.
        fresh_s: an answer is good for so many seconds, whoever asks.
    """

    def __init__(self, service: Service, look: Callable[[], T], fresh_s: float = 0.0) -> None:
        self._service, self._look, self._fresh_s = service, look, fresh_s
        self._asked: asyncio.Future[Any] | None = None
        self._last: SnapshotValue[T] | None = None

    async def look(self) -> SnapshotValue[T]:
        """The answer now, or the last one if the engine is in the middle of something long.

        Raises:
            ApiError: 503 if there never was one.
        """
        last = self._last
        if last is not None and time.monotonic() - last.at_s < self._fresh_s:
            return last
        if self._asked is None or self._asked.done():
            self._asked = asyncio.wrap_future(self._service.llm.thread.ask(self._look))
        asked = self._asked
        await asyncio.wait([asked], timeout=_PATIENCE_S)
        if asked.done():
            self._last = SnapshotValue(asked.result(), time.monotonic())
        if self._last is None:
            raise ApiError(503, "the engine is busy with a long step", code="busy", headers={"Retry-After": "1"})
        return self._last
