"""Takes every request through its states: open, sampled token by token, intercepted, resumed, finished.

Knows requests, tokens and results of calls; no order of plans and no runner.
"""

import logging
from collections.abc import Callable, Iterable
from itertools import count
from math import inf
from typing import Any, final

from jinfercept.calls import Call, Result
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.async_calls import AsyncCallQueue
from jinfercept.engine.dispatcher import CallDispatcher, Clock, lasted_s
from jinfercept.engine.rendering import render_each
from jinfercept.engine.retained_contexts import RetainedContexts
from jinfercept.engine.session import Session, draw_failure, lost_output, new_session, request_key
from jinfercept.errors import RequestError, describe_failure, is_users_interrupt
from jinfercept.events import Event, Finished, Intercepted, Resumed, Token
from jinfercept.hooks import Text
from jinfercept.outputs import CompletionOutput, FinishReason, Interception, Interrupt
from jinfercept.request import Request
from jinfercept.sampling_params import check_vocabulary
from jinfercept.sched.plan import Masks, StepResult, TokenLogprobs
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import CallDuration, PendingCall, State
from jinfercept.sched.speculation import kept


def check_request(request: Request, vocab_size: int, max_model_len: int, *, returns_experts: bool = True) -> None:
    """Raise `RequestError` if the request can never be served."""
    prompt, limit = request.prompt_token_ids, max_model_len
    if not prompt:
        raise RequestError("a prompt needs at least one token", got="none", fix="give a text or token ids")
    if len(prompt) >= limit:
        raise RequestError(
            f"the prompt leaves no room in the {limit} tokens of a sequence",
            got=f"{len(prompt)} tokens",
            fix="shorten it, or raise max_model_len and kv_tokens",
        )
    are_valid = request.ids_below is not None and request.ids_below <= vocab_size
    wrong = (
        [] if are_valid else [token for token in prompt if not isinstance(token, int) or not 0 <= token < vocab_size]
    )
    if wrong:
        raise RequestError(
            f"token ids are whole numbers from 0 to {vocab_size - 1}", got=wrong[0], fix="check the tokenizer"
        )
    check_vocabulary(request.params, vocab_size)
    if not 0.0 < request.weight < inf:
        raise RequestError("a tenant's weight is a finite number above 0", got=request.weight, fix="1 is the usual one")
    if request.params.return_routed_experts and not returns_experts:
        raise RequestError(
            "the engine does not record which experts computed a token",
            got="return_routed_experts=True",
            fix="start it with enable_return_routed_experts=True",
        )
    if request.params.n > 1:
        raise RequestError("an engine request has one output", got=f"n={request.params.n}", fix="submit forks(request)")
    if request.params.structured_outputs is not None and request.grammar is None:
        raise RequestError("structured outputs need a compiled grammar", got="none", fix="set Request.grammar")
    if request.params.allowed_token_ids is not None and request.grammar is not None:
        raise RequestError(
            "allowed_token_ids cannot be combined with a grammar",
            got=f"{len(request.params.allowed_token_ids)} tokens, and structured_outputs or a tool_choice",
            fix="leave out one of them; a grammar can say which characters may come",
        )


log = logging.getLogger(__name__)


