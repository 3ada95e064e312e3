"""Reads consistent values from the engine for the event loop: on the engine's thread, between two steps."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, final

from jinfercept.serve.protocols.errors import ApiError

_TIMEOUT_S = 2.0
"""Seconds to wait for the end of a step before the previous value is returned."""


class SnapshotValue[T](NamedTuple):
    """A value of the engine, and the monotonic time at which it was read."""

    seen: T
    at_s: float


@final
class EngineSnapshot[T]:
    """The last answer to one question about an engine.

    Args:
        ask: asks the question; the answer comes between two steps of the engine.
        fresh_s: seconds for which an answer is given again.
    """

    def __init__(self, ask: Callable[[], Future[T]], fresh_s: float = 0.0) -> None:
        self._ask, self._fresh_s = ask, fresh_s
        self._reading: asyncio.Future[Any] | None = None
        self._last: SnapshotValue[T] | None = None

    async def look(self) -> SnapshotValue[T]:
        """The current value, or the last one if a step takes longer than `_TIMEOUT_S`.

        Raises:
            ApiError: 503 if there is no value yet.
        """
        last = self._last
        if last is not None and time.monotonic() - last.at_s < self._fresh_s:
            return last
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(self._ask())
        question = self._reading
        await asyncio.wait([question], timeout=_TIMEOUT_S)
        if question.done():
            self._last = SnapshotValue(question.result(), time.monotonic())
        if self._last is None:
            raise ApiError(503, "the engine is busy with a long step", code="busy", headers={"Retry-After": "1"})
        return self._last
