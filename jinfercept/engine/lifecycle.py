"""Takes every request through its states: open, sampled token by token, intercepted, resumed, finished.

Knows requests, tokens and results of calls; no order of plans and no runner. Every change appends its events, in order, to the
list that the caller passes.
"""

import logging
from collections.abc import Callable
from typing import Any, final

from jinfercept.calls import Call, Result
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.async_calls import AsyncCallQueue
from jinfercept.engine.clock import Clock
from jinfercept.engine.constraints import Constraints
from jinfercept.engine.continuation import read_again
from jinfercept.engine.draw_failures import draw_failure
from jinfercept.engine.protocols import CallDispatcher
from jinfercept.engine.random_key import RandomKeys
from jinfercept.engine.reservations import Reservations
from jinfercept.engine.retained_contexts import RetainedContexts
from jinfercept.engine.session import Session, lost_output, new_session
from jinfercept.errors import describe_failure, is_users_interrupt
from jinfercept.events import Event, Finished, Intercepted, Resumed, Token
from jinfercept.hooks import Text
from jinfercept.intercept.dispatcher import lasted_s
from jinfercept.intercept.rendering import render_each
from jinfercept.outputs import CompletionOutput, FinishReason, Interception
from jinfercept.request import Request
from jinfercept.sched.plan import Masks, StepResult, TokenLogprobs
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import CallDuration, FirstWait, Sequence, State
from jinfercept.sched.speculation import kept
from jinfercept.tenants.expiring import ExpiringEntries
from jinfercept.tenants.quota import Quota

log = logging.getLogger(__name__)

_MOST_ABORTED, _ABORTED_S = 4096, 60.0
"""Maximum aborted prompts whose waits are kept, and the seconds for which they are."""


