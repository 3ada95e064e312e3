"""The asynchronous calls of one request: those that run, those that wait for a trap, and results that it has not read."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jinfercept.calls import Call, Result
from jinfercept.hooks import CallMarkup, MarkupWatch
from jinfercept.sched.sequence import PendingCall


class PendingAsyncCall(NamedTuple):
    """An asynchronous call that runs.

    Attributes:
        began_s: when it was started, in seconds of the engine's clock.
    """

    call: Call
    pending: PendingCall
    began_s: float


@dataclass(slots=True)
class CallsInFlight:
    """The asynchronous calls of one request; mutable, owned by `AsyncCallQueue`.

    Attributes:
        pending: calls that run, by id.
        postponed: calls that start at the next trap.
        queue: results that the request has not read, in the order of their arrival.
        wanted: ids that the request waits for at the next clean place; None: every pending call, after a trap.
        awaited: the calls of the trap that the request is in, by id, each with its result once that has come.
    """

    markup: CallMarkup
    watch: MarkupWatch
    pending: dict[str, PendingAsyncCall] = field(default_factory=dict)
    postponed: list[Call] = field(default_factory=list)
    queue: list[tuple[Call, Result]] = field(default_factory=list)
    wanted: set[str] | None = field(default_factory=set)
    awaited: dict[str, Result | None] = field(default_factory=dict)

    @property
    def is_trapped(self) -> bool:
        """Whether a call has still to return before the request goes on."""
        return any(result is None for result in self.awaited.values())
