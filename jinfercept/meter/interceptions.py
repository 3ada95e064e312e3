"""Which requests are paused, for how long, and how well that was expected. Told by the `Meter`; counts by tool.

Counts are open to all, so no name is counted that a client can choose: a tool that clients run and a name that no tool has are
counted under a fixed one. What is shown of a single pause has its true names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from jinfercept.meter.counts import BoundedNames, ToolCounts
from jinfercept.request import Call, Request, Result
from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.sequence import PendingCall, Sequence

CLIENT, UNKNOWN, SEVERAL = "<client>", "<unknown>", "<several>"
"""Counted as tools: all that clients run, all names that no tool has, and an interception by calls of different tools."""

MOST_TOOLS = 100
SHOWN_CHARS = 300
"""What is remembered of a text."""


@dataclass(slots=True)
class OpenInterception:
    """One that is not over.

    Attributes:
        tool: that intercepted it, or `SEVERAL`.
        label: under which it is counted.
        began_s: on the engine's clock.
        expected_s: how long it was expected to last when it began.
        said: what the tool was asked, or the end of the finished answer.
        kept: the request is over; a follow-up request is expected.
        returned_s: when its calls had returned; it waits to run.
    """

    sequence: Sequence
    tool: str
    label: str
    began_s: float
    expected_s: float
    said: str = ""
    kept: bool = False
    returned_s: float | None = None


@final
class InterceptionStats:
    """The interceptions of one scheduler.

    Args:
        tools: is counted in.
        estimator: the policy's own: asked at the moment at which the policy asks it too.

    Attributes:
        open: by request.
        answers: labels of the calls that have returned in this step, by request; cleared by the `Meter` after the step.
    """

    def __init__(self, tools: dict[str, ToolCounts], estimator: Estimator) -> None:
        self._tools, self._estimator = tools, estimator
        self._names = BoundedNames(MOST_TOOLS)
        self.open: dict[str, OpenInterception] = {}
        self.answers: dict[str, tuple[str, ...]] = {}
        self._left: OpenInterception | None = None

    def begin(self, sequence: Sequence, now: float) -> None:
        """It was intercepted: by its calls; without any, it goes on from the kept one that has just left."""
        if not sequence.calls:
            if self._left is not None:
                self.counts(self._left).given_up -= 1
                self._left.sequence = sequence
                self.open[sequence.id], self._left = self._left, None
            return
        tool = _one({call.name for call in sequence.calls})
        label = _one({self._label(call) for call in sequence.calls})
        expected_s = remaining_s(self._estimator, sequence, 0.0)
        self.open[sequence.id] = pause = OpenInterception(sequence, tool, label, now, expected_s)
        self.counts(pause).begun += 1

    def end(self, sequence: Sequence, now: float) -> None:
        """It waits to run: if it was intercepted, its calls have returned."""
        pause = self.open.get(sequence.id)
        if pause is not None and pause.returned_s is None:
            pause.returned_s, duration_s = now, now - pause.began_s
            self.answers[sequence.id] = tuple(self._label(call) for call in sequence.calls)
            counts = self.counts(pause)
            counts.duration_s.add(duration_s)
            counts.predicted_s += pause.expected_s
            counts.error_s += abs(pause.expected_s - duration_s)

    def leave(self, sequence: Sequence) -> None:
        """It is gone."""
        self._left = self.open.pop(sequence.id, None)
        if self._left is not None and self._left.returned_s is None:
            self.counts(self._left).given_up += 1
        else:
            self._left = None

    def asked(self, request_id: str, calls: tuple[Call, ...]) -> None:
        """What was said to the tools."""
        if request_id in self.open:
            said = ", ".join(f"{call.name}({call.arguments})" for call in calls)
            self.open[request_id].said = said[:SHOWN_CHARS]

    def answered(self, request_id: str, results: tuple[Result, ...]) -> None:
        """What came back, in the order of the calls."""
        for name, result in zip(self.answers[request_id], results, strict=True):
            self._tool(name).results[result.status] += 1

    def ran(self, request: Request, calls: Iterable[Call], results: Iterable[Result]) -> None:
        """The server ran calls of a request that is over."""
        for call, result in zip(calls, results, strict=True):
            label = self._names.of(call.name) if call.name in request.tools else UNKNOWN
            self._tool(label).results[result.status] += 1

    def keep(self, request_id: str, text: str) -> bool:
        """The request is over; False if its context was not kept."""
        pause = self.open.get(request_id)
        if pause is None:
            return False
        pause.kept, pause.said = True, text[-SHOWN_CHARS:]
        return True

    def counts(self, pause: OpenInterception) -> ToolCounts:
        """Of its label."""
        return self._tool(pause.label)

    def _label(self, call: PendingCall) -> str:
        """The name under which a call is counted."""
        if call.kind == "client_tool":
            return CLIENT
        return UNKNOWN if call.kind == "unknown_tool" else self._names.of(call.name)

    def _tool(self, name: str) -> ToolCounts:
        counts = self._tools.get(name)
        if counts is None:
            counts = self._tools[name] = ToolCounts()
        return counts


def _one(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else SEVERAL
