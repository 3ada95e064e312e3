"""Requests, tools, calls, results and outputs: the values that pass between clients, the engine and tools. Frozen."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from jinfercept.errors import RequestError, shown
from jinfercept.sampling_params import SamplingParams as SamplingParams
from jinfercept.sampling_params import is_number
from jinfercept.short_repr import short_repr

if TYPE_CHECKING:
    from jinfercept.engine.protocols import CallMarkup
    from jinfercept.engine.session import Transcript

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]
Status = Literal["ok", "error", "timeout", "too_large", "empty", "unknown_tool", "started"]

CallMode = Literal["sync", "parallel", "async"]
"""When a call runs that is written in context markup language, see `AsyncCalls`."""

READER = "<reader>"
"""Name under which the time from an answer to its follow-up is learned, beside the names of tools. No tool has it."""


def check_tool_name(name: str) -> None:
    """Raise `RequestError` if a tool cannot have this name."""
    if not isinstance(name, str) or name == READER:
        raise RequestError(
            f"no tool may be called {READER}, or by what is no text", got=shown(name), fix="another name"
        )


def _name_of(function: Callable[..., object]) -> str:
    """A function's name; of an object that has none, its type's."""
    try:
        name = getattr(function, "__name__", "")
    except Exception:  # an object's own `__getattr__` may raise anything
        name = ""
    return name if isinstance(name, str) and name else type(function).__name__


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, as the model wrote it.

    Attributes:
        name: the tool that is called.
        arguments: what the model wrote for it.
        span: the call's first token and the one after its last, counted in the request's `token_ids`.
        expected_s: expected duration of the call, in seconds; None if it is to be estimated.
        id: ties the result to the call in a chat template; "" where the template needs none.
        by_caller: the client that made the request runs the call: the request ends with this turn instead of pausing, and the
            other calls of the turn are not run either.
    """

    name: str
    arguments: str
    span: tuple[int, int] = (0, 0)
    expected_s: float | None = None
    id: str = ""
    by_caller: bool = False
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call. A failure is a result too: `text` then says what went wrong, for the model to read.

    A result "started" is the placeholder of a call that goes on.
    """

    text: str
    status: Status = "ok"
    token_ids: tuple[int, ...] | None = None
    duration_s: float = 0.0
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Tool:
    """A Python function that a model can call, and how the call and its result look in the text.

    Attributes:
        function: takes the text between `start` and `stop`, returns text (or token ids); sync or async. In a chat: takes its
            declared arguments by name, returns anything that is text or JSON.
        name: defaults to the function's name.
        start: text that opens a call, as the model writes it; None if calls are found in another way.
        stop: text that ends it and hands over.
        result: how the returned text is put into the stream; `{}` is the text.
        timeout_s: seconds after which the result is that the tool timed out.
        max_result_tokens: tokens of the longest result; a longer one is cut, and its text says so.
        calls: when its calls run; None: as `AsyncCalls` says, else in a chat "parallel". In a chat the calls of one turn run at
            the same time ("parallel"), those behind a "sync" one when it has returned, and "async" ones return futures.
    """

    function: Callable[..., object | Awaitable[object]]
    _: KW_ONLY
    name: str = ""
    start: str | None = None
    stop: str | None = None
    result: str = "{}"
    timeout_s: float = 60.0
    max_result_tokens: int = 1024
    calls: CallMode | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError("a tool needs something to call", got=shown(self.function), fix="pass a Python function")
        check_tool_name(self.name)
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.function))
        marks = (self.start, self.stop)
        if marks != (None, None) and not all(isinstance(mark, str) and mark for mark in marks):
            raise RequestError(
                f"tool {self.name!r} needs both start and stop, or neither",
                got=f"start={self.start!r}, stop={self.stop!r}",
                fix="give the text that opens a call and the text that ends it",
            )
        if not isinstance(self.result, str) or "{}" not in self.result:
            raise RequestError(f"the result of tool {self.name!r} has no place", got=shown(self.result), fix="add {}")
        if not (is_number(self.timeout_s) and self.timeout_s > 0):
            raise RequestError(
                f"tool {self.name!r} needs a time-out", got=shown(self.timeout_s), fix="seconds, above 0"
            )
        if type(room := self.max_result_tokens) is not int or room < 1:
            what = f"tool {self.name!r} needs room for its result"
            raise RequestError(what, got=shown(room), fix="a whole number from 1")
        if self.calls not in (None, "sync", "parallel", "async"):
            raise RequestError(f"calls of tool {self.name!r}", got=shown(self.calls), fix="sync, parallel or async")
        if self.calls is not None and self.start is not None:
            raise RequestError(
                f"tool {self.name!r} is called by marks of its own or in the markup of asynchronous calls, not both",
                got=f"start={self.start!r}, calls={self.calls!r}",
                fix="leave start and stop out, or calls",
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
    """Finds calls."""

    def watch(self) -> Watch:
        """A watch for one request, of which nothing is generated."""
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
    """The state of a grammar after the generated text of one request; tokens that tools return are no part of it.

    Attributes:
        ended: whether nothing but the end can follow.
    """

    ended: bool

    def allowed(self) -> Any:
        """The tokens that may come next, end tokens among them: bit `v % 32` of word `v // 32` of an array of uint32."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the next generated token."""
        ...


