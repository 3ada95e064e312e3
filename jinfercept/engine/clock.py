"""The engine's clock: monotonic seconds, and waiting. A simulator brings a virtual one."""

import time
from threading import Event
from typing import Protocol, final


class Clock(Protocol):
    """Monotonic seconds since an arbitrary start, and a wait that an event ends."""

    def now(self) -> float: ...

    def wait(self, wake: Event, timeout_s: float) -> None:
        """Return when `wake` is set, or after `timeout_s` seconds; clears `wake`."""
        ...


@final
class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, wake: Event, timeout_s: float) -> None:
        wake.wait(timeout_s)
        wake.clear()