@final
class RequestLifecycle:
    """The unfinished requests of one engine, and the retained contexts of finished ones.

    Only the engine's thread uses it, except for `reserve`. An exception of a user's detector, grammar or renderer, or a failed
    draw, ends only the request that it belongs to, with the reason "error".

    Args:
        clock: monotonic seconds; a simulator's is virtual.
        open_text, encode: None for a model without a tokenizer.
        seed: for requests without a seed, each of which draws independently.
        retained: None: none yet, with the default limits.
        adapters: None: there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        dispatcher: CallDispatcher,
        clock: Clock,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        open_text: Callable[[Request], Text] | None = None,
        encode: Callable[[str], list[int]] | None = None,
        seed: int = 0,
        retained: RetainedContexts | None = None,
        adapters: AdapterTable | None = None,
        returns_experts: bool = False,
    ) -> None:
        self.scheduler, self.dispatcher, self.clock = scheduler, dispatcher, clock
        self.retained = RetainedContexts(scheduler) if retained is None else retained
        self._adapters = AdapterTable() if adapters is None else adapters
        self._vocab_size, self._returns_experts = vocab_size, returns_experts
        self._eos_token_ids = frozenset(eos_token_ids)
        self._open_text, self._encode = open_text, encode
        self._seed, self._numbers = seed, count()
        # `weights_version` changes only while no plan is in flight
        self.num_finished = self.weights_version = 0
        self.events: list[Event] = []  # not taken yet; the list stays the same
        self._ids: dict[str, object] = {}  # of requests that are reserved or open
        self._sessions: dict[str, Session] = {}
        self._with_grammar: dict[str, Session] = {}  # those of them whose tokens a grammar allows

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sessions

    def reserve(self, request: Request) -> None:
        """Take a request's id and its adapter until it finishes. May be called from any thread.

        Raises:
            RequestError: it can never be served, its id is taken, or its adapter is not there any more.
        """
        check_request(request, self._vocab_size, self.scheduler.max_model_len, returns_experts=self._returns_experts)
        mark = object()
        if self._ids.setdefault(request.id, mark) is not mark:  # atomic: two threads may submit one id
            raise RequestError("an unfinished request already has this id", got=request.id, fix="use another id")
        if request.adapter is not None:
            try:
                self._adapters.hold(request.id, request.adapter)
            except RequestError:
                del self._ids[request.id]
                raise

    def _release(self, request: Request) -> None:
        if request.adapter is not None:
            self._adapters.release(request.id)
        self._ids.pop(request.id, None)

    def open(self, request: Request) -> None:
        """Queue a request, on a retained context if it follows one. It ends at once if it cannot be queued."""
        leader = self._sessions.get(request.leader) if request.leader else None
        try:
            key, now = request_key(request, self._seed, next(self._numbers)), self.clock.now()
            session = new_session(request, self.scheduler, key, now, self._eos_token_ids, leader)
        except BaseException as error:
            self._lose(request, error)
            return
        sequence = session.sequence
        self._sessions[request.id] = session
        if not (self.retained.groups and self.retained.extend(request, sequence, now)):
            begins = request.follow_up is not None and request.continues is None
            self.scheduler.add(sequence, at_door=now if begins else None)
        try:
            session.open_readers(self._open_text)
            if session.constraint is not None:
                self._with_grammar[request.id] = session
            if request.markup is not None:
                session.async_calls = AsyncCallQueue(session, request.markup, self)
            if request.continues is not None:
                self._read_again(session, request.continues)
        except BaseException as error:
            self._fail_by_own_code(session, error)

    def _lose(self, request: Request, error: BaseException) -> None:
        self._release(request)
        if is_users_interrupt(error):
            raise error
        self.num_finished += 1
        lost = lost_output(request, describe_failure(error), self.clock.now())
        self.events.append(Finished(request.id, lost, ""))

    def _read_again(self, session: Session, continues: CompletionOutput) -> None:
        calls, unread = session.read_again(continues)
        if unread and session.async_calls is not None:
            session.async_calls.begin_again(unread, {call.id for call in calls}, self.clock.now())
        elif calls:
            self._intercept(session, calls, self.clock.now())

    def abort(self, request_id: str) -> None:
        """End a request in any state. Unknown ids are ignored."""
        session = self._sessions.get(request_id)
        if session is not None:
            self._finish(session, "abort", None)

    def end_all(self, reason: FinishReason, failure: BaseException | None) -> None:
        """End every open request."""
        stop = describe_failure(failure) if failure is not None else None
        for session in list(self._sessions.values()):
            self._finish(session, reason, stop, failure)

    def close(self) -> None:
        """Abort every open request, and forget the ids of those that were never opened."""
        self.end_all("abort", None)
        for request_id in [*self._ids]:
            self._adapters.release(request_id)
        self._ids.clear()

    # -- tokens ----------------------------------------------------------------------------------------------------

    def awaits_masks(self, planned: PlannedStep) -> bool:
        """Whether a plan samples for a request whose tokens a grammar allows."""
        return bool(self._with_grammar) and any(row.sequence.id in self._with_grammar for row in planned.sampled)

    def masks(self, planned: PlannedStep) -> Masks:
        """The masks of the plan's constrained rows. Every token sampled before must have been applied.

        A request whose constraint raises or allows nothing more finishes here. Its row is not masked, and its sample is void.
        """
        masks = {}
        for row in planned.sampled:
            session = self._with_grammar.get(row.sequence.id)
            if session is None or session.constraint is None or row.sequence.epoch != row.epoch:
                continue
            words = self._allowed(session)
            if words is not None:
                masks[row.place] = words
                masks |= enumerate(session.allowed_after(words, row.drafts), start=row.place + 1)
        return masks

    def apply(self, planned: PlannedStep, result: StepResult) -> None:
        """Pass every sampled token to its request, unless the request was intercepted or finished since the plan was made."""
        now = self.clock.now()
        if planned.scored or planned.noted:
            self._note(planned, result)
        reports = result.logprobs or (None,) * len(result.tokens)
        proposed = result.drafts or ((),) * len(planned.sampled)
        for (sequence, epoch, place, drafts), following in zip(planned.sampled, proposed, strict=True):
            if sequence.epoch != epoch:
                continue
            session = self._sessions[sequence.id]
            if drafts:
                drawn = slice(place, place + 1 + len(drafts))
                self._verify(session, drafts, result.tokens[drawn], reports[drawn], now)
            else:
                self._accept(session, result.tokens[place], reports[place], now)
            if following and sequence.epoch == epoch and self.scheduler.speculation is not None:
                self.scheduler.speculation.propose(sequence, following)

    def _note(self, planned: PlannedStep, result: StepResult) -> None:
        for row, scores in zip(planned.scored, result.scores, strict=False):
            if row.sequence.epoch == row.epoch and (failure := self._sessions[row.sequence.id].note_scores(scores)):
                self._fail(self._sessions[row.sequence.id], failure)
        if result.experts is not None:
            for chunk in planned.noted:
                session = self._sessions.get(chunk.sequence.id)
                if session is not None and session.sequence is chunk.sequence:
                    session.experts.append((chunk.start, result.experts.of(chunk.place, chunk.num_tokens)))

    def _verify(
        self,
        session: Session,
        drafts: tuple[int, ...],
        drawn: tuple[int, ...],
        reports: tuple[TokenLogprobs | None, ...],
        now: float,
    ) -> None:
        # Only tokens that `kept` counts are passed on. A token after which the request pauses, ends or reads a result is the
        # last one.
        sequence, accepted = session.sequence, 0
        epoch = sequence.epoch
        for index in range(kept(drafts, drawn)):
            if index and session.constraint is not None and self._allowed(session) is None:
                break
            computed = index < len(drafts) and drawn[index] == drafts[index]
            accepted += computed
            self._accept(session, drawn[index], reports[index], now, computed)
            if sequence.epoch != epoch:
                break
        assert self.scheduler.speculation is not None
        self.scheduler.speculation.settle(sequence, len(drafts), accepted)

    def _fail(self, session: Session, failure: str) -> None:
        log.warning("request %s fails: %s", session.request.id, failure)
        # no other request gets its pages
        self.scheduler.kv.forget(session.sequence.context)
        self._finish(session, "error", failure)

    def _fail_by_own_code(self, session: Session, error: BaseException) -> None:
        if is_users_interrupt(error):
            raise error
        self._finish(session, "error", describe_failure(error))

    def _allowed(self, session: Session) -> Any | None:
        assert session.constraint is not None
        try:
            words = session.constraint.allowed()
        except BaseException as error:
            self._fail_by_own_code(session, error)
            return None
        if session.complete:
            self._end_text(session)
            return None
        return words

    def _accept(
        self,
        session: Session,
        token: int,
        report: TokenLogprobs | None,
        now: float,
        computed: bool = False,  # see `Scheduler.accept`
    ) -> None:
        sequence, text = session.sequence, session.text
        adapter = session.request.adapter
        if (token < 0 or report is not None) and (failure := draw_failure(token, report, adapter)) is not None:
            if sequence.context.shared:  # perhaps only because of a page that another request computed
                self.scheduler.isolate(sequence)
            else:
                self._fail(session, failure)
            return
        self.scheduler.accept(sequence, token, computed=computed)
        if session.first_token_s is None:
            session.first_token_s = now
        if session.resumed_s is not None:
            session.note_context(now)
        if session.version != (version := self.weights_version + (0 if adapter is None else adapter.version)):
            session.begin_version(version)
        shown = text.add(token) if text is not None else ""
        logprobs = None if report is None else session.note_report(token, report)
        self.events.append(Token(sequence.id, token, shown, logprobs))
        calls: tuple[Call, ...] = ()
        if session.reads_tokens:
            try:
                calls = session.read(session.num_written - 1, token, shown, self.events)
                if session.constraint is not None:
                    session.constraint.accept(token)
                if session.async_calls is not None:
                    session.async_calls.accept(token, now)
            except BaseException as error:
                self._fail_by_own_code(session, error)
                return
        if token in session.stop_token_ids and (  # an end token ends no turn that calls, unless the request names it
            not calls or token in (session.request.params.stop_token_ids or ())
        ):
            if token in (session.request.params.stop_token_ids or ()):  # it ends the request
                self._finish(session, "stop", None if token in self._eos_token_ids else token)
            else:
                self._end_text(session)
        elif text is not None and text.stopped is not None:
            self._finish(session, "stop", text.stopped)
        elif session.constraint is not None and session.complete and not calls:
            self._end_text(session)
        elif sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= self.scheduler.max_model_len:
            self._finish(session, "length", None)
        elif calls:
            self._intercept(session, calls, now)
        elif (async_calls := session.async_calls) is not None:
            self._try(session, lambda: async_calls.go_on(now))

    def _end_text(self, session: Session) -> None:
        async_calls = session.async_calls
        try:
            waits = async_calls is not None and async_calls.wait_at_end(self.clock.now())
            if waits:
                session.begin_next_turn()
        except BaseException as error:
            self._fail_by_own_code(session, error)
            return
        if not waits:
            self._finish(session, "stop", None)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _intercept(self, session: Session, calls: tuple[Call, ...], now: float) -> None:
        request, number = session.request, len(session.interceptions)
        keys = [(request.id, number, index) for index in range(len(calls))]
        self.pause(session, calls, map(session.pending, calls, keys), now)
        session.begin_next_turn()
        self.dispatcher.call(request.id, calls, request.tools, request.tenant)

    def pause(
        self,
        session: Session,
        calls: tuple[Call, ...],
        pending: Iterable[PendingCall],
        now: float,
        *,
        begun: bool = False,  # see `Scheduler.intercept`
    ) -> None:
        """Pause a request that waits for calls."""
        session.interceptions.append(Interception(calls, began_s=now))
        self.scheduler.intercept(session.sequence, now, tuple(pending), begun=begun)
        self.events.append(Intercepted(session.request.id, calls))

    def go_on(
        self,
        session: Session,
        results: tuple[Result, ...],
        tokens: list[int],
        shown: str,
        lasted_s: float,
        ended: tuple[CallDuration, ...] = (),
        interrupts: tuple[Interrupt, ...] = (),
    ) -> None:
        """Append the results of a paused request's calls, and queue the request again.

        Args:
            tokens, shown: the results as tokens and as text.
            lasted_s: seconds from the beginning of the pause to the last result, which the engine notices later.
            ended, interrupts: see `Scheduler.resume` and `Resumed`.
        """
        sequence, pause, start = session.sequence, session.interceptions[-1], session.num_written
        session.resumed_s = sequence.since_s = self.clock.now()
        duration_s = min(session.resumed_s - sequence.paused_s, lasted_s)
        span = start, start + len(tokens)
        session.interceptions[-1] = Interception(pause.calls, results, span, duration_s, began_s=pause.began_s)
        self.scheduler.resume(sequence, tokens, ended)
        self.events.append(Resumed(session.request.id, results, tuple(tokens), shown, interrupts))

    def poll(self) -> None:
        """Take the results of calls that have returned, and end requests that have waited too long at the door."""
        for request_id, results in self.dispatcher.poll():
            self._resume(request_id, results)
        if returned := self.dispatcher.poll_started():
            self._receive(returned)
        if self.scheduler.door.sequences:
            for sequence in self.scheduler.door.overdue(self.clock.now()):
                self.abort(sequence.id)

    def _resume(self, request_id: str, results: tuple[Result, ...]) -> None:
        session = self._sessions[request_id]
        pause = session.interceptions[-1]
        room = self.scheduler.max_model_len - len(session.sequence.tokens) - 1
        renderer, tools = session.request.render, session.request.tools
        try:
            if renderer is not None:
                tokens, rendered = renderer.render(pause.calls, results, room)
            else:
                tokens, rendered = render_each(pause.calls, results, tools, room, self._vocab_size, self._encode)
        except BaseException as error:
            self._fail_by_own_code(session, error)
            return
        shown = session.read_external(tokens)
        if session.transcript is not None:
            session.transcript.resumed(pause.calls, rendered)
        ended = tuple(
            CallDuration(result.duration_s, result.status not in ("timeout", "unknown_tool", "started"))
            for result in results
        )
        self.go_on(session, rendered, tokens, shown, lasted_s(pause.calls, results, tools) or inf, ended)

    def _receive(self, returned: list[tuple[str, Call, Result]]) -> None:
        sessions = {request_id: self._sessions[request_id] for request_id, _, _ in returned}
        for request_id, call, result in returned:
            if (async_calls := sessions[request_id].async_calls) is not None:
                async_calls.receive(call, result)
        # after the loop above, so that a request's results are appended together
        for session in sessions.values():
            if (async_calls := session.async_calls) is not None:
                self._try(session, lambda async_calls=async_calls: async_calls.deliver())

    def _try(self, session: Session, change: Callable[[], None]) -> None:
        try:
            change()
        except BaseException as error:
            self._fail_by_own_code(session, error)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _finish(
        self,
        session: Session,
        reason: FinishReason,
        stop: str | int | None,
        failure: BaseException | None = None,
    ) -> None:
        request, sequence, now = session.request, session.sequence, self.clock.now()
        paused_s = now - sequence.paused_s if sequence.state is State.INTERCEPTED else 0.0
        self.dispatcher.cancel(request.id)
        if session.async_calls is not None:
            session.async_calls.cancel(now)
        expects = request.follow_up is not None and reason in ("stop", "length")
        if not (expects and self.retained.keep(session, now)):
            self.scheduler.finish(sequence, now)
            if reason == "abort" and request.leader is None:
                self.retained.remember(session, now)
        self.num_finished += 1
        del self._sessions[request.id]
        self._with_grammar.pop(request.id, None)
        self._release(request)
        rest = session.text.finish() if session.text else ""
        output = session.output(reason, stop, now, paused_s)
        if session.transcript is not None:
            output = session.with_messages(output, rest, self.events)
        self.events.append(Finished(request.id, output, rest, failure))
