"""Counts what one engine does, on the engine's own thread: once per step, and once per event. Decides nothing.

It observes the scheduler, is told of every plan with its result and of every step's events, and keeps a sample of the pool
each second. Nothing here is locked: whoever wants to read it asks between two steps (`EngineThread.ask`).
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

from jinfercept.events import Event, Finished, Intercepted, Resumed, Token
from jinfercept.kv.manager import KVManager
from jinfercept.meter.counts import BoundedNames, Counts
from jinfercept.meter.decision import Costs
from jinfercept.meter.pauses import OpenPause, Pauses
from jinfercept.request import RequestOutput
from jinfercept.sched.plan import StepPlan, StepResult
from jinfercept.sched.plan_builder import Planned
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Move
from jinfercept.sched.sequence import Sequence, State

HISTORY_S = 300
"""Seconds of the pool's history, a sample for each."""

NUM_DECISIONS = 1000
"""Decisions that are remembered, of all tenants."""

_MOST_REASONS = 50


class Pages(NamedTuple):
    """Pages by residency; all but the last two are the device's.

    Attributes:
        used: by requests that run.
        claimed_dirty, claimed_clean: of paused contexts, without and with a copy on the host.
        cached: of finished prefixes.
        host, host_free: the host's.
    """

    free: int
    used: int
    claimed_dirty: int
    claimed_clean: int
    cached: int
    host: int
    host_free: int


class PoolSample(NamedTuple):
    """The pool at one moment, and what had been done until then, in tokens."""

    at_s: float
    pages: Pages
    generated: int
    copied_out: int
    copied_in: int
    link_budget: float


@dataclass(slots=True)
class Decided:
    """Moves of one context, of one kind and for one reason, in a row.

    Attributes:
        tenant: whose context it is.
        copied_tokens: to the host.
        freed_pages: of the device.
    """

    at_s: float
    request_id: str
    tenant: str
    tool: str
    state: str
    action: str
    why: str
    copied_tokens: int = 0
    freed_pages: int = 0


@dataclass(slots=True)
class _Times:
    """Of one request: when it first ran, its newest token since it last paused, and its last return."""

    started_s: float
    token_s: float | None = None
    returned: OpenPause | None = None


