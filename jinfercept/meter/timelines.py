"""What happens to single requests, and when: for the spans of traces. A fold behind `EngineStats`, while any are traced.

A timeline is one sequence of phases (queue, prefill, decode, pause) without gaps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from jinfercept.meter.interceptions import OpenInterception
from jinfercept.meter.request_log import Ended, Paused, Queued, Started
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.sequence import Sequence

MOST_PHASES = 512
"""Maximum phases of one timeline; further ones are counted only."""

PhaseKind = Literal["queue", "prefill", "decode", "pause"]


@dataclass(slots=True)
class Phase:
    """A span of time of one request. Times are seconds of the engine's clock.

    Attributes:
        number: interceptions of the request before it began, its own pause included.
        tokens: computed in a prefill, or generated in a decode.
    """

    kind: PhaseKind
    start_s: float
    end_s: float
    number: int = 0
    tokens: int = 0


class FollowedContext(NamedTuple):
    """The retained context that a request extends.

    Attributes:
        mark: of the finished request's timeline; None if it was not traced.
        tool: name of the tool that the client ran, or fixed labels as in `meter.interceptions`.
        began_s: end of the finished request, in seconds of the engine's clock.
    """

    mark: object
    tool: str
    began_s: float


@dataclass(slots=True)
class Timeline:
    """One request. The engine's thread writes it until the request's `Finished` event is delivered.

    Attributes:
        mark: a value of the tracer, stored with the retained context of the request.
        phases: in the order in which they began.
        num_dropped: phases beyond `MOST_PHASES`.
        follows: the retained context that the request extends, if there is one.
    """

    mark: object = None
    phases: list[Phase] = field(default_factory=list)
    num_dropped: int = 0
    follows: FollowedContext | None = None
    _now: Phase | None = None
    _pauses: int = 0
    _generated: int = 0

    def enter(self, event: Queued | Started | Paused | Ended) -> None:
        """The sequence has entered a state."""
        if isinstance(event, Paused) and self._now is None:
            return  # a follow-up request takes a retained context over
        now = event.at_s
        self._close(event.sequence, now)
        if isinstance(event, Paused):
            self._pauses += 1
        kinds: dict[type, PhaseKind] = {Queued: "queue", Started: "prefill", Paused: "pause"}
        if (kind := kinds.get(type(event))) is not None:
            self._now = self._open(kind, now)

    def first_token(self, sequence: Sequence, now: float) -> None:
        """The sequence's first token since it began to run was sampled."""
        if self._now is not None and self._now.kind == "prefill":
            residency = sequence.usage.residency
            self._now.tokens = max(0, len(sequence.tokens) - residency.device - residency.host)
            self._close(sequence, now)
            self._now = self._open("decode", now)
            self._generated = sequence.generated

    def end(self) -> None:
        """The request has finished; its context may be retained."""
        if self._now is not None and self._now.kind == "pause" and self.phases and self.phases[-1] is self._now:
            self.phases.pop()  # it is no pause of the request that its context is retained
        self._now = None

    def _close(self, sequence: Sequence, now: float) -> None:
        phase, self._now = self._now, None
        if phase is not None:
            phase.end_s = now
            if phase.kind == "decode":
                phase.tokens = sequence.generated - self._generated

    def _open(self, kind: PhaseKind, start_s: float) -> Phase:
        phase = Phase(kind, start_s, start_s, self._pauses)
        if len(self.phases) < MOST_PHASES:
            self.phases.append(phase)
        else:
            self.num_dropped += 1
        return phase


@final
class Timelines:
    """The timelines of unfinished requests.

    Attributes:
        open: by request id. Other threads add to it before they submit a request; empty if nothing is traced.
    """

    def __init__(self) -> None:
        self.open: dict[str, Timeline] = {}
        self._without_token: dict[str, tuple[Sequence, Timeline]] = {}

    def add(self, timelines: Mapping[str, Timeline]) -> None:
        """Record these requests, which are submitted next."""
        self.open.update(timelines)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Forget requests that were refused."""
        for name in request_ids:
            self.open.pop(name, None)

    def enter(self, event: Queued | Started | Paused | Ended, pause: OpenInterception | None) -> None:
        """A sequence has entered a state."""
        name = event.sequence.id
        timeline = self.open.get(name)
        if timeline is None:
            return
        if isinstance(event, Paused) and not timeline.phases and pause is not None and pause.kept:
            timeline.follows = FollowedContext(pause.mark, pause.tool, pause.began_s)
        timeline.enter(event)
        if isinstance(event, Queued | Started):
            self._without_token[name] = event.sequence, timeline
        else:
            self._without_token.pop(name, None)
        if isinstance(event, Ended):
            self.finish(name)

    def step(self, planned: PlannedStep, now: float) -> None:
        """A step has ended."""
        for sequence, epoch, *_ in planned.sampled:
            if sequence.id in self._without_token and sequence.epoch == epoch:
                self._without_token.pop(sequence.id)[1].first_token(sequence, now)

    def finish(self, request_id: str) -> Timeline | None:
        """End the timeline of a finished request; None if the request is not traced."""
        self._without_token.pop(request_id, None)
        timeline = self.open.pop(request_id, None)
        if timeline is not None:
            timeline.end()
        return timeline
