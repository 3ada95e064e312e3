"""Time as the engine sees it: monotonic seconds, and waiting. A simulator brings a clock of its own."""

import time
from threading import Event
from typing import Protocol, final


class Clock(Protocol):
    """Seconds since an arbitrary start."""

    def now(self) -> float: ...

    def wait(self, wake: Event, timeout_s: float) -> None:
        """Return when `wake` is set or after so many seconds, whichever is first; clears `wake`."""
        ...


@final
class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, wake: Event, timeout_s: float) -> None:
        wake.wait(timeout_s)
        wake.clear()
