"""What happens to the requests of one engine, told once: events with their times, in order, to all that count or show them.

Metrics (`EngineStats`) and reports of runs are folds over these events. `at_s` is in seconds of the engine's clock.
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
    """A request waits to run: it is new, its calls have returned, or it gave way to others."""

    at_s: float
    sequence: Sequence
    because: Because


class Started(NamedTuple):
    """A request runs."""

    at_s: float
    sequence: Sequence


class Paused(NamedTuple):
    """A request waits for its calls; or it has finished, and its context is retained for a follow-up request."""

    # a sequence without calls takes over the retained context whose `Ended` came just before
    at_s: float
    sequence: Sequence


class Ended(NamedTuple):
    """A request is over; or its retained context was dropped, or is taken over by a follow-up request, which is paused next."""

    at_s: float
    sequence: Sequence


class Moved(NamedTuple):
    """A policy's move of pages was executed, as far as the pages allowed; see `sched.policy.Observer`."""

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
    """An iteration of the engine has passed, with or without a plan; `events` are those for the requests' callers."""

    at_s: float
    events: list[Event]


LogEvent = Queued | Started | Paused | Ended | Moved | Stepped | Passed
Fold = Callable[[LogEvent], None]
"""Takes every event as it happens, on the engine's thread. The objects of an event may change once the fold has returned."""


@final
class RequestLog:
    """Tells the folds of one engine what happens to its requests. It is the `Observer` of the engine's scheduler."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.running: dict[str, Sequence] = {}  # empty without folds
        self.waiting: dict[str, Sequence] = {}  # likewise
        self._folds: list[Fold] = []
        self._lives: dict[str, tuple[State, Because]] = {}  # the last state of each request, and why it waited last

    def tell(self, fold: Fold, unfinished: Iterable[Sequence] = ()) -> None:
        """Add a fold behind those before it. It gets the present state of each unfinished request, and all later events."""
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
        for fold in self._folds:
            fold(Stepped(self.now(), planned, result))

    def passed(self, events: list[Event]) -> None:
        for fold in self._folds:
            fold(Passed(self.now(), events))

    def _emit(self, event: LogEvent) -> None:
        for fold in self._folds:
            fold(event)
