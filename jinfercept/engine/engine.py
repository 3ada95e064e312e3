"""The loop: poll returns, plan, run, apply, detect calls. Knows requests and tokens; no JAX, no asyncio, no policy.

At depth 0 the result of a plan is read before the next plan is made; at depth 1 it is read after the next plan was submitted,
so that the device never waits for the host. A call or an end that is detected late costs one sample, which is thrown away;
the token that was its input keeps its KV. What a constrained request may draw depends on its last token: a plan that draws for
one reads the plan before it while it computes.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from jinfercept.engine.admission import check_request
from jinfercept.engine.clock import Clock
from jinfercept.engine.ports import Endpoints, Runner
from jinfercept.engine.retained_contexts import RetainedContexts
from jinfercept.engine.session import Session, Text
from jinfercept.errors import RequestError, describe_failure
from jinfercept.events import Event, Finished, Intercepted, Resumed, Token
from jinfercept.intercept.rendering import render_each
from jinfercept.request import Call, FinishReason, Interception, Request, Result
from jinfercept.sched.plan import Masks, StepResult, TokenLogprobs
from jinfercept.sched.plan_builder import Planned
from jinfercept.sched.sampling_options import draw_options
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import CallDuration, Sequence, State

log = logging.getLogger(__name__)

MAX_IDLE_S = 1.0
"""Longest wait between two polls when nothing can run."""


class Engine:
    """Serves requests on one runner. One thread calls `step`; `submit` and `abort` may be called from any.

    Args:
        scheduler: makes the plans.
        runner: executes them.
        endpoints: answers calls.
        clock: what time it is.
        wake: set by `endpoints` when a result is there, to end an idle wait.
        depth: 0, or 1 to plan a step before the last one's tokens are read.
        vocab_size: token ids are below it.
        eos_token_ids: end-of-text tokens.
        open_text: makes a request's text, or None for a model without a tokenizer.
        encode: text of a result to token ids; None without a tokenizer.
        seed: from which requests without a seed of their own get one.
        check: assert the conservation of pages after every step.
        observe: told of every plan once its result is there.

    Attributes:
        failure: what a step raised that could not be recovered from: the engine cannot go on. None while it can.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        endpoints: Endpoints,
        clock: Clock,
        wake: threading.Event,
        *,
        depth: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        open_text: Callable[[Request], Text] | None = None,
        encode: Callable[[str], list[int]] | None = None,
        seed: int = 0,
        check: bool = False,
        observe: Callable[[Planned, StepResult], None] | None = None,
    ) -> None:
        self._observe = observe
        self.failure: BaseException | None = None
        self.scheduler = scheduler
        self._runner = runner
        self.wake = wake
        self._endpoints = endpoints
        self._clock = clock
        self._depth = depth
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._open_text = open_text
        self._encode = encode
        self._seed = seed
        self._check = check
        self._inbox: deque[Request | str] = deque()
        self._retained = RetainedContexts(scheduler)
        self._settled = True
        self._ids: dict[str, object] = {}
        self._sessions: dict[str, Session] = {}
        self._constrained: dict[str, Session] = {}  # those of them that have a constraint
        self._in_flight: deque[tuple[Planned, object]] = deque()
        self._num_requests = 0

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if it can never be served."""
        check_request(request, self._vocab_size, self.scheduler.max_model_len)
        mark = object()
        if self._ids.setdefault(request.id, mark) is not mark:  # atomic: two threads may submit one id
            raise RequestError("a request of this id is not finished", got=request.id, fix="use another id")
        self._inbox.append(request)
        self.wake.set()

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; an id that is not there is ignored."""
        self._inbox.append(request_id)
        self.wake.set()

    @property
    def num_retained(self) -> int:
        """Contexts of finished requests that somebody is expected to go on from."""
        return len(self._retained)

    @property
    def num_waiting(self) -> int:
        """Requests and aborts that were not taken in yet, and requests that wait for their turn, a first or another one."""
        return len(self._inbox) + len(self.scheduler.waiting)

    def num_waiting_by_tenant(self, tenants: Iterable[str]) -> dict[str, int]:
        """The requests that wait for their turn, of each of these tenants; 0 for one that has none."""
        waiting = Counter(item.tenant for item in tuple(self._inbox) if isinstance(item, Request))
        return {tenant: waiting[tenant] + self.scheduler.num_waiting_of(tenant) for tenant in tenants}

    # -- from the engine's thread ----------------------------------------------------------------------------------

    def release(self, request_id: str) -> None:
        """Nobody goes on from a finished request: its context is kept no more. One that is not kept is ignored."""
        self._retained.drop(request_id, self._clock.now())

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._sessions or self._inbox)

    @property
    def settled(self) -> bool:
        """Whether another step would move nothing, as far as is known, once nobody is served any more."""
        return self._settled

    def step(self) -> list[Event]:
        """One iteration. Returns what happened, in order; waits only if there is nothing to do before a call returns."""
        events: list[Event] = []
        try:
            self._poll(events)
            self._retained.look(self._clock.now())
            planned = self.scheduler.plan(self._clock.now())
            self._settled = not planned.plan
            if planned.plan:
                ticket = self._runner.submit(planned.plan, self._masks(planned, events) if self._constrained else None)
                self._in_flight.append((planned, ticket))
            if self._in_flight and (len(self._in_flight) > self._depth or not planned.plan):
                self._collect(events)
            elif not planned.plan and not events and self._sessions:
                self._idle()
        except BaseException as error:  # an interrupt too may leave pages that were planned and never computed
            self.failure = error
            self._fail(error, events)  # what it raises leaves the engine as it is, in pieces
            self.failure = None
            if not isinstance(error, Exception):
                raise
            log.exception("a step failed; all requests in the engine are lost")
        if self._check:
            self.scheduler.kv.check([sequence.context for sequence in self.scheduler.unfinished])
        return events

    def close(self) -> None:
        """Give up every request."""
        for session in list(self._sessions.values()):
            self._finish(session, "abort", None, [])
        self._retained.clear(self._clock.now())
        self._inbox.clear()
        self._ids.clear()
        while self._in_flight:
            self._runner.collect(self._in_flight.popleft()[1])

    # -- the parts of a step ---------------------------------------------------------------------------------------

    def _poll(self, events: list[Event]) -> None:
        """Take in what arrived: requests, aborts, results of calls."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._open(item, events)
            elif item in self._sessions:
                self._finish(self._sessions[item], "abort", None, events)
        for request_id, results in self._endpoints.poll():
            self._resume(self._sessions[request_id], results, events)

    def _open(self, request: Request, events: list[Event]) -> None:
        self._retained.drop(request.id, self._clock.now())  # one of the same name
        params, number = request.params, self._num_requests
        self._num_requests += 1
        seed = params.seed if params.seed is not None else self._seed * 1_000_003 + number
        stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        leader = self._sessions.get(request.leader) if request.leader else None
        sequence = Sequence(
            request.id,
            list(request.prompt_token_ids),
            self.scheduler.kv.open(request.cache_salt),
            max_tokens=self.scheduler.max_model_len if params.max_tokens is None else params.max_tokens,
            temperature=params.temperature,
            seed=seed & 0xFFFFFFFF,
            arrival_s=self._clock.now(),
            options=draw_options(params, stop),
            num_best=params.prompt_logprobs,
            leader=leader.sequence if leader else None,
            priority=request.priority,
            tenant=request.tenant,
        )
        session = self._sessions[request.id] = Session(request, sequence, stop)
        if not self._retained.follow(request, sequence, self._clock.now()):
            self.scheduler.add(sequence)
        try:
            session.text = self._open_text(request) if self._open_text else None
            session.watch = request.detector.watch() if request.detector else None
            if request.grammar is not None:
                session.constraint = request.grammar.constrain(stop)
                self._constrained[request.id] = session
        except Exception as error:  # a detector is the user's: what it raises ends its request and no other
            self._finish(session, "error", describe_failure(error), events)

    def _masks(self, planned: Planned, events: list[Event]) -> Masks | None:
        """What the plan's constrained rows may draw; None if there are none.

        Their constraints go on from their last tokens, so the plan before this one is read first: while this one computes.
        """
        rows = [
            (row, session, epoch)
            for row, (sequence, epoch) in enumerate(planned.sampled)
            if (session := self._constrained.get(sequence.id))
        ]

        def masks() -> dict[int, Any]:
            while self._in_flight:
                self._collect(events)
            return {
                row: words
                for row, session, epoch in rows
                if session.sequence.epoch == epoch and (words := self._allowed(session, events)) is not None
            }

        return masks if rows else None

    def _allowed(self, session: Session, events: list[Event]) -> Any | None:
        """What a constrained request may draw; None if it had to end."""
        assert session.constraint is not None
        try:
            words = session.constraint.allowed()
        except Exception as error:  # what cannot go on ends its request and no other
            self._finish(session, "error", describe_failure(error), events)
            return None
        if session.complete:
            self._finish(session, "stop", None, events)
            return None
        return words

    def _collect(self, events: list[Event]) -> None:
        """Read the oldest plan in flight."""
        planned, ticket = self._in_flight.popleft()
        result = self._runner.collect(ticket)
        if self._observe is not None:
            self._observe(planned, result)
        self._apply(planned, result, events)

    def _apply(self, planned: Planned, result: StepResult, events: list[Event]) -> None:
        """Hand every sampled token to its sequence, unless the sequence has paused or ended since."""
        now = self._clock.now()
        for (sequence, epoch), scores in zip(planned.scored, result.scores, strict=False):
            if sequence.epoch == epoch:
                self._sessions[sequence.id].note_scores(scores)
        reports = result.logprobs or (None,) * len(result.tokens)
        for (sequence, epoch), token, report in zip(planned.sampled, result.tokens, reports, strict=True):
            if sequence.epoch == epoch:
                self.scheduler.accept(sequence, token)
                self._accept(self._sessions[sequence.id], token, report, now, events)

    def _accept(
        self, session: Session, token: int, report: TokenLogprobs | None, now: float, events: list[Event]
    ) -> None:
        sequence, text = session.sequence, session.text
        if session.first_token_s is None:
            session.first_token_s = now
        if session.resumed:
            session.note_context()
        session.stream.append(token)
        shown = text.add(token) if text is not None else ""
        logprobs = None if report is None else session.note_logprobs(token, report)
        events.append(Token(sequence.id, token, shown, logprobs))
        calls: tuple[Call, ...] = ()
        if session.watch is not None or session.constraint is not None:
            try:
                calls = session.watched(token)
                if session.constraint is not None:
                    session.constraint.accept(token)
            except Exception as error:  # see `_open`
                self._finish(session, "error", describe_failure(error), events)
                return
        if token in session.stop_token_ids and (  # of itself, a turn that calls is not the last one
            not calls or token in (session.request.params.stop_token_ids or ())
        ):
            self._finish(session, "stop", None if token in self._eos_token_ids else token, events)
        elif text is not None and text.stopped is not None:
            self._finish(session, "stop", text.stopped, events)
        elif session.constraint is not None and session.complete and not calls:
            self._finish(session, "stop", None, events)
        elif sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= self.scheduler.max_model_len:
            self._finish(session, "length", None, events)
        elif calls:
            self._intercept(session, calls, now, events)

    def _intercept(self, session: Session, calls: tuple[Call, ...], now: float, events: list[Event]) -> None:
        session.interceptions.append(Interception(calls))
        number = len(session.interceptions)
        pending = tuple(
            session.pending(call, (session.request.id, number, index), call.expected_s)
            for index, call in enumerate(calls)
        )
        self.scheduler.intercept(session.sequence, now, pending)
        if session.request.grammar and session.constraint and session.constraint.ended:
            session.constraint = session.request.grammar.constrain(session.stop_token_ids)
            if session.constraint is None:
                del self._constrained[session.request.id]
        self._endpoints.call(session.request.id, calls, session.request.tools)
        events.append(Intercepted(session.request.id, calls))

    def _resume(self, session: Session, results: tuple[Result, ...], events: list[Event]) -> None:
        """Append what the calls returned, cut to what there is room for, and queue the request again."""
        sequence = session.sequence
        pause = session.interceptions[-1]
        room = self.scheduler.max_model_len - len(sequence.tokens) - 1
        renderer, tools = session.request.render, session.request.tools
        try:
            if renderer is not None:
                tokens, kept = renderer.render(pause.calls, results, room)
            else:
                tokens, kept = render_each(pause.calls, results, tools, room, self._vocab_size, self._encode)
        except Exception as error:  # see `_open`
            self._finish(session, "error", describe_failure(error), events)
            return
        start = len(session.stream)
        session.stream += tokens
        session.logprobs += [None] * len(tokens)
        waited_s = self._clock.now() - sequence.paused_s
        session.resumed = True
        session.interceptions[-1] = Interception(
            pause.calls,
            kept,
            (start, start + len(tokens)),
            min(waited_s, max(result.duration_s for result in results) or waited_s),  # not until the engine noticed
        )
        shown = session.text.inject(tokens) if session.text else ""
        ended = tuple(
            CallDuration(result.duration_s, result.status not in ("timeout", "unknown_tool")) for result in results
        )
        self.scheduler.resume(sequence, tokens, ended)
        events.append(Resumed(session.request.id, kept, tuple(tokens), shown))

    def _finish(
        self,
        session: Session,
        reason: FinishReason,
        stop: str | int | None,
        events: list[Event],
        failure: BaseException | None = None,
    ) -> None:
        request, sequence, now = session.request, session.sequence, self._clock.now()
        paused_s = now - sequence.paused_s if sequence.state is State.INTERCEPTED else 0.0
        self._endpoints.cancel(request.id)
        self._settled = False
        if reason not in ("stop", "length") or not self._retained.keep(session, now):
            self.scheduler.finish(sequence, now)
        del self._sessions[request.id]
        self._constrained.pop(request.id, None)
        self._ids.pop(request.id, None)
        rest = session.text.finish() if session.text else ""
        done = session.output(reason, stop, now, paused_s)
        events.append(Finished(request.id, done, rest, failure))

    def _fail(self, error: BaseException, events: list[Event]) -> None:
        """A step failed: what is in the engine is lost and says so; the pages are forgotten, and the engine goes on."""
        self._in_flight.clear()
        for session in list(self._sessions.values()):
            self._finish(session, "error", describe_failure(error), events, error)
        self._retained.clear(self._clock.now())
        self.scheduler.kv.store.begin()
        self.scheduler.kv.store.clear()
        self.scheduler.kv.store.drain_dropped()
        self._runner.reset()

    def _idle(self) -> None:
        """Nothing can be done before a call returns or a request arrives."""
        assert not self.scheduler.running or not self.has_work, "requests run and nothing can be planned"
        assert not self.scheduler.waiting, "requests wait and nothing can be planned"
        deadline = self._endpoints.next_s()
        timeout_s = MAX_IDLE_S if deadline is None else max(0.0, min(MAX_IDLE_S, deadline - self._clock.now()))
        self._clock.wait(self.wake, timeout_s)
