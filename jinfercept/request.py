"""What flows between a client, the engine and the endpoints. Frozen; imports nothing heavy."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from jinfercept.errors import RequestError
from jinfercept.sampling_params import SamplingParams as SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]
Status = Literal["ok", "error", "timeout", "too_large", "empty", "unknown_tool"]

READER = "<reader>"
"""By which name the time is learnt that readers take after an answer, as that of tools by theirs. No tool may have it."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_tool_name(name: str) -> None:
    """Raise `RequestError` if a tool cannot have this name."""
    if name == READER:
        raise RequestError(f"no tool may be called {READER}", got=name, fix="give it another name")


@dataclass(frozen=True, slots=True)
class Call:
    """What the model said to an endpoint.

    Attributes:
        name: the tool that is called.
        arguments: what the model wrote for it.
        span: the call's first token and the one after its last, counted in the request's `token_ids`.
        expected_s: how long it will take, if somebody says so.
        id: by which a chat template ties the result to the call; "" if nothing needs one.
        by_caller: whoever made the request runs it: the request does not pause, its turn is its last, and the other calls of
            that turn are run by nobody here.
    """

    name: str
    arguments: str
    span: tuple[int, int] = (0, 0)
    expected_s: float | None = None
    id: str = ""
    by_caller: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What came back. A failure is a result too: `text` then says what went wrong, for the model to read."""

    text: str
    status: Status = "ok"
    token_ids: tuple[int, ...] | None = None
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tool:
    """Something a model can call: a Python function, and how its call and its result look in the text.

    Attributes:
        function: takes the text between `start` and `stop`, returns text (or token ids); sync or async. In a chat: takes its
            declared arguments by name, returns anything that is text or JSON.
        name: defaults to the function's name.
        start: text that opens a call, as the model writes it; None if calls are found in another way.
        stop: text that ends it and hands over.
        result: how the returned text is put into the stream; `{}` is the text.
        timeout_s: after so many seconds the model reads that the tool timed out.
        max_result_tokens: a longer result is cut, and says so.
    """

    function: Callable[..., object | Awaitable[object]]
    name: str = ""
    start: str | None = None
    stop: str | None = None
    result: str = "{}"
    timeout_s: float = 60.0
    max_result_tokens: int = 1024

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError("a tool needs something to call", got=repr(self.function), fix="pass a Python function")
        check_tool_name(self.name)
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))
        marks = (self.start, self.stop)
        if marks != (None, None) and not all(isinstance(mark, str) and mark for mark in marks):
            raise RequestError(
                f"tool {self.name!r} needs both start and stop, or neither",
                got=f"start={self.start!r}, stop={self.stop!r}",
                fix="give the text that opens a call and the text that ends it",
            )
        if not isinstance(self.result, str) or "{}" not in self.result:
            raise RequestError(
                f"the result of tool {self.name!r} has no place", got=repr(self.result), fix="put {} into it"
            )
        if not (_is_number(self.timeout_s) and self.timeout_s > 0):
            raise RequestError(f"tool {self.name!r} needs a time-out", got=repr(self.timeout_s), fix="seconds, above 0")
        if type(self.max_result_tokens) is not int or self.max_result_tokens < 1:
            raise RequestError(
                f"tool {self.name!r} needs room for its result",
                got=repr(self.max_result_tokens),
                fix="a whole number from 1",
            )


class Watch(Protocol):
    """Looks for calls in one request's generated tokens; what tools return is not shown to it."""

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        """The next generated token.

        Args:
            index: its place in the request's `token_ids`.
            token_id: the token.
            text: the text that has become certain with it ("" without a tokenizer).

        Returns:
            The calls that it completes: the request pauses until all of them have returned, unless one is `by_caller`.
            Usually none.
        """
        ...


class Detector(Protocol):
    """Says what is a call."""

    def watch(self) -> Watch:
        """A fresh look-out for one request."""
        ...


class Renderer(Protocol):
    """Writes what a request reads after a pause."""

    def render(
        self, calls: tuple[Call, ...], results: tuple[Result, ...], room: int
    ) -> tuple[list[int], tuple[Result, ...]]:
        """All results of one pause.

        Args:
            calls: what was asked for.
            results: one for each.
            room: tokens that the sequence can still take.

        Returns:
            At most `room` tokens, and the results as they are in them.
        """
        ...


class Constraint(Protocol):
    """What one request's generated text may be; what tools return is no part of it.

    Attributes:
        ended: nothing but the end can follow.
    """

    ended: bool

    def allowed(self) -> Any:
        """The tokens that may come next, end tokens among them: bit `v % 32` of word `v // 32` of an array of uint32."""
        ...

    def accept(self, token_id: int) -> None:
        """The next generated token."""
        ...