class Grammar(Protocol):
    """A grammar of texts."""

    def constrain(self, end_token_ids: frozenset[int]) -> Constraint | None:
        """The constraint of an empty text, which may end with one of these tokens; None if every text is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Hint that a follow-up request will extend the context of this one: the context is retained, as that of a paused request.

    A request extends a retained context if it names the finished request (`Request.follows`) or the session, or if its prompt
    begins with the finished request's. Until then the policy may evict any page of it.

    Attributes:
        session: name of a chain of requests, of which one context is retained; "" for none.
        expected_s: expected seconds until the follow-up; None if they are to be estimated.
        reader: name under which the time after an answer is learned; after calls it is learned under the tools' names.
        last: the request extends the session's context and has no follow-up itself.
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
        tools: tools that may be called, by name.
        detector: finds calls; None if the request never calls, or if its transcript finds them.
        transcript: opens the transcript of a chat; None: the request is no chat.
        cache_salt: requests with different salts share no pages.
        prompt: the prompt's text, given back in the output.
        grammar: `params.structured_outputs`, compiled, or the grammar of a turn that has to call. The text continues after a
            call; if the call ended it, another text begins. The request ends where nothing more can follow; one with a detector
            draws an end token there, which may end a call.
        markup: finds asynchronous calls, and writes their results; None if the request makes none.
        render: writes the results of calls; None: each as its tool's `result` says.
        leader: id of a request with the same prompt that was submitted before; this one starts once that prompt is computed.
        index: place among the outputs of the prompt, each of which has random numbers of its own.
        follow_up: hint that another request will extend this one's context; None if none is expected.
        follows: id of the finished request whose retained context this one extends.
        priority: requests with a smaller one are served first, whenever they arrived.
        tenant: the owner of the request; tenants share the engine fairly. "" is a tenant too, the only one without API keys.
        weight: of the tenant: while tenants compete, their shares of memory·time are as their weights.
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
    index: int = 0
    follow_up: FollowUp | None = None
    follows: str | None = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    markup: "CallMarkup | None" = None
    transcript: "Callable[[Request], Transcript] | None" = None


class ContextUse(NamedTuple):
    """Tokens of a context after an interception, by where they were when the request ran again.

    Attributes:
        kept: tokens still on the device.
        copied_in: tokens copied in from the host.
        recomputed: tokens that were evicted and are computed again.
    """

    kept: int
    copied_in: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class Interception:
    """One pause of a request.

    Attributes:
        calls: the calls, with their spans in the stream.
        results: one for each call; empty if the request ended before they came.
        span: the returned tokens in the request's `token_ids`.
        duration_s: from the pause to the last result.
        context: where the context was when the request ran again; None if it never did.
    """

    calls: tuple[Call, ...]
    results: tuple[Result, ...] = ()
    span: tuple[int, int] = (0, 0)
    duration_s: float = 0.0
    context: ContextUse | None = None
    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The result of an asynchronous call in a request's tokens.

    Attributes:
        call: the call; one without a name where the request's markup called nothing, which the result explains.
        span: the interrupt in the request's `token_ids`.
    """

    call: Call
    result: Result
    span: tuple[int, int]
    __repr__ = short_repr


class Logprob(NamedTuple):
    """The log probability of a token, by the model's own logits.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: place among all tokens, the likeliest being 1.
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
            turn ended in calls that the caller has to run, or (`stop_reason` "max_rounds") that are not run.
        stop_reason: the stop string or token id that matched, or the error.
        num_generated: tokens that the model generated.
        interceptions: every pause, in order.
        interrupts: the results of asynchronous calls, in order.
        cancelled: asynchronous calls whose results the model did not read, since the request ended. One without a name is
            markup that called nothing: unfinished at the end, or a mistake whose answer was not read.
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
    interrupts: tuple[Interrupt, ...] = ()
    cancelled: tuple[Call, ...] = ()
    __repr__ = short_repr


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
        retained: where the retained context was that the request extends, up to the first token that differs; None if there is
            none.
        prompt_logprobs: if asked for, of every token of the prompt its own and the likeliest ones' in its place; None for the
            first, before which there is nothing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics = field(repr=False)
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    retained: ContextUse | None = None
    __repr__ = short_repr

    @property
    def interceptions(self) -> tuple[Interception, ...]:
        """Every pause of the first output."""
        return self.outputs[0].interceptions
