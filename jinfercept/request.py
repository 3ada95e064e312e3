"""What flows between a client, the engine and the endpoints. Frozen; imports nothing heavy."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from jinfercept.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
Status = Literal["ok", "error", "timeout", "too_large", "empty", "unknown_tool"]
MAX_TEMPERATURE = 1e6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are drawn and when it ends. Names and defaults as in vLLM.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: tokens to generate; tokens returned by tools do not count.
        seed: fixes the draw, whatever else is in the batch; None derives one from the engine's seed and the request's number.
        stop: strings that end the text; they are cut off unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the request, besides the model's end-of-text tokens.
        ignore_eos: go on after an end-of-text token.
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(stop, list | tuple) or any(not isinstance(text, str) or not text for text in stop):
            raise RequestError(
                "stop is one or several texts that are not empty", got=repr(self.stop), fix="leave it out"
            )
        if not isinstance(ids, list | tuple) or any(type(token) is not int for token in ids):
            raise RequestError("stop_token_ids is a list of token ids", got=repr(ids), fix="give whole numbers")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        if not _is_number(self.temperature) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature is a number from 0 to {MAX_TEMPERATURE:g}", got=repr(self.temperature), fix="0 is greedy"
            )
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise RequestError(
                "max_tokens is a whole number, at least 1", got=repr(self.max_tokens), fix="ask for a token"
            )
        if self.seed is not None and type(self.seed) is not int:
            raise RequestError("seed is a whole number", got=repr(self.seed), fix="leave it out, or give one")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Call:
    """What the model said to an endpoint.

    Attributes:
        name: the tool that is called.
        arguments: what the model wrote for it.
        span: the call's first token and the one after its last, counted in the request's `token_ids`.
        expected_s: how long it will take, if somebody says so.
    """

    name: str
    arguments: str
    span: tuple[int, int] = (0, 0)
    expected_s: float | None = None


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
        function: takes the text between `start` and `stop`, returns text (or token ids); sync or async.
        name: defaults to the function's name.
        start: text that opens a call, as the model writes it; None if calls are found in another way.
        stop: text that ends it and hands over.
        result: how the returned text is put into the stream; `{}` is the text.
        timeout_s: after so many seconds the model reads that the tool timed out.
        max_result_tokens: a longer result is cut, and says so.
    """

    function: Callable[[str], object | Awaitable[object]]
    name: str = ""
    start: str | None = None
    stop: str | None = None
    result: str = "{}"
    timeout_s: float = 60.0
    max_result_tokens: int = 1024

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError("a tool needs something to call", got=repr(self.function), fix="pass a Python function")
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
            The calls that it completes: the request pauses until all of them have returned. Usually none.
        """
        ...


class Detector(Protocol):
    """Says what is a call."""

    def watch(self) -> Watch:
        """A fresh look-out for one request."""
        ...


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
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tools: Mapping[str, Tool] = field(default_factory=dict)
    detector: Detector | None = None
    cache_salt: str = ""
    prompt: str | None = None


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


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """What one request produced.

    Attributes:
        index: place among the request's outputs.
        text: the text after the prompt, results of tools included.
        token_ids: the stream after the prompt, tokens returned by tools included.
        finish_reason: "stop" (end of text, stop token or stop string), "length", "abort" or "error".
        stop_reason: the stop string or token id that matched, or the error.
        num_generated: tokens that the model generated.
        interceptions: every pause, in order.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    num_generated: int = 0
    interceptions: tuple[Interception, ...] = ()


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
        num_cached_tokens: prompt tokens whose KV was found and not computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool = True

    @property
    def interceptions(self) -> tuple[Interception, ...]:
        """Every pause of the first output."""
        return self.outputs[0].interceptions


@dataclass(frozen=True, slots=True)
class Token:
    """A token was generated; `text` is what may be shown now (it can lag behind the token)."""

    request_id: str
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Intercepted:
    """The request has called out and is paused."""

    request_id: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """All calls have returned; `token_ids` were appended and `text` may be shown."""

    request_id: str
    results: tuple[Result, ...]
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is over; `text` is what was still held back."""

    request_id: str
    output: RequestOutput
    text: str


Event = Token | Intercepted | Resumed | Finished
