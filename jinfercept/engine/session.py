"""One request in the engine: its text, its tokens, its interceptions and its output."""

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jinfercept.calls import Call
from jinfercept.engine.calls_in_flight import CallsInFlight
from jinfercept.engine.draw_failures import score_failure
from jinfercept.engine.protocols import CopyableConstraint
from jinfercept.events import Event
from jinfercept.hooks import Constraint, Text, Transcript, Watch
from jinfercept.outputs import (
    CompletionOutput,
    ContextUse,
    FinishReason,
    Interception,
    Interrupt,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from jinfercept.request import Request
from jinfercept.sched.plan import TokenExperts, TokenLogprobs
from jinfercept.sched.sampling_options import draw_options
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import PendingCall, Sequence

log = logging.getLogger(__name__)

MAX_NAME = 256
"""Characters of a called name that the scheduler keeps. A server refuses longer names, but a model may write them."""


@dataclass(slots=True)
class Session:
    """The state of a request that the scheduler does not know; mutable, owned by the `RequestLifecycle`.

    Attributes:
        stop_token_ids: tokens that end the request.
        transcript: reads the text of a chat; None if the request is no chat.
        stream: token ids after the prompt: generated ones, and results of tools.
        logprobs: one entry per token of `stream`; None for results of tools.
        prompt_logprobs: one entry per scored token of the prompt; None for the first.
        experts: of tokens that were computed, with the positions of their first ones, if the request wants to know them.
        flight: asynchronous calls; None if the request can have none.
        interrupts: results of asynchronous calls in `stream`.
        cancelled: asynchronous calls whose results are not in it, when the request has finished.
        client_calls: calls of the last turn that the client answers.
        first_token_s: when the first token was generated.
        resumed_s: when results were appended, if no token was generated since.
    """

    request: Request
    sequence: Sequence
    stop_token_ids: frozenset[int]
    text: Text | None = None
    watch: Watch | None = None
    transcript: Transcript | None = None
    constraint: Constraint | None = None
    stream: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    experts: list[tuple[int, TokenExperts]] = field(default_factory=list)
    interceptions: list[Interception] = field(default_factory=list)
    flight: CallsInFlight | None = None
    interrupts: list[Interrupt] = field(default_factory=list)
    cancelled: list[Call] = field(default_factory=list)
    client_calls: tuple[Call, ...] = ()
    first_token_s: float | None = None
    resumed_s: float | None = None

    def open_readers(self, open_text: Callable[[Request], Text] | None) -> None:
        """Open what reads the request's tokens: a transcript, or a text and a detector; and its asynchronous calls.

        Args:
            open_text: makes a request's text; None for a model without a tokenizer.
        """
        request = self.request
        if request.transcript is not None:
            self.transcript = request.transcript(request)
            self.text = self.transcript.text
        else:
            self.text = open_text(request) if open_text else None
            self.watch = request.detector.watch() if request.detector else None
        if request.markup is not None:
            self.flight = CallsInFlight(request.markup, request.markup.watch(request.prompt, request.prompt_token_ids))

    @property
    def intercepted_s(self) -> float:
        """Seconds of all interceptions that have ended."""
        return sum(interception.duration_s for interception in self.interceptions)

    @property
    def complete(self) -> bool:
        """Whether the grammar ends the request: it allows no further token, and no detector waits for an end token."""
        constraint = self.constraint
        return constraint is not None and constraint.ended and not (self.finds_calls and self.stop_token_ids)

    @property
    def reads_tokens(self) -> bool:
        """Whether generated tokens mean more than text: calls, pieces of a chat, or the state of a grammar."""
        return (self.transcript or self.watch or self.constraint or self.flight) is not None

    @property
    def finds_calls(self) -> bool:
        """Whether calls are looked for in what the request generates."""
        return self.watch is not None or (self.transcript is not None and self.transcript.finds_calls)

    def allowed_after(self, words: Any, drafts: tuple[int, ...]) -> Iterator[Any]:
        """The masks of the tokens after each draft, up to a draft that the grammar refuses: no drawn token equals that one.

        Args:
            words: the mask of the first draft's place.
        """
        if not drafts:
            return
        assert isinstance(self.constraint, CopyableConstraint)
        ahead = self.constraint.copy()
        for draft in drafts:
            if not int(words[draft // 32]) >> draft % 32 & 1:
                return
            try:
                ahead.accept(draft)
                words = ahead.allowed()
            except BaseException:  # the request fails at this place once its tokens lead there
                return
            yield words

    def read(self, token: int, text: str, events: list[Event]) -> tuple[Call, ...]:
        """The calls that are complete with the newest token and that the server answers.

        Args:
            text: the text that is certain with it.
            events: receives the pieces of a chat that are complete with it.
        """
        calls: tuple[Call, ...] = ()
        if self.transcript is not None:
            pieces, calls = self.transcript.read(len(self.stream) - 1, token, text)
            events += pieces
        elif self.watch is not None:
            calls = tuple(self.watch.feed(len(self.stream) - 1, token, self.text.last_raw if self.text else ""))
            if calls and not all(isinstance(call, Call) for call in calls):
                raise TypeError(f"a detector returns calls, not {calls!r}")
        if calls and any(call.by_caller for call in calls):
            self.client_calls, calls = tuple(call for call in calls if call.by_caller), ()
        return calls

    def pending(self, call: Call, key: Hashable, expected_s: float | None) -> PendingCall:
        """A call of the request as the scheduler has it."""
        request = self.request
        kind = "client_tool" if call.by_caller else "server_tool" if call.name in request.tools else "unknown_tool"
        return PendingCall(call.name[:MAX_NAME], key, expected_s, request.tenant, kind)

    def append_external(self, tokens: list[int]) -> str:
        """Append tokens that the model did not generate; returns their text, as far as it is certain."""
        self.stream += tokens
        self.logprobs += [None] * len(tokens)
        return self.text.inject(tokens) if self.text else ""

    def note_context(self, now: float) -> None:
        """Note the residency that the context had when the request resumed, and when its next token came."""
        if self.resumed_s is not None:
            context = ContextUse(*self.sequence.usage.residency)
            self.interceptions[-1] = replace(self.interceptions[-1], context=context, delay_s=now - self.resumed_s)
            self.resumed_s = None

    def note_logprobs(self, token: int, report: TokenLogprobs) -> dict[int, Logprob]:
        """Add and return the report of the newest token."""
        named = self._named(token, report)
        self.logprobs.append(named)
        return named

    def _routed_experts(self) -> Any | None:
        """The experts of all tokens but the last, which no step has computed, if the request wants to know them."""
        if not self.experts:
            return None
        num_tokens = len(self.request.prompt_token_ids) + len(self.stream) - 1
        return self.experts[0][1].placed(self.experts, num_tokens)

    def note_scores(self, scores: tuple[TokenLogprobs, ...]) -> str | None:
        """Add the reports of the prompt's next tokens; returns why if they are no numbers."""
        first = len(self.prompt_logprobs)
        tokens = self.request.prompt_token_ids[first : first + len(scores)]
        self.prompt_logprobs += map(self._named, tokens, scores)
        return score_failure(scores, self.request.adapter)

    def _sum_of_logprobs(self) -> float:
        """The sum over the tokens that the model generated."""
        generated = zip(self.stream, self.logprobs, strict=True)
        return sum(named[token].logprob for token, named in generated if named is not None)

    def _named(self, token: int, report: TokenLogprobs) -> dict[int, Logprob]:
        name = self.text.token_text if self.text else lambda token_id: None
        named = {token: Logprob(report.logprob, report.rank, name(token))}
        for rank, (token_id, logprob) in enumerate(report.best, start=1):
            named[token_id] = Logprob(logprob, rank, name(token_id))
        return named

    def output(self, reason: FinishReason, stop: str | int | None, now: float, paused_s: float) -> RequestOutput:
        """The request's output.

        Args:
            reason, stop: why it ended.
            now: when it ended.
            paused_s: seconds since it was intercepted, if it ended while it waited for calls.
        """
        request, sequence = self.request, self.sequence
        if self.resumed_s is not None:
            self.interceptions[-1] = replace(self.interceptions[-1], delay_s=now - self.resumed_s)
        reported = request.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=self.text.text if self.text else "",
            token_ids=self.stream,
            finish_reason=reason,
            stop_reason=stop,
            num_generated=sequence.generated,
            interceptions=tuple(self.interceptions),
            interrupts=tuple(self.interrupts),
            cancelled=tuple(self.cancelled),
            logprobs=self.logprobs if reported else None,
            cumulative_logprob=self._sum_of_logprobs() if reported else None,
            routed_experts=self._routed_experts(),
        )
        metrics = RequestMetrics(
            arrival_s=sequence.arrival_s,
            first_token_s=self.first_token_s,
            finished_s=now,
            intercepted_s=self.intercepted_s + paused_s,
            recomputed_tokens=sequence.usage.recomputed,
            copied_out_tokens=sequence.usage.copied_out,
            copied_in_tokens=sequence.usage.copied_in,
            preemptions=sequence.usage.preemptions,
        )
        scores = None if request.params.prompt_logprobs is None else self.prompt_logprobs
        return RequestOutput(
            request.id,
            request.prompt,
            request.prompt_token_ids,
            [completion],
            sequence.usage.num_cached or 0,
            metrics,
            prompt_logprobs=scores,
            retained=sequence.usage.retained and ContextUse(*sequence.usage.retained),
        )

    def with_messages(self, output: RequestOutput, rest: str, events: list[Event]) -> RequestOutput:
        """The output of a finished request, of a chat with its messages; `events` receives the last pieces.

        Args:
            rest: the text that was held back until now.
        """
        if self.transcript is None:
            return output
        [completion] = output.outputs
        is_cut = completion.finish_reason != "stop" or completion.stop_reason is not None
        try:
            events += self.transcript.end(rest, is_cut)
            return replace(output, outputs=[self.transcript.completed(completion)])
        except Exception:
            log.exception("the end of a chat could not be read: request %s", output.request_id)
            return output


def new_session(
    request: Request,
    scheduler: Scheduler,
    random_key: int,
    now: float,
    end_token_ids: frozenset[int],
    leader: Session | None,
) -> Session:
    """A session whose sequence is not added to the scheduler yet.

    Args:
        random_key: of the request's draws.
        end_token_ids: of the model's text.
        leader: of the request that computes the prompt; None: it is this one.
    """
    params, follow_up = request.params, request.follow_up
    stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else end_token_ids)
    first_computed = len(request.prompt_token_ids) - 1 if request.leader else 0
    sequence = Sequence(
        request.id,
        request.prompt_token_ids,
        scheduler.kv.open(request.kv_salt),
        max_tokens=scheduler.max_model_len if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        random_key=random_key,
        arrival_s=now,
        options=draw_options(params, stop),
        num_best=params.prompt_logprobs,
        noted_from=first_computed if params.return_routed_experts else None,
        leader=leader.sequence if leader else None,
        priority=request.priority,
        tenant=request.tenant,
        weight=request.weight,
        session=follow_up.session if follow_up is not None else "",
        adapter=0 if request.adapter is None else request.adapter.slot,
    )
    return Session(request, sequence, stop)


def lost_output(request: Request, failure: str, now: float) -> RequestOutput:
    """The output of a request that ended before it had a session."""
    completion = CompletionOutput(0, "", [], "error", failure)
    metrics = RequestMetrics(now, None, now, 0.0, 0, 0, 0, 0)
    return RequestOutput(request.id, request.prompt, request.prompt_token_ids, [completion], 0, metrics)