@final
class RequestLifecycle:
    """The unfinished requests of one engine. Used by the engine's thread, except `reserve`.

    What a user's detector, grammar or renderer raises, and a failed draw, end their request with the reason "error", no other.

    Args:
        scheduler: receives the requests' sequences.
        vocab_size: token ids are below it.
        eos_token_ids: end-of-text tokens.
        open_text: makes a request's text; None for a model without a tokenizer.
        encode: text of a result to token ids; None without a tokenizer.
        seed: of requests that have none, each of which draws apart.
        adapters: that requests hold while they are not finished.

    Attributes:
        num_finished: requests that have finished, since the engine was made.
        weights_version: of the weights that generate tokens now; changed where no plan is in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        dispatcher: CallDispatcher,
        clock: Clock,
        retained: RetainedContexts,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        open_text: Callable[[Request], Text] | None,
        encode: Callable[[str], list[int]] | None,
        seed: int,
        adapters: AdapterTable,
    ) -> None:
        self._scheduler = scheduler
        self._dispatcher = dispatcher
        self._clock = clock
        self._retained = retained
        self._async = AsyncCallQueue(scheduler, dispatcher, clock)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._open_text = open_text
        self._encode = encode
        self._random_keys = RandomKeys(seed)
        self.num_finished = self.weights_version = 0
        self._reserved = Reservations(adapters)
        self._aborted: ExpiringEntries[FirstWait] | None = None
        self._sessions: dict[str, Session] = {}
        self.constraints = Constraints()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sessions

    def reserve(self, request: Request) -> None:
        """Take a request's id and its adapter until it finishes, see `Reservations.take`. From any thread."""
        self._reserved.take(request)

    def open(self, request: Request, events: list[Event]) -> Sequence | None:
        """Queue a request, on a retained context if it follows one; returns its sequence, None if it has ended."""
        leader = self._sessions.get(request.leader) if request.leader else None
        try:
            key, now = self._random_keys.of_next(request), self._clock.now()
            session = new_session(request, self._scheduler, key, now, self._eos_token_ids, leader)
        except BaseException as error:
            self._reserved.release(request.id)
            if is_users_interrupt(error):
                raise
            return self._lose(request, error, events)
        sequence = session.sequence
        self._sessions[request.id] = session
        if self._aborted is not None and request.leader is None:
            sequence.place.repeats = self._aborted.use(name := _prompt_name(session))
            self._aborted.remove(name)
        self._retained.drop(request.id, self._clock.now())  # one of the same name
        if not self._retained.extend(request, sequence, self._clock.now()):
            self._scheduler.add(sequence)
        try:
            session.open_readers(self._open_text)
            self.constraints.begin_turn(session)
            if request.continues is not None:
                self._read_again(session, request.continues, events)
        except BaseException as error:
            self._fail_by_own_code(session, error, events)
            return None
        return sequence

    def _lose(self, request: Request, error: BaseException, events: list[Event]) -> None:
        self.num_finished += 1
        lost = lost_output(request, describe_failure(error), self._clock.now())
        events.append(Finished(request.id, lost, ""))

    def _read_again(self, session: Session, continues: CompletionOutput, events: list[Event]) -> None:
        calls, unread = read_again(session, continues, self.constraints)
        if unread:
            self._async.begin_again(session, unread, {call.id for call in calls}, self._clock.now(), events)
        elif calls:
            self._intercept(session, calls, self._clock.now(), events)

    def abort(self, request_id: str, events: list[Event]) -> None:
        """End a request in whatever state it is; an id that is not open is ignored.

        A client that sends the prompt again goes on waiting where it was. Else the prompts of impatient clients, half computed
        for each, would evict each other for ever.
        """
        session = self._sessions.get(request_id)
        if session is not None:
            place, tenant = session.sequence.place, session.request.tenant
            since_s = session.sequence.arrival_s if place.repeats is None else place.repeats.since_s
            if session.request.leader is None:
                if self._aborted is None:
                    self._aborted = ExpiringEntries(Quota(_MOST_ABORTED), _ABORTED_S, self._clock.now)
                self._aborted.put(tenant, _prompt_name(session), FirstWait(place.order, since_s), 1)
            self._finish(session, "abort", None, events)

    def end_all(self, reason: FinishReason, failure: BaseException | None, events: list[Event]) -> None:
        """End every open request."""
        stop = describe_failure(failure) if failure is not None else None
        for session in list(self._sessions.values()):
            self._finish(session, reason, stop, events, failure)

    def close(self) -> None:
        """Abort every open request, and forget the ids of those that were never opened."""
        self.end_all("abort", None, [])
        self._reserved.clear()

    # -- tokens ----------------------------------------------------------------------------------------------------

    def masks(self, planned: PlannedStep, events: list[Event]) -> Masks:
        """The masks of the plan's constrained rows. Every token sampled before must have been applied.

        A request whose constraint raises or allows nothing more finishes here; its row is not masked, and its sample is void.
        """
        return self.constraints.masks(planned, lambda session: self._allowed(session, events))

    def apply(self, planned: PlannedStep, result: StepResult, events: list[Event]) -> None:
        """Hand every sampled token to its request, unless the request was intercepted or finished since the plan was made."""
        now = self._clock.now()
        for row, scores in zip(planned.scored, result.scores, strict=False):
            if row.sequence.epoch == row.epoch and (failure := self._sessions[row.sequence.id].note_scores(scores)):
                self._fail(self._sessions[row.sequence.id], failure, events)
        if result.experts is not None:
            for chunk in planned.noted:
                session = self._sessions.get(chunk.sequence.id)
                if session is not None and session.sequence is chunk.sequence:
                    session.experts.append((chunk.start, result.experts.of(chunk.place, chunk.num_tokens)))
        reports = result.logprobs or (None,) * len(result.tokens)
        for sequence, epoch, place, drafts in planned.sampled:
            if sequence.epoch != epoch:
                continue
            session = self._sessions[sequence.id]
            if drafts:
                drawn = slice(place, place + 1 + len(drafts))
                self._verify(session, drafts, result.tokens[drawn], reports[drawn], now, events)
            else:
                self._accept(session, result.tokens[place], reports[place], now, events)

    def _verify(
        self,
        session: Session,
        drafts: tuple[int, ...],
        drawn: tuple[int, ...],
        reports: tuple[TokenLogprobs | None, ...],
        now: float,
        events: list[Event],
    ) -> None:
        """Hand the drawn tokens of a chunk with drafts to their request, one by one, as far as they count (`kept`).

        A token after which the request pauses, ends or reads a result is the last one.
        """
        sequence, accepted = session.sequence, 0
        epoch = sequence.epoch
        for index in range(kept(drafts, drawn)):
            if index and session.constraint is not None and self._allowed(session, events) is None:
                break
            computed = index < len(drafts) and drawn[index] == drafts[index]
            accepted += computed
            self._accept(session, drawn[index], reports[index], now, events, computed)
            if sequence.epoch != epoch:
                break
        self._scheduler.speculation.settle(sequence, len(drafts), accepted)

    def _fail(self, session: Session, failure: str, events: list[Event]) -> None:
        """End a request whose logits are not finite. No other request gets its pages."""
        log.warning("request %s fails: %s", session.request.id, failure)
        self._scheduler.kv.forget(session.sequence.context)
        self._finish(session, "error", failure, events)

    def _fail_by_own_code(self, session: Session, error: BaseException, events: list[Event]) -> None:
        """End a request whose detector, grammar or renderer raised: whatever it was, it concerns no other request."""
        if is_users_interrupt(error):
            raise error
        self._finish(session, "error", describe_failure(error), events)

    def _allowed(self, session: Session, events: list[Event]) -> Any | None:
        """The words of a constrained request's mask; None if the request finished."""
        assert session.constraint is not None
        try:
            words = session.constraint.allowed()
        except BaseException as error:
            self._fail_by_own_code(session, error, events)
            return None
        if session.complete:
            self._end_text(session, events)
            return None
        return words

    def _accept(
        self,
        session: Session,
        token: int,
        report: TokenLogprobs | None,
        now: float,
        events: list[Event],
        computed: bool = False,  # see `Scheduler.accept`
    ) -> None:
        sequence, text = session.sequence, session.text
        adapter = session.request.adapter
        if (token < 0 or report is not None) and (failure := draw_failure(token, report, adapter)) is not None:
            if sequence.context.shared:  # perhaps only because of a page that another request computed
                self._scheduler.isolate(sequence)
            else:
                self._fail(session, failure, events)
            return
        self._scheduler.accept(sequence, token, computed=computed)
        if session.first_token_s is None:
            session.first_token_s = now
        if session.resumed_s is not None:
            session.note_context(now)
        if session.version != (version := self.weights_version + (0 if adapter is None else adapter.version)):
            session.begin_version(version)
        session.stream.append(token)
        shown = text.add(token) if text is not None else ""
        logprobs = None if report is None else session.note_report(token, report)
        events.append(Token(sequence.id, token, shown, logprobs))
        calls: tuple[Call, ...] = ()
        if session.reads_tokens:
            try:
                calls = session.read(token, shown, events)
                if session.constraint is not None:
                    session.constraint.accept(token)
                if session.flight is not None:
                    self._async.accept(session, token, now, events)
            except BaseException as error:
                self._fail_by_own_code(session, error, events)
                return
        if token in session.stop_token_ids and (  # an end token ends no turn that calls, unless the request names it
            not calls or token in (session.request.params.stop_token_ids or ())
        ):
            if token in (session.request.params.stop_token_ids or ()):  # it ends the request
                self._finish(session, "stop", None if token in self._eos_token_ids else token, events)
            else:
                self._end_text(session, events)
        elif text is not None and text.stopped is not None:
            self._finish(session, "stop", text.stopped, events)
        elif session.constraint is not None and session.complete and not calls:
            self._end_text(session, events)
        elif sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= self._scheduler.max_model_len:
            self._finish(session, "length", None, events)
        elif calls:
            self._intercept(session, calls, now, events)
        elif session.flight is not None:
            self._try(session, events, lambda: self._async.go_on(session, now, events))

    def _end_text(self, session: Session, events: list[Event]) -> None:
        """The text has ended by itself: the request ends, unless it waits for asynchronous calls and reads their results."""
        waits: list[bool] = []
        self._try(session, events, lambda: waits.append(self._async.wait_at_end(session, self._clock.now(), events)))
        if waits == [False]:
            self._finish(session, "stop", None, events)
        elif waits and session.constraint is not None and session.constraint.ended:
            self.constraints.begin_turn(session)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _intercept(self, session: Session, calls: tuple[Call, ...], now: float, events: list[Event]) -> None:
        session.interceptions.append(Interception(calls, began_s=now))
        number = len(session.interceptions)
        pending = tuple(
            session.pending(call, (session.request.id, number, index), call.expected_s)
            for index, call in enumerate(calls)
        )
        self._scheduler.intercept(session.sequence, now, pending)
        if session.constraint is not None and session.constraint.ended:
            self.constraints.begin_turn(session)
        self._dispatcher.call(session.request.id, calls, session.request.tools, session.request.tenant)
        events.append(Intercepted(session.request.id, calls))

    def resume(self, request_id: str, results: tuple[Result, ...], events: list[Event]) -> None:
        """Append the results of an intercepted request's calls, cut to the model's length, and queue the request again."""
        session = self._sessions[request_id]
        sequence = session.sequence
        pause = session.interceptions[-1]
        room = self._scheduler.max_model_len - len(sequence.tokens) - 1
        renderer, tools = session.request.render, session.request.tools
        try:
            if renderer is not None:
                tokens, rendered = renderer.render(pause.calls, results, room)
            else:
                tokens, rendered = render_each(pause.calls, results, tools, room, self._vocab_size, self._encode)
        except BaseException as error:
            self._fail_by_own_code(session, error, events)
            return
        start = len(session.stream)
        shown = session.append_external(tokens)
        session.resumed_s = self._clock.now()
        waited_s = session.resumed_s - sequence.paused_s
        if session.transcript is not None:
            session.transcript.resumed(pause.calls, rendered)
        session.interceptions[-1] = Interception(
            pause.calls,
            rendered,
            (start, start + len(tokens)),
            min(waited_s, lasted_s(pause.calls, results, tools) or waited_s),  # not until the engine noticed
            began_s=pause.began_s,
        )
        ended = tuple(
            CallDuration(result.duration_s, result.status not in ("timeout", "unknown_tool", "started"))
            for result in results
        )
        self._scheduler.resume(sequence, tokens, ended)
        events.append(Resumed(session.request.id, rendered, tuple(tokens), shown))

    def receive(self, returned: list[tuple[str, Call, Result]], events: list[Event]) -> None:
        """Take the results of asynchronous calls; those of one request are appended together."""
        sessions = {request_id: self._sessions[request_id] for request_id, _, _ in returned}
        for request_id, call, result in returned:
            self._async.receive(sessions[request_id], call, result)
        for session in sessions.values():
            self._try(session, events, lambda session=session: self._async.deliver(session, events))

    def _try(self, session: Session, events: list[Event], change: Callable[[], None]) -> None:
        """Change a request by code of its own, which ends it if it raises."""
        try:
            change()
        except BaseException as error:
            self._fail_by_own_code(session, error, events)

    # -- the end ---------------------------------------------------------------------------------------------------

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
        self._dispatcher.cancel(request.id)
        self._async.cancel(session, now)
        if reason not in ("stop", "length") or not self._retained.keep(session, now):
            self._scheduler.finish(sequence, now)
        self.num_finished += 1
        del self._sessions[request.id]
        self.constraints.forget(request.id)
        self._reserved.release(request.id)
        rest = session.text.finish() if session.text else ""
        output = session.output(reason, stop, now, paused_s)
        output = session.with_messages(output, rest, events)
        events.append(Finished(request.id, output, rest, failure))


def _prompt_name(session: Session) -> str:
    """The same for two requests of a tenant with the same prompt and salt."""
    sequence = session.sequence
    prompt = sequence.tokens[: sequence.external_spans[0][1]].tobytes()
    return str(hash((sequence.tenant, sequence.context.root, prompt)))
