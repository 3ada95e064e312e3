"""Counts what one engine does: a fold over its `RequestLog`, which samples the pool once a second as well.

Nothing is locked: readers run between two steps (`EngineThread.ask`).
"""

import pickle
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

from jinfercept.calls import Call, Result
from jinfercept.engine.meter.counts import LIMITS, BoundedNames, EngineCounts, ToolCounts
from jinfercept.engine.meter.ledger import Ledger, Prices
from jinfercept.engine.meter.request_log import (
    Ended,
    LogEvent,
    Moved,
    Passed,
    Paused,
    Queued,
    RequestLog,
    Started,
    Stepped,
)
from jinfercept.events import Finished, Intercepted, Interrupted, Resumed, Token
from jinfercept.kv.manager import KVManager
from jinfercept.outputs import Interrupt, RequestOutput
from jinfercept.request import Request
from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policies import PolicyInputs
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


HISTORY_S = 300
"""Seconds of the pool's history, with a sample for each."""

_MOST_REASONS = 50


class Pages(NamedTuple):
    """Pages by residency. All but the last two are device pages."""

    free: int
    used: int  # pages of running contexts
    claimed_dirty: int  # pages of paused contexts only, without a copy on the host
    claimed_clean: int  # likewise, with a copy on the host
    cached: int  # pages of finished prefixes
    host: int
    host_free: int


class PoolSample(NamedTuple):
    """The pool at a second of the engine's clock, and totals until then: tokens, turns, seconds of their delays."""

    at_s: float
    pages: Pages
    generated: int
    copied_out: int
    copied_in: int
    link_budget: float
    turns: int
    good_turns: int
    turn_delay_s: float


@dataclass(slots=True)
class DecisionEntry:
    """Consecutive moves of one context with one action and one reason."""

    at_s: float  # of the first move, by the engine's clock
    request_id: str
    tenant: str
    tool: str
    state: str
    action: str
    why: str
    copied_tokens: int = 0  # to the host
    freed_pages: int = 0  # of the device


class _WrittenTurn(NamedTuple):
    delay_s: float
    first_s: float  # when the first token came
    new: int  # tokens that the turn adds to what the conversation had
    generated: int  # tokens that the request had generated before


@dataclass(slots=True)
class _Times:
    started_s: float
    token_s: float | None = None  # of the newest token since the last pause
    returned: OpenInterception | None = None
    turn: _WrittenTurn | None = None


