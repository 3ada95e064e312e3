"""What happens to the requests of one engine, told once: events with their times, in order, to all that count or show them.

    Queued     a request waits to run: it is new, its calls have returned, or it gave way to others
    Started    it runs
    Paused     it waits for its calls; or it has finished, and its context is retained for a follow-up request
    Ended      it is over; or its retained context was dropped, or taken over by a follow-up request, which is paused next
    Moved      a policy's move of some of its pages was executed
    Stepped    the result of a plan has arrived
    Passed     an iteration of the engine has passed, with or without a plan

Metrics (`EngineStats`) and reports of runs are folds over these.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, final

from jinfercept.events import Event
from jinfercept.kv.context import PageRun
from jinfercept.sched.plan import StepResult
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policy import Move
from jinfercept.sched.sequence import Sequence, State

Because = Literal["new", "returned", "preempted"]


class Queued(NamedTuple):
    """A sequence waits.

    Attributes:
        at_s: seconds of the engine's clock, as in all events.
        because: why it waits.
    """

    at_s: float
    sequence: Sequence
    because: Because


class Started(NamedTuple):
    """A sequence runs."""

    at_s: float
    sequence: Sequence


class Paused(NamedTuple):
    """A sequence is intercepted. One without calls takes over the retained context whose `Ended` was told just before."""

    at_s: float
    sequence: Sequence


class Ended(NamedTuple):
    """A sequence is finished."""

    at_s: float
    sequence: Sequence


class Moved(NamedTuple):
    """A policy's move was executed, as far as the pages allowed; see `sched.observer.Observer`."""

    at_s: float
    move: Move
    run: PageRun
    copied_tokens: int
    freed: int


class Stepped(NamedTuple):
    """A plan's result has arrived; its tokens are not appended yet."""

    at_s: float
    planned: PlannedStep
    result: StepResult


class Passed(NamedTuple):
    """An iteration of the engine has passed.

    Attributes:
        events: what it gives to the requests' callers.
    """

    at_s: float
    events: list[Event]


LogEvent = Queued | Started | Paused | Ended | Moved | Stepped | Passed
Fold = Callable[[LogEvent], None]
"""Takes every event as it happens, on the engine's thread. What an event refers to is as it was only until the fold returns."""


@final
class RequestLog:
    """Tells the folds of one engine what happens to its requests. It is the `Observer` of the engine's scheduler.

    Args:
        now: the engine's clock.

    Attributes:
        running, waiting: sequences by id. Empty without folds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.running: dict[str, Sequence] = {}
        self.waiting: dict[str, Sequence] = {}
        self._folds: list[Fold] = []
        self._lives: dict[str, tuple[State, Because]] = {}  # the last state of each request, and why it waited last

    def tell(self, fold: Fold, unfinished: Iterable[Sequence] = ()) -> None:
        """Tell a fold, behind those before it, all that happens from now on.

        Args:
            unfinished: requests that are in the engine already; their present state is noted first.
        """
        self._folds.append(fold)
        for sequence in unfinished:
            fold(self._change(sequence))

    # -- hooks of the scheduler ------------------------------------------------------------------------------------

    def changed(self, sequence: Sequence) -> None:
        if self._folds:
            self._emit(self._change(sequence))

    def _change(self, sequence: Sequence) -> LogEvent:
        now, name, state = self.now(), sequence.id, sequence.state
        before, because = self._lives.pop(name, (State.WAITING, "new"))
        self.running.pop(name, None)
        self.waiting.pop(name, None)
        if state is State.FINISHED:
            return Ended(now, sequence)
        if state is State.RUNNING:
            self.running[name] = sequence
        elif state is State.WAITING:
            self.waiting[name] = sequence
            if before is not State.WAITING:
                because = "returned" if before is State.INTERCEPTED else "preempted"
        self._lives[name] = state, because
        if state is State.WAITING:
            return Queued(now, sequence, because)
        return Started(now, sequence) if state is State.RUNNING else Paused(now, sequence)

    def moved(self, move: Move, run: PageRun, copied_tokens: int, freed: int) -> None:
        if self._folds:
            self._emit(Moved(self.now(), move, run, copied_tokens, freed))

    # -- hooks of the engine ---------------------------------------------------------------------------------------

    def stepped(self, planned: PlannedStep, result: StepResult) -> None:
        """A plan's result has arrived."""
        for fold in self._folds:
            fold(Stepped(self.now(), planned, result))

    def passed(self, events: list[Event]) -> None:
        for fold in self._folds:
            fold(Passed(self.now(), events))

    def _emit(self, event: LogEvent) -> None:
        for fold in self._folds:
            fold(event)
