"""Open interceptions of one engine, and counts of all by tool. Called by `EngineStats`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from jinfercept.calls import Call, Result
from jinfercept.engine.meter.counts import BoundedNames, ToolCounts
from jinfercept.outputs import Interrupt
from jinfercept.request import Request
from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.sequence import PendingCall, Sequence

CLIENT, UNKNOWN, SEVERAL = "<client>", "<unknown>", "<several>"
"""Labels for tools that clients run, for names that no tool has, and for interceptions by calls of different tools."""

MOST_TOOLS = 100
SHOWN_CHARS = 300
"""Characters that are stored of calls and of answers."""


@dataclass(slots=True)
class OpenInterception:
    """An interception that has not ended, or the retained context of a finished request, whose follow-up request ends it."""

    sequence: Sequence
    tool: str  # its true name, or `SEVERAL`
    label: str  # of its counts
    began_s: float
    expected_s: float  # duration that was predicted when it began
    text: str = ""  # the calls, or the end of the finished answer
    kept: bool = False  # the request has finished, and its context is retained
    returned_s: float | None = None  # when all calls had returned; the sequence waits to run


@final
class InterceptionStats:
    """The interceptions of one scheduler. It queries the policy's estimator when the policy does.

    Args:
        tools: counts by label, updated in place.
    """

    def __init__(self, tools: dict[str, ToolCounts], estimator: Estimator) -> None:
        self._tools, self._estimator = tools, estimator
        self._names = BoundedNames(MOST_TOOLS)
        self.open: dict[str, OpenInterception] = {}
        # Labels of the calls that have returned in this step, by request; `EngineStats` clears it after the step.
        self.answers: dict[str, tuple[str, ...]] = {}
        self._left: OpenInterception | None = None

    def begin(self, sequence: Sequence, now: float) -> None:
        """Open the interception of a sequence by its calls. Without calls, it takes over the retained context closed last."""
        if not sequence.calls:
            if self._left is not None:
                self.counts(self._left).given_up -= 1
                self._left.sequence = sequence
                self.open[sequence.id], self._left = self._left, None
            return
        tool = _alone({call.name for call in sequence.calls})
        label = _alone({self._label(call) for call in sequence.calls})
        expected_s = remaining_s(self._estimator, sequence, 0.0)
        kept = sequence.calls[0].kind in ("client_tool", "reader")
        self.open[sequence.id] = pause = OpenInterception(sequence, tool, label, now, expected_s, kept=kept)
        self.counts(pause).begun += 1

    def end(self, sequence: Sequence, now: float) -> None:
        """Note that a sequence waits to run: if it was intercepted, its calls have returned."""
        pause = self.open.get(sequence.id)
        if pause is not None and pause.returned_s is None:
            pause.returned_s, duration_s = now, now - pause.began_s
            self.answers[sequence.id] = tuple(self._label(call) for call in sequence.calls)
            counts = self.counts(pause)
            counts.duration_s.add(duration_s)
            counts.predicted_s += pause.expected_s
            counts.error_s += abs(pause.expected_s - duration_s)

    def leave(self, sequence: Sequence) -> None:
        """Close the interception of a sequence that has finished, or whose retained context was dropped."""
        self._left = self.open.pop(sequence.id, None)
        if self._left is not None and self._left.returned_s is None:
            self.counts(self._left).given_up += 1
        else:
            self._left = None

    def note_calls(self, request_id: str, calls: tuple[Call, ...]) -> None:
        if request_id in self.open:
            text = ", ".join(f"{call.name}({call.arguments})" for call in calls)
            self.open[request_id].text = text[:SHOWN_CHARS]

    def answered(self, request_id: str, results: tuple[Result, ...]) -> None:
        # labels and results are in the order of the calls
        for name, result in zip(self.answers[request_id], results, strict=True):
            self._tool(name).results[result.status] += 1

    def interrupted(self, interrupts: Iterable[Interrupt]) -> None:
        """Count results of asynchronous calls that a running request reads. Markup that called nothing counts as unknown."""
        for interrupt in interrupts:
            label = self._names.of(interrupt.call.name) if interrupt.call.name else UNKNOWN
            self._tool(label).results[interrupt.result.status] += 1

    def ran(self, request: Request, calls: Iterable[Call], results: Iterable[Result]) -> None:
        """Count calls that the server ran after their request had finished."""
        for call, result in zip(calls, results, strict=True):
            label = self._names.of(call.name) if call.name in request.tools else UNKNOWN
            self._tool(label).results[result.status] += 1

    def note_end(self, request_id: str, text: str) -> None:
        if (pause := self.open.get(request_id)) is not None:
            pause.text = text[-SHOWN_CHARS:]

    def counts(self, pause: OpenInterception) -> ToolCounts:
        return self._tool(pause.label)

    def _label(self, call: PendingCall) -> str:
        # metrics are public, so a name that a client can choose is never a label
        if call.kind == "client_tool":
            return CLIENT
        return UNKNOWN if call.kind == "unknown_tool" else self._names.of(call.name)

    def _tool(self, name: str) -> ToolCounts:
        counts = self._tools.get(name)
        if counts is None:
            counts = self._tools[name] = ToolCounts()
        return counts


def _alone(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else SEVERAL
