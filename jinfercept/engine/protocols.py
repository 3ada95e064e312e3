"""What the engine needs of its clock, of its dispatcher, which has calls answered, and of grammars."""

import time
from collections.abc import Mapping
from threading import Event
from typing import Protocol, final, runtime_checkable

from jinfercept.calls import Call, Result, Tool
from jinfercept.hooks import Constraint


class Clock(Protocol):
    """Monotonic seconds since an arbitrary start, and a wait that an event ends."""

    def now(self) -> float: ...

    def wait(self, wake: Event, timeout_s: float) -> None:
        """Return when `wake` is set, or after `timeout_s` seconds; clears `wake`."""
        ...


@final
class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)

    def wait(self, wake: Event, timeout_s: float) -> None:
        wake.wait(timeout_s)
        wake.clear()


class CallDispatcher(Protocol):
    """Answers calls, off the engine's thread. No method waits."""

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool], tenant: str) -> None: ...

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        """The requests whose calls have all returned since the last poll, with the results in the calls' order."""
        ...

    def start(self, request_id: str, call: Call, tools: Mapping[str, Tool], tenant: str) -> None:
        """Start an asynchronous call of a request. Its id is unique among the request's calls in flight."""
        ...

    def poll_started(self) -> list[tuple[str, Call, Result]]:
        """The asynchronous calls that had returned at the last `poll` and were not given yet, in the order of their returns."""
        ...

    def next_s(self) -> float | None:
        """The deadline of the call that times out next, in seconds of the engine's clock; None if no call is in flight."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget the calls of a request, asynchronous ones too, if it has any."""
        ...


@runtime_checkable
class CopyableConstraint(Constraint, Protocol):
    """A constraint whose state can be copied. Requests with another one have no drafts."""

    def copy(self) -> Constraint:
        """The same state; what it accepts does not change this one."""
        ...
