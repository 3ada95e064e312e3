"""One request in the engine: its readers of tokens, its reports, its interceptions and its output.

Its tokens are those of its `Sequence`, which the scheduler has, and which outlives the session as a retained context.
"""

import logging
import math
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from jinfercept.calls import Call
from jinfercept.engine.dispatcher import CopyableConstraint
from jinfercept.errors import describe_failure
from jinfercept.events import Event
from jinfercept.hooks import BadFrame, Constraint, Text, Transcript, Watch
from jinfercept.outputs import (
    CompletionOutput,
    ContextUse,
    FinishReason,
    Interception,
    Interrupt,
    KeptTokens,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from jinfercept.request import Adapter, Request
from jinfercept.sched.plan import NOTHING_ALLOWED, Sample, TokenExperts, TokenLogprobs, draw_options
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import PendingCall, Sequence

if TYPE_CHECKING:
    from jinfercept.engine.async_calls import AsyncCallQueue

log = logging.getLogger(__name__)

MAX_NAME = 256
"""Characters of a called name that the scheduler keeps. A server refuses longer names, but a model may write them."""
_NOT_FINITE = describe_failure(
    FloatingPointError(
        "the model's logits are NaN or infinite; fix: look for such numbers in the weights, or for activations that overflow "
        'their type (dtype="float32" helps)'
    )
)
_ADAPTER = (
    "the model's logits with the adapter {!r} are NaN or infinite; fix: if the model answers without it, unload it and train "
    'it again, for activations overflow their type (dtype="float32" helps)'
)
_NOTHING_ALLOWED = describe_failure(
    FloatingPointError(
        "every logit is minus infinity, so that no token can be drawn; fix: look at what the model, the grammar and "
        "allowed_token_ids rule out together"
    )
)


@dataclass(slots=True)
class Session:
    """The state of a request that the scheduler does not know; mutable, owned by the `RequestLifecycle`."""

    request: Request
    sequence: Sequence
    stop_token_ids: frozenset[int]
    text: Text | None = None
    watch: Watch | None = None
    transcript: Transcript | None = None  # only of chats
    constraint: Constraint | None = None  # of the present turn; None: every token is allowed
    # One entry per token behind the prompt, None for results of tools. The last two are of the distributions that
    # tokens were drawn from, if they are reported.
    logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    processed: list[float | None] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # first place behind the prompt, version of weights
    version: int = -1  # the last of these; -1 before the first token
    # One entry per scored token; the first token has none.
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    experts: list[tuple[int, TokenExperts]] = field(default_factory=list)  # first position, experts of computed tokens
    interceptions: list[Interception] = field(default_factory=list)
    async_calls: "AsyncCallQueue | None" = None
    interrupts: list[Interrupt] = field(default_factory=list)  # results of asynchronous calls that were read
    cancelled: list[Call] = field(default_factory=list)  # asynchronous calls whose results were not read at the end
    client_calls: tuple[Call, ...] = ()  # of the last turn, answered by the client
    first_token_s: float | None = None
    resumed_s: float | None = None  # when results were appended; None once a token follows them

    def open_readers(self, open_text: Callable[[Request], Text] | None) -> None:
        """Open the request's transcript, or its text and detector, and its constraint. No tokenizer: `open_text` is None."""
        request = self.request
        if request.transcript is not None:
            self.transcript = request.transcript(request)
            self.text = self.transcript.text
        else:
            self.text = open_text(request) if open_text else None
            self.watch = request.detector.watch() if request.detector else None
        if self.text is not None and not request.params.include_stop_str_in_output:
            self.text.hidden = self.stop_token_ids
        self._begin_turn()

    def _begin_turn(self) -> None:
        grammar = self.request.grammar
        self.constraint = None if grammar is None else grammar.constrain(self.stop_token_ids)
        if self.constraint is not None:
            self.sequence.may_draft &= isinstance(self.constraint, CopyableConstraint)

    def begin_next_turn(self) -> None:
        if self.constraint is not None and self.constraint.ended:
            self._begin_turn()

    @property
    def num_written(self) -> int:
        return len(self.sequence.tokens) - len(self.request.prompt_token_ids)  # generated ones and results of tools

    @property
    def complete(self) -> bool:
        """Whether the grammar ends the request: it allows no further token, and no detector waits for an end token."""
        constraint = self.constraint
        return constraint is not None and constraint.ended and not (self.finds_calls and self.stop_token_ids)

    @property
    def reads_tokens(self) -> bool:
        """Whether generated tokens mean more than text: calls, pieces of a chat, or the state of a grammar."""
        return (self.transcript or self.watch or self.constraint or self.async_calls) is not None

    @property
    def finds_calls(self) -> bool:
        """Whether the generated text is searched for calls."""
        return self.watch is not None or (self.transcript is not None and self.transcript.finds_calls)

    def allowed_after(self, words: Any, drafts: tuple[int, ...]) -> Iterator[Any]:
        """The masks of the tokens after each draft, up to a draft that the grammar refuses: no drawn token equals that one.

        `words` is the mask of the first draft's place.
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

    @property
    def last_raw(self) -> str:
        return "" if self.text is None else self.text.last_raw

    def read(self, index: int, token: int, text: str, events: list[Event]) -> tuple[Call, ...]:
        """The calls that are complete with the newest token and that the server answers.

        Args:
            index: the token's place behind the prompt.
            text: the text that is certain with it.
            events: receives the pieces of a chat that are complete with it.
        """
        calls: tuple[Call, ...] = ()
        if self.transcript is not None:
            pieces, calls = self.transcript.read(index, token, text)
            events += pieces
        elif self.watch is not None:
            calls = tuple(self.watch.feed(index, token, self.last_raw))
            if calls and not all(isinstance(call, Call) for call in calls):
                raise TypeError(f"a detector returns calls, not {calls!r}")
        if calls and any(call.by_caller for call in calls):
            self.client_calls, calls = tuple(call for call in calls if call.by_caller), ()
        return calls

    def pending(self, call: Call, key: Hashable) -> PendingCall:
        """A call in the scheduler's form."""
        request = self.request
        kind = "client_tool" if call.by_caller else "server_tool" if call.name in request.tools else "unknown_tool"
        return PendingCall(call.name[:MAX_NAME], key, call.expected_s, request.tenant, kind)

    def read_external(self, tokens: list[int]) -> str:
        """Take in tokens that the model did not generate; return their text, as far as it is certain."""
        for reports in (self.logprobs, self.processed, self.kept):
            reports += [None] * len(tokens)
        return self.text.inject(tokens) if self.text else ""

    def note_context(self, now: float) -> None:
        """Note where the context was when the request resumed, and the delay until its next token."""
        if self.resumed_s is not None:
            context = ContextUse(*self.sequence.usage.residency)
            self.interceptions[-1] = replace(self.interceptions[-1], context=context, delay_s=now - self.resumed_s)
            self.resumed_s = None

    def begin_version(self, version: int) -> None:
        """Note that the newest token and the next ones are generated by weights of this version."""
        self.versions.append((self.num_written - 1, version))
        self.version = version

    def note_report(self, token: int, report: TokenLogprobs) -> dict[int, Logprob] | None:
        """Add the report of the newest token; return its log probabilities, if the request asks for them."""
        self.processed.append(report.processed)
        self.kept.append(report.kept)
        if self.request.params.logprobs is None:
            return None
        named = self._named(token, report)
        self.logprobs.append(named)
        return named

    def _routed_experts(self) -> Any:
        # no step has computed the last token
        experts = self.experts[0][1].placed(self.experts, len(self.sequence.tokens) - 1)
        before = self.request.continues
        if before is not None and before.routed_experts is not None:
            computed = (before.routed_experts >= 0).all(axis=(1, 2)).nonzero()[0]
            experts[computed] = before.routed_experts[computed]
        return experts

    def note_scores(self, scores: tuple[TokenLogprobs, ...]) -> str | None:
        """Add the reports of the prompt's next tokens; return the failure if one is not a number."""
        first = len(self.prompt_logprobs)
        tokens = self.request.prompt_token_ids[first : first + len(scores)]
        self.prompt_logprobs += map(self._named, tokens, scores)
        return _not_finite(self.request.adapter) if any(math.isnan(score.logprob) for score in scores) else None

    def _named(self, token: int, report: TokenLogprobs) -> dict[int, Logprob]:
        name = self.text.token_text if self.text else lambda token_id: None
        named = {token: Logprob(report.logprob, report.rank, name(token))}
        for rank, (token_id, logprob) in enumerate(report.best, start=1):
            named[token_id] = Logprob(logprob, rank, name(token_id))
        return named

    def output(self, reason: FinishReason, stop: str | int | None, now: float, paused_s: float) -> RequestOutput:
        """The output of the request, which ends now. If it still waits for calls, it was intercepted `paused_s` seconds ago."""
        request, sequence, params = self.request, self.sequence, self.request.params
        if self.resumed_s is not None:
            self.interceptions[-1] = replace(self.interceptions[-1], delay_s=now - self.resumed_s)
        num_prompt = len(request.prompt_token_ids)
        written = sequence.tokens[num_prompt:].tolist()
        completion = CompletionOutput(
            index=0,
            text=self.text.text if self.text else "",
            token_ids=written,
            finish_reason=reason,
            stop_reason=stop,
            num_generated=sequence.generated,
            interceptions=tuple(self.interceptions),
            interrupts=tuple(self.interrupts),
            cancelled=tuple(self.cancelled),
            logprobs=None if params.logprobs is None else self.logprobs,
            cumulative_logprob=None if params.logprobs is None else self._total_logprob(written),
            routed_experts=self._routed_experts() if self.experts else None,
            external_spans=tuple((start - num_prompt, end - num_prompt) for start, end in sequence.external_spans[1:]),
            version_runs=tuple(self.versions),
            processed_logprobs=self.processed if params.return_processed_logprobs else None,
            kept_tokens=KeptTokens(self.kept) if params.return_kept_tokens else None,
        )
        metrics = RequestMetrics(
            arrival_s=sequence.arrival_s,
            first_token_s=self.first_token_s,
            finished_s=now,
            intercepted_s=sum([pause.duration_s for pause in self.interceptions]) + paused_s,
            recomputed_tokens=sequence.usage.recomputed,
            copied_out_tokens=sequence.usage.copied_out,
            copied_in_tokens=sequence.usage.copied_in,
            preemptions=sequence.usage.preemptions,
            door_s=now - sequence.arrival_s if sequence.at_door else sequence.door_s,
        )
        scores = None if params.prompt_logprobs is None else self.prompt_logprobs
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

    def _total_logprob(self, written: list[int]) -> float:
        generated = zip(written, self.logprobs, strict=True)
        return sum(named[token].logprob for token, named in generated if named is not None)

    def read_again(self, output: CompletionOutput) -> tuple[tuple[Call, ...], list[Call | BadFrame]]:
        """Bring a new session to the state in which the request with this output was aborted, but for calls without a result.

        The sequence has the output's tokens from the start. They are computed like a prompt, as far as their pages are gone.
        The text, detector or transcript, and grammar read them again, token by token.

        Returns:
            The calls that the request waited for, none if the model was generating; and markup of asynchronous calls whose
            results it had not read.
        """
        spans, calls, tokens, index = deque(output.external_spans), tuple[Call, ...](), output.token_ids, 0
        unread, read_spans = list[Call | BadFrame](), {interrupt.call.span for interrupt in output.interrupts}
        results = {pause.span: pause.results for pause in output.interceptions if pause.results}
        ignored: list[Event] = []
        while index < len(tokens) or spans:
            if spans and spans[0][0] == index:
                start, index = span = spans.popleft()
                self.read_external(tokens[start:index])
                if self.transcript is not None and calls:
                    self.transcript.resumed(calls, results.get(span, ()))
                if self.async_calls is not None:
                    self.async_calls.end_text()  # of a text that waited at its end
                self.begin_next_turn()  # a text that ended waited for asynchronous calls
                calls = ()
                continue
            token = tokens[index]
            shown = self.text.add(token) if self.text is not None else ""
            if self.reads_tokens:
                calls = self.read(index, token, shown, ignored)
                if self.constraint is not None:
                    self.constraint.accept(token)
                    if calls:
                        self.begin_next_turn()
            if self.async_calls is not None:
                frames = self.async_calls.read_again(index, token)
                unread += [frame for frame in frames if frame.span not in read_spans]
            index += 1
        if self.async_calls is not None and output.interceptions and not (pause := output.interceptions[-1]).results:
            calls = pause.calls
            self.begin_next_turn()
        self.interrupts = list(output.interrupts)
        self.interceptions = [pause for pause in output.interceptions if pause.results]
        self.versions = list(output.version_runs)
        self.version = self.versions[-1][1] if self.versions else -1
        unknown = [None] * len(tokens)
        self.logprobs = list(output.logprobs or unknown)
        self.processed = list(output.processed_logprobs or unknown)
        self.kept = list(output.kept_tokens.sets if output.kept_tokens else unknown)
        return calls, unread

    def with_messages(self, output: RequestOutput, rest: str, events: list[Event]) -> RequestOutput:
        """The output of a finished chat with its messages. `events` receives the last pieces; `rest` is text held back."""
        assert self.transcript is not None
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
    """A session whose sequence is not added to the scheduler yet. `leader` computes the prompt; None: the session does."""
    params, follow_up = request.params, request.follow_up
    stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else end_token_ids)
    first_computed = len(request.prompt_token_ids) - 1 if request.leader else 0
    sequence = Sequence(
        request.id,
        request.prompt_token_ids,
        scheduler.kv.open(request.kv_salt),
        max_tokens=scheduler.max_model_len if params.max_tokens is None else params.max_tokens,
        sample=Sample(params.temperature, random_key, draw_options(params, stop)),
        arrival_s=now,
        num_best=params.prompt_logprobs,
        noted_from=first_computed if params.return_routed_experts else None,
        leader=leader.sequence if leader else None,
        priority=request.priority,
        tenant=request.tenant,
        weight=request.weight,
        session=follow_up.session if follow_up is not None else "",
        adapter=0 if request.adapter is None else request.adapter.slot,
    )
    if (before := request.continues) is not None:
        start = len(sequence.tokens)
        sequence.tokens.extend(before.token_ids)
        sequence.external_spans += [(start + first, start + end) for first, end in before.external_spans]
        sequence.generated = before.num_generated
    return Session(request, sequence, stop)


