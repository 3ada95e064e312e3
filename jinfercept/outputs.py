"""The products of a finished request: texts, tokens, pauses and times. Frozen values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

from jinfercept.calls import Call, Result
from jinfercept.values import short_repr

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class ContextUse(NamedTuple):
    """Tokens of a context after an interception, by where they were when the request ran again."""

    #: Still on the device.
    kept: int
    #: Copied in from the host.
    copied_in: int
    #: Evicted, and computed again.
    recomputed: int


@dataclass(frozen=True, slots=True)
class Interception:
    """One pause of a request."""

    #: The calls, with their spans in the stream.
    calls: tuple[Call, ...]
    #: One for each call; empty if the request ended before they came.
    results: tuple[Result, ...] = ()
    #: The returned tokens in the request's `token_ids`.
    span: tuple[int, int] = (0, 0)
    #: From the pause to the last result.
    duration_s: float = 0.0
    #: Where the context was when the request ran again; None if it never did.
    context: ContextUse | None = None
    #: From the last result to the next token, or to the request's end before it; None without results.
    delay_s: float | None = None
    #: The pause, in seconds of the engine's clock.
    began_s: float = 0.0
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The result of an asynchronous call in a request's tokens."""

    #: A call without a name stands for markup that called nothing; the result explains the mistake.
    call: Call
    result: Result
    #: The interrupt in the request's `token_ids`.
    span: tuple[int, int]
    __repr__ = short_repr


class Logprob(NamedTuple):
    """The natural logarithm of a token's probability, by the model's own logits."""

    logprob: float
    #: Place among all tokens, the likeliest being 1.
    rank: int
    #: The token's text; None without a tokenizer.
    decoded_token: str | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens(Sequence[Any]):
    """For every token, an ascending int32 array of the tokens that could be drawn in its place.

    None stands where all could be drawn, and for tokens that the model did not generate. `sets` has the arrays, or functions
    that make them.
    """

    sets: Sequence[Any]
    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, index: Any) -> Any:
        chosen = self.sets[index]
        return KeptTokens(chosen) if isinstance(index, slice) else chosen() if callable(chosen) else chosen


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The output of one request."""

    #: Place among the request's outputs.
    index: int
    #: The text after the prompt, results of tools included.
    text: str
    #: The stream after the prompt, tokens returned by tools included.
    token_ids: list[int]
    #: "stop" (end of text, stop token or stop string), "length", "abort", "error", or "tool_calls": a chat's turn ended in
    #: calls that the caller has to run, or (`stop_reason` "max_rounds") that are not run.
    finish_reason: FinishReason
    #: The stop string or token id that matched, or the error.
    stop_reason: str | int | None = None
    #: Tokens that the model generated.
    num_generated: int = 0
    interceptions: tuple[Interception, ...] = ()
    #: If asked for, those of each of `token_ids` and of the likeliest tokens in its place; None for tokens that tools
    #: returned.
    logprobs: list[dict[int, Logprob] | None] | None = None
    #: Added by a chat to its conversation, OpenAI-style: calls, their results and the answer, without markup; a turn's
    #: reasoning is its `reasoning_content`.
    messages: tuple[Mapping[str, Any], ...] = ()
    #: Of all generated tokens, if `logprobs` were asked for.
    cumulative_logprob: float | None = None
    interrupts: tuple[Interrupt, ...] = ()
    #: Asynchronous calls whose results the model did not read, since the request ended. One without a name is markup that
    #: called nothing: unfinished at the end, or a mistake whose answer was not read.
    cancelled: tuple[Call, ...] = ()
    #: If asked for, an int16 array `[tokens, layers, experts]`: for each token of the prompt and of `token_ids` but the last,
    #: which no step has computed, its experts in each layer that has some, the best first.
    routed_experts: Any = None
    #: Ranges of `token_ids` that the model did not generate: results of calls, and the chat template's text around them.
    external_spans: tuple[tuple[int, int], ...] = ()
    #: Places in `token_ids` from which on a version of the weights generated the tokens, and that version.
    version_runs: tuple[tuple[int, int], ...] = ()
    #: If asked for, the log probability of each of `token_ids` in the distribution that it was drawn from; None for tokens
    #: that tools returned.
    processed_logprobs: list[float | None] | None = None
    #: If asked for, the tokens that could be drawn in the place of each of `token_ids`.
    kept_tokens: KeptTokens | None = None
    #: For each turn of a chat its reasoning, texts and calls, in the order in which the model wrote them.
    pieces: tuple[tuple[Any, ...], ...] = ()
    #: Tokens of a chat's reasoning.
    num_reasoning: int = 0
    __repr__ = short_repr

    @property
    def loss_mask(self) -> list[int]:
        """For each of `token_ids`, 1 if the model generated it, 0 if a tool returned it or a template wrote it."""
        mask = [1] * len(self.token_ids)
        for start, end in self.external_spans:
            mask[start:end] = [0] * (end - start)
        return mask

    @property
    def weight_versions(self) -> list[int]:
        """For each of `token_ids`, the version of its weights, plus its adapter's; -1 for tokens that were not generated."""
        versions = [-1] * len(self.token_ids)
        ends = [start for start, _ in self.version_runs[1:]] + [len(versions)]
        for (start, version), end in zip(self.version_runs, ends, strict=False):
            versions[start:end] = [version] * (end - start)
        return [version if mask else -1 for version, mask in zip(versions, self.loss_mask, strict=True)]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds of the engine's clock, `door_s` at the door; token counts over the request's life."""

    arrival_s: float
    first_token_s: float | None
    finished_s: float
    intercepted_s: float
    recomputed_tokens: int
    copied_out_tokens: int
    copied_in_tokens: int
    preemptions: int
    door_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, as users of vLLM know it."""

    request_id: str
    prompt: str | None
    #: Ids of the prompt, as the request had them.
    prompt_tokens: Sequence[int]
    outputs: list[CompletionOutput]
    #: Prompt tokens whose KV was found, on the device or on the host, and not computed.
    num_cached_tokens: int
    metrics: RequestMetrics = field(repr=False)
    finished: bool = True
    #: If asked for, those of each token of the prompt and of the likeliest tokens in its place; None for the first, before
    #: which there is nothing.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    #: The retained context that the request extends, up to the first token that differs; None if there is none.
    retained: ContextUse | None = None
    __repr__ = short_repr

    @property
    def prompt_token_ids(self) -> list[int]:
        """`prompt_tokens` as a new list, which takes milliseconds for a long prompt."""
        return list(self.prompt_tokens)

    @property
    def interceptions(self) -> tuple[Interception, ...]:
        """Every pause of the first output."""
        return self.outputs[0].interceptions