@final
class EngineStats:
    """Totals, histograms and the present state of one engine.

    Args:
        synchronous: steps wait for transfers.
        num_decisions: latest decisions that are stored, of all tenants; None: all.
        unfinished: requests that the engine has already.
    """

    def __init__(
        self,
        log: RequestLog,
        kv: KVManager,
        inputs: PolicyInputs,
        *,
        synchronous: bool,
        num_decisions: int | None = 1000,
        unfinished: Iterable[Sequence] = (),
    ) -> None:
        self.now, self.kv, self.inputs = log.now, kv, inputs
        self.running, self.waiting = log.running, log.waiting
        self.at_door: list[Sequence] = []  # in the order in which they come in
        prices = Prices(inputs.cost, kv.page_size, synchronous=synchronous)
        self._ledger = Ledger(kv, prices, self.running.values(), log.now())
        self.counts = EngineCounts(waste=self._ledger.waste)
        self.interceptions = InterceptionStats(self.counts.tools, inputs.estimator)
        self.history: deque[PoolSample] = deque(maxlen=HISTORY_S)  # one sample a second
        self.decisions: deque[DecisionEntry] = deque(maxlen=num_decisions)
        self.last_queries = 0  # query tokens of the last step
        self._reasons = BoundedNames(_MOST_REASONS)
        self._times: dict[str, _Times] = {}  # of the requests that ran and are not finished
        self._over: dict[str, _Times] = {}  # finished in this step
        self._entered: list[tuple[Sequence, OpenInterception | None]] = []  # run since the last plan
        log.tell(self.fold, unfinished)

    def fold(self, event: LogEvent) -> None:
        match event:
            case Stepped():
                self._step(event)
            case Passed():
                self._pass(event)
            case Moved():
                self._move(event)
            case Started(now, sequence):
                pause = self.interceptions.open.pop(sequence.id, None)
                times = self._times.setdefault(sequence.id, _Times(now))
                times.returned = pause or times.returned
                self._entered.append((sequence, pause))
            case Queued(now, sequence):
                if event.because == "returned":
                    self.interceptions.end(sequence, now)
            case Paused(now, sequence):
                self.interceptions.begin(sequence, now)
                if (times := self._times.get(sequence.id)) is not None:
                    self._end_turn(sequence, times)
                    times.token_s = None
            case Ended(_, sequence):
                self.interceptions.leave(sequence)
                if (times := self._times.pop(sequence.id, None)) is not None:
                    self._end_turn(sequence, times)
                    self._over[sequence.id] = times

    def _move(self, event: Moved) -> None:
        move = event.move
        sequence, action = move.sequence, move.action.value
        self.counts.moved_pages[action, self._reasons.of(move.why)] += event.run.num_pages
        last = self.decisions[-1] if self.decisions else None
        if last is None or (last.request_id, last.action, last.why) != (sequence.id, action, move.why):
            pause = self.interceptions.open.get(sequence.id)
            tool = pause.tool if pause else ""
            last = DecisionEntry(event.at_s, sequence.id, sequence.tenant, tool, sequence.state.value, action, move.why)
            self.decisions.append(last)
        last.copied_tokens += event.copied_tokens
        last.freed_pages += event.freed

    def _step(self, event: Stepped) -> None:
        counts, planned, now = self.counts, event.planned, event.at_s
        plan = planned.plan
        seconds = self._ledger.step(planned, event.result, now)
        step_s = seconds.total_s
        counts.steps[plan.bucket] += 1
        counts.step_s[plan.bucket] = counts.step_s.get(plan.bucket, 0.0) + step_s
        self.last_queries = plan.num_tokens
        if plan.chunks:
            counts.step_tokens.add(self.last_queries)
        counts.link_budget += self.inputs.cost.link_tokens(step_s)
        counts.copied_out += len(plan.offload) * self.kv.page_size
        counts.copied_in += len(plan.fetch) * self.kv.page_size
        for sequence, pause in self._entered:
            if pause is not None:  # an interception has ended: where its context was
                tool, residency = self.interceptions.counts(pause), sequence.usage.residency
                tool.kept += residency.device
                tool.copied_in += residency.host
                tool.recomputed += residency.missing
        self._entered.clear()
        self._count_tokens(planned, now)

    def _pass(self, passed: Passed) -> None:
        for event in passed.events:
            if isinstance(event, Token):
                self.counts.generated += 1
                continue
            if isinstance(event, Finished):
                self._finish(event.output)
            elif isinstance(event, Intercepted):
                self.interceptions.note_calls(event.request_id, event.calls)
            elif isinstance(event, Interrupted) or (isinstance(event, Resumed) and event.interrupts):
                self.interceptions.interrupted(event.interrupts)
            elif isinstance(event, Resumed):
                self.interceptions.answered(event.request_id, event.results)
        self._over.clear()
        self.interceptions.answers.clear()
        now = passed.at_s
        self._ledger.settle(now)
        sampled = bool(self.history) and int(now) == int(self.history[-1].at_s)  # in this second
        if not sampled or not (self.running or self.waiting):
            if sampled:
                self.history.pop()
            self.history.append(self.sample())

    # -- read between two steps ------------------------------------------------------------------------------------

    def read(self) -> EngineCounts:
        """A copy of all counts until now."""
        self._ledger.settle(self.now())
        return pickle.loads(pickle.dumps(self.counts))  # five times as fast as copy.deepcopy

    def sample(self) -> PoolSample:
        counts = self.counts
        return PoolSample(
            self.now(),
            self.pages(),
            counts.generated,
            counts.copied_out,
            counts.copied_in,
            counts.link_budget,
            counts.turns.total(),
            counts.turns[True],
            counts.turn_delay_s.total,
        )

    def pages(self) -> Pages:
        free, used, paused, cached, _, host, host_total = self.kv.occupancy()
        clean = self.kv.num_paused_clean
        return Pages(free, used, paused - clean, clean, cached, host, host_total - host)

    # -- the parts -------------------------------------------------------------------------------------------------

    def _count_tokens(self, planned: PlannedStep, now: float) -> None:
        # One entry per step, as in vLLM, also for several tokens.
        counts, times_of, since_s, same = self.counts, self._times, now, 0
        for sequence, epoch, *_ in planned.sampled:
            if sequence.epoch != epoch or (times := times_of.get(sequence.id)) is None:
                continue
            last_s, times.token_s = times.token_s, now
            if last_s is None:
                self._count_first(sequence, times, now)
            elif last_s == since_s:  # as for most of them
                same += 1
            else:
                if same:
                    counts.token_s.add(now - since_s, same)
                since_s, same = last_s, 1
        if same:
            counts.token_s.add(now - since_s, same)

    def _count_first(self, sequence: Sequence, times: _Times, now: float) -> None:
        start, end = sequence.external_spans[-1]
        submitted_s, new = None, end - start
        if times.returned is not None and (submitted_s := times.returned.returned_s) is not None:
            self.interceptions.counts(times.returned).resume_s.add(now - submitted_s)
        if not sequence.generated:
            submitted_s, new = sequence.arrival_s + sequence.door_s, new - sum(sequence.usage.retained or ())
            self.counts.first_token_s.add(now - sequence.arrival_s)
            if sequence.door_s:
                self.counts.door_s.add(sequence.door_s)
            self.counts.prompt += sequence.external_spans[0][1]
            self.counts.cached += sequence.usage.num_cached or 0
        times.returned = None
        if submitted_s is not None:
            times.turn = _WrittenTurn(now - submitted_s, now, new, sequence.generated)

    def _end_turn(self, sequence: Sequence, times: _Times) -> None:
        turn, times.turn = times.turn, None
        if turn is not None:
            self.counts.turn_delay_s.add(turn.delay_s)
            rest_s = (turn.first_s if times.token_s is None else times.token_s) - turn.first_s
            self.counts.turns[LIMITS.keeps(turn.delay_s, turn.new, rest_s, sequence.generated - turn.generated)] += 1

    def _finish(self, output: RequestOutput) -> None:
        completion, times, counts = output.outputs[0], output.metrics, self.counts
        reason = completion.finish_reason
        counts.finished["stop" if reason == "tool_calls" else reason] += 1
        self.interceptions.note_end(output.request_id, completion.text)
        own = self._over.get(output.request_id) or self._times.pop(output.request_id, None)
        counts.request_s.add(times.finished_s - times.arrival_s)
        if own is None or times.first_token_s is None:
            return
        decode_s = times.finished_s - times.first_token_s - times.intercepted_s
        counts.queued_s.add(own.started_s - times.arrival_s)
        counts.prefill_s.add(times.first_token_s - own.started_s)
        counts.decode_s.add(decode_s)
        counts.request_prompt.add(len(output.prompt_tokens))
        counts.request_generated.add(completion.num_generated)
        if completion.num_generated > 1:
            counts.mean_token_s.add(decode_s / (completion.num_generated - 1))