def lost_output(request: Request, failure: str, now: float) -> RequestOutput:
    """The output of a request that ended before it had a session."""
    completion = CompletionOutput(0, "", [], "error", failure)
    metrics = RequestMetrics(now, None, now, 0.0, 0, 0, 0, 0)
    return RequestOutput(request.id, request.prompt, request.prompt_token_ids, [completion], 0, metrics)


def request_key(request: Request, engine_seed: int, number: int) -> int:
    """The random key of a request; 0 for a greedy one. `number` is the request's place among all requests of the engine."""
    seed, prompt = request.params.seed, request.prompt_token_ids
    if request.params.temperature == 0:
        return 0
    # requests without a seed have keys of their own
    if seed is None:
        return random_key(engine_seed, prompt, request.index, number)
    return random_key(seed, prompt, request.index)


def random_key(seed: int, prompt_token_ids: Tokens[int], index: int, number: int | None = None) -> int:
    """A hash of 64 bits: equal arguments give equal random numbers, any other arguments independent ones.

    Args:
        seed: of the request, or of the engine if the request has none. It may have any size and sign, all of which counts.
        index: the request's place among the outputs of its prompt.
        number: the request's place among all requests of the engine; None if the request has a seed.
    """
    size = (seed.bit_length() + 8) // 8
    fields = array("q", (size, index, -1 if number is None else number)).tobytes()
    digest = blake2b(fields + seed.to_bytes(size, "little", signed=True), digest_size=8, person=b"jinfercept draw")
    ids = prompt_token_ids if isinstance(prompt_token_ids, array) else array("i", prompt_token_ids)
    digest.update(ids.tobytes())
    return int.from_bytes(digest.digest(), "little")


def draw_failure(token: int, report: TokenLogprobs | None, adapter: Adapter | None) -> str | None:
    """Why a sampled row gives no token (see `StepResult`); None if it gives one."""
    if token == NOTHING_ALLOWED:
        return _NOTHING_ALLOWED
    return _not_finite(adapter) if token < 0 or (report is not None and math.isnan(report.logprob)) else None


def _not_finite(adapter: Adapter | None) -> str:
    return _NOT_FINITE if adapter is None else describe_failure(FloatingPointError(_ADAPTER.format(adapter.name)))