@final
class EngineStats:
    """An `Observer` and an engine's `observe`, which is told of events too.

    Args:
        now: the engine's clock.
        kv: its pages.
        known: what its policy knows.
        synchronous: steps wait for transfers.

    Attributes:
        counts: what was done.
        running, waiting: sequences by id.
        pauses: who is paused.
        history: the pool's, a sample a second.
        decisions: the last ones, newest last.
    """

    def __init__(self, now: Callable[[], float], kv: KVManager, known: PolicyInputs, *, synchronous: bool) -> None:
        self.now, self.kv, self.known = now, kv, known
        self.costs = Costs(known, synchronous=synchronous)
        self.counts = Counts()
        self.running: dict[str, Sequence] = {}
        self.waiting: dict[str, Sequence] = {}
        self.pauses = Pauses(self.counts.tools, known.estimator)
        self.history: deque[PoolSample] = deque(maxlen=HISTORY_S)
        self.decisions: deque[Decided] = deque(maxlen=NUM_DECISIONS)
        self.last_queries = 0
        self._reasons = BoundedNames(_MOST_REASONS)
        self._times: dict[str, _Times] = {}  # of the requests that ran and are not finished
        self._over: dict[str, _Times] = {}  # finished in this step
        self._entered: list[tuple[Sequence, OpenPause | None]] = []  # run since the last plan
        self._fetching: dict[str, Sequence] = {}  # run, and wait for pages from the host
        self._last_s = self._held_s = now()
        self._paused_pages = 0  # pages, when the last step had ended

    # -- told by the scheduler -------------------------------------------------------------------------------------

    def changed(self, sequence: Sequence) -> None:
        """See `Observer`."""
        now, name, state = self.now(), sequence.id, sequence.state
        self.running.pop(name, None)
        self.waiting.pop(name, None)
        self._fetching.pop(name, None)
        times = self._times.get(name)
        if state is State.RUNNING:
            self.running[name] = sequence
            pause = self.pauses.open.pop(name, None)
            if times is None:
                times = self._times[name] = _Times(now)
            times.returned = pause or times.returned
            self._entered.append((sequence, pause))
        elif state is State.WAITING:
            self.waiting[name] = sequence
            self.pauses.end(sequence, now)
        elif state is State.INTERCEPTED:
            self.pauses.begin(sequence, now)
            if times is not None:
                times.token_s = None
        else:
            self.pauses.leave(sequence)
            if times is not None:
                self._over[name] = self._times.pop(name)

    def moved(self, move: Move, copied_tokens: int, freed: bool) -> None:
        """See `Observer`."""
        sequence, action = move.sequence, move.action.value
        self.counts.moved_pages[action, self._reasons.of(move.why)] += 1
        last = self.decisions[-1] if self.decisions else None
        if last is None or (last.request_id, last.action, last.why) != (sequence.id, action, move.why):
            pause = self.pauses.open.get(sequence.id)
            tool = pause.tool if pause else ""
            last = Decided(self.now(), sequence.id, sequence.tenant, tool, sequence.state.value, action, move.why)
            self.decisions.append(last)
        last.copied_tokens += copied_tokens
        last.freed_pages += freed

    # -- told by the engine ----------------------------------------------------------------------------------------

    def planned(self, planned: Planned, result: StepResult) -> None:
        """A plan has ended: the engine's `observe` hook."""
        counts, plan, now = self.counts, planned.plan, self.now()
        step_s = min(result.elapsed_s, now - self._last_s)  # steps overlap when the next is planned before one is read
        self._last_s = now
        counts.steps[plan.bucket] += 1
        counts.step_s[plan.bucket] = counts.step_s.get(plan.bucket, 0.0) + step_s
        self.last_queries = plan.num_tokens
        if plan.chunks:
            counts.step_tokens.add(self.last_queries)
        self._count_link(plan, step_s)
        if planned.recomputed_tokens:
            self._count_recomputation(planned, step_s)
        if self._entered:
            self._count_entries()
        self._count_tokens(planned, now)
        for sequence in self._fetching.values():
            counts.waste.fetch += len(sequence.context.pages) * self.kv.page_size * step_s

    def told(self, events: Iterable[Event]) -> None:
        """A step has ended, with these events."""
        for event in events:
            if isinstance(event, Token):
                continue
            if isinstance(event, Finished):
                self._finish(event.output)
            elif isinstance(event, Intercepted):
                self.pauses.asked(event.request_id, event.calls)
            elif isinstance(event, Resumed):
                self.pauses.answered(event.request_id, event.results)
        self._over.clear()
        self.pauses.answers.clear()
        now = self.now()
        self._settle(now)
        if not self.history or int(now) != int(self.history[-1].at_s) or not (self.running or self.waiting):
            self._sample(now)

    # -- read between two steps ------------------------------------------------------------------------------------

    def read(self) -> Counts:
        """All counts until now, as a copy."""
        self._settle(self.now())
        return pickle.loads(pickle.dumps(self.counts))  # five times as fast as copy.deepcopy

    def sample(self) -> PoolSample:
        """The pool as it is now."""
        counts = self.counts
        return PoolSample(
            self.now(), self.pages(), counts.generated, counts.copied_out, counts.copied_in, counts.link_budget
        )

    def pages(self) -> Pages:
        """The pools by residency."""
        store = self.kv.store
        occupancy, clean, host = store.occupancy(), store.num_paused_clean, store.num_host_used
        dirty = occupancy.paused - clean
        return Pages(occupancy.free, occupancy.used, dirty, clean, occupancy.cached, host, store.num_host_pages - host)

    # -- the parts -------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Account for what paused contexts have held since the last step, in idle seconds too."""
        self.counts.waste.preserve += self._paused_pages * self.kv.page_size * (now - self._held_s)
        self._held_s, self._paused_pages = now, self.kv.store.num_paused

    def _count_link(self, plan: StepPlan, step_s: float) -> None:
        counts, size = self.counts, self.kv.page_size
        counts.link_budget += self.known.cost.link_tokens(step_s)
        if plan.offload or plan.fetch:
            counts.copied_out += len(plan.offload) * size
            counts.copied_in += len(plan.fetch) * size
            if plan.chunks:
                counts.waste.stall += self._used() * min(step_s, self.costs.stall_s(plan))

    def _count_recomputation(self, planned: Planned, step_s: float) -> None:
        recomputed = planned.recomputed_tokens
        growth_s = min(step_s, self.costs.growth_s(planned.plan.num_tokens, recomputed))
        own = sum([len(sequence.context.pages) for sequence in planned.recomputing]) * self.kv.page_size
        self.counts.waste.recompute += self._used() * growth_s + own * (step_s - growth_s)

    def _used(self) -> int:
        """Tokens that the pages of the running requests have room for."""
        return self.kv.store.occupancy().used * self.kv.page_size

    def _count_entries(self) -> None:
        """Where the contexts were of those who have begun to run, or run again."""
        for sequence, pause in self._entered:
            found = sequence.found
            if sequence.state is State.RUNNING and found.host:
                self._fetching[sequence.id] = sequence
            if pause is not None:
                tool = self.pauses.counts(pause)
                tool.kept += found.device
                tool.copied_in += found.host
                tool.recomputed += found.missing
        self._entered.clear()

    def _count_tokens(self, planned: Planned, now: float) -> None:
        """The tokens that were sampled, and how long each took."""
        counts, times_of, since_s, same = self.counts, self._times, now, 0
        for sequence, epoch in planned.sampled:
            if sequence.epoch != epoch:
                continue
            counts.generated += 1
            self._fetching.pop(sequence.id, None)
            times = times_of[sequence.id]
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
        """The first token of all, or the first after a pause."""
        if not sequence.generated:
            self.counts.first_token_s.add(now - sequence.arrival_s)
            self.counts.prompt += sequence.external_spans[0][1]
            self.counts.cached += sequence.num_cached or 0
        if times.returned is not None and times.returned.returned_s is not None:
            self.pauses.counts(times.returned).resume_s.add(now - times.returned.returned_s)
        times.returned = None

    def _finish(self, output: RequestOutput) -> None:
        completion, times, counts = output.outputs[0], output.metrics, self.counts
        reason = completion.finish_reason
        counts.finished[reason] += 1
        self.pauses.keep(output.request_id, completion.text)
        own = self._over.pop(output.request_id, None) or self._times.pop(output.request_id, None)
        counts.request_s.add(times.finished_s - times.arrival_s)
        if own is None or times.first_token_s is None:
            return
        decode_s = times.finished_s - times.first_token_s - times.intercepted_s
        counts.queued_s.add(own.started_s - times.arrival_s)
        counts.prefill_s.add(times.first_token_s - own.started_s)
        counts.decode_s.add(decode_s)
        counts.request_prompt.add(len(output.prompt_token_ids))
        counts.request_generated.add(completion.num_generated)
        if completion.num_generated > 1:
            counts.mean_token_s.add(decode_s / (completion.num_generated - 1))

    def _sample(self, now: float) -> None:
        if self.history and int(self.history[-1].at_s) == int(now):
            self.history.pop()
        self.history.append(self.sample())