class Grammar(Protocol):
    """Says what a text may be."""

    def constrain(self, end_token_ids: frozenset[int]) -> Constraint | None:
        """A text that has not begun, and that these tokens end where it may end; None if all that comes is free."""
        ...


@dataclass(frozen=True, slots=True)
class Keep:
    """That somebody is expected to go on from where a request ends: its context stays, as that of a paused request does.

    A later request goes on from it that names the request (`Request.follows`) or the session, or whose prompt begins with the
    kept request's own. Until then it may lose any page, at any time, to whoever runs.

    Attributes:
        session: a name for the chain of requests, of which one context is kept; "" for none.
        expected_s: seconds until the follow-up, if somebody says so.
        reader: under which name the time is learned that passes after an answer; after calls it is the tools' names.
        last: it goes on from the session, and nobody goes on from it.
    """

    session: str = ""
    expected_s: float | None = None
    reader: str = READER
    last: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the engine takes it.

    Attributes:
        id: unique among the requests that are not finished.
        prompt_token_ids: at least one.
        params: how to sample.
        tools: what may be called, by name.
        detector: how calls are found; None if the request never calls.
        cache_salt: requests with different salts share no pages.
        prompt: the prompt's text, given back in the output.
        grammar: `params.structured_outputs`, compiled, or what a turn must be that has to call. A text goes on after a call; if
            the call ended it, another begins. The request ends where nothing more can follow; one with a detector draws an end
            token there, which may end a call.
        render: writes the results of calls; by default each stands where its tool says.
        leader: id of a request with the same prompt that was submitted before; this one starts when that has computed it.
        keep: who is expected to go on from it; None if nobody is.
        follows: id of the finished request that it goes on from, if that was kept.
        priority: a smaller one is served first, whenever the request arrived.
        tenant: on whose behalf it runs; tenants share the engine fairly. "" is a tenant too, the only one without API keys.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tools: Mapping[str, Tool] = field(default_factory=dict)
    detector: Detector | None = None
    cache_salt: str = ""
    prompt: str | None = None
    grammar: Grammar | None = None
    render: Renderer | None = None
    leader: str | None = None
    keep: Keep | None = None
    follows: str | None = None
    priority: int = 0
    tenant: str = ""


class ContextUse(NamedTuple):
    """What became of a context during an interception, in tokens, as found when the request ran again.

    Attributes:
        kept: still on the device.
        copied_in: brought back from the host.
        recomputed: lost, and computed again.
    """

    kept: int
    copied_in: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class Interception:
    """One pause of a request.

    Attributes:
        calls: what the model asked for, with their spans in the stream.
        results: one for each call; empty if the request ended before they came.
        span: the returned tokens in the request's `token_ids`.
        duration_s: from the pause to the last result.
        context: what was done with the context; None if the request never ran again.
    """

    calls: tuple[Call, ...]
    results: tuple[Result, ...] = ()
    span: tuple[int, int] = (0, 0)
    duration_s: float = 0.0
    context: ContextUse | None = None


class Logprob(NamedTuple):
    """How likely the model found a token, by its own logits.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1: none was likelier.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """What one request produced.

    Attributes:
        index: place among the request's outputs.
        text: the text after the prompt, results of tools included.
        token_ids: the stream after the prompt, tokens returned by tools included.
        finish_reason: "stop" (end of text, stop token or stop string), "length", "abort", "error", or "tool_calls": a chat's
            turn ended in calls that the caller has to run, or (`stop_reason` "max_rounds") that nobody runs.
        stop_reason: the stop string or token id that matched, or the error.
        num_generated: tokens that the model generated.
        interceptions: every pause, in order.
        logprobs: if asked for, of every one of `token_ids` the token's own and the likeliest ones'; None for tokens that tools
            returned.
        messages: what a chat adds to its conversation, OpenAI-style: calls, their results and the answer, without markup; a
            turn's reasoning as its `reasoning_content`.
        cumulative_logprob: of all that the model generated, if `logprobs` were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    num_generated: int = 0
    interceptions: tuple[Interception, ...] = ()
    logprobs: list[dict[int, Logprob] | None] | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds of the engine's clock; token counts over the request's life."""

    arrival_s: float
    first_token_s: float | None
    finished_s: float
    intercepted_s: float
    recomputed_tokens: int
    copied_out_tokens: int
    copied_in_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, as users of vLLM know it.

    Attributes:
        num_cached_tokens: prompt tokens whose KV was found, on the device or on the host, and not computed.
        adopted: what had become of the kept context that the request went on from, up to where both have the same tokens; None
            if it went on from none.
        prompt_logprobs: if asked for, of every token of the prompt its own and the likeliest ones' in its place; None for the
            first, before which there is nothing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    adopted: ContextUse | None = None

    @property
    def interceptions(self) -> tuple[Interception, ...]:
        """Every pause of the first output."""
        return self.outputs[0].interceptions
