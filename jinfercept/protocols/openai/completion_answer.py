"""Outputs of requests as OpenAI's text completion: one object, or a stream of chunks."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, final

from jinfercept.calls import Call
from jinfercept.engine.parallel_sampling import joined
from jinfercept.engine.streaming import AsyncStream
from jinfercept.events import Called, Event, Finished, Intercepted, Interrupted, Resumed, Token
from jinfercept.outputs import CompletionOutput, Interrupt, RequestOutput
from jinfercept.protocols.answers import UsageCount
from jinfercept.protocols.encoding import DONE, Lazy, encode_event
from jinfercept.protocols.errors import ApiError, check_finish
from jinfercept.protocols.openai.completion_schemas import CompletionBody
from jinfercept.protocols.openai.logprobs import (
    Reported,
    completion_logprobs,
    encoded_experts,
    is_small,
    prompt_logprobs,
)
from jinfercept.protocols.schemas import training_fields
from jinfercept.request import Request
from jinfercept.tokenizer.tokenizer import Tokenizer

_CallEvent = Called | Interrupted | Intercepted | Resumed
"""The events of a request that calls in markup, beside its tokens and its end."""


class _StreamedText:
    """State of one streamed choice: its unreported tokens, and the length of the text so far in characters."""

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.begun = False
        self.tokens: list[Reported] = []
        self.offset = 0


@dataclass(slots=True)
class _PromptReport:
    """Log probabilities of a prompt's tokens, for all its choices.

    Attributes:
        scores: vLLM's `prompt_logprobs`.
        echoed: the beginning of each `logprobs`, if the prompt is echoed.
    """

    scores: Lazy | list[Any] | None = None
    echoed: Mapping[str, Iterable[Any]] = field(default_factory=dict[str, Iterable[Any]])
    length: int = 0


@final
class CompletionAnswer:
    """The text completion for one body.

    Args:
        requests: made of the body; forks follow the request they are forked from.
        tokenizer: of the model; None if it has none.
        details: fields of the log line; filled in as they become known.
    """

    def __init__(
        self,
        name: str,
        model: str,
        body: CompletionBody,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        details: dict[str, Any],
    ) -> None:
        self._body, self._requests, self._tokenizer = body, requests, tokenizer
        if tokenizer is None and (body.echo or body.logprobs is not None):
            raise ApiError.bad(
                "echo and logprobs need a tokenizer, and the model has none", "echo" if body.echo else "logprobs"
            )
        self._head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
        details["id"] = name
        self._only_echo = body.max_tokens == 0
        self.usage = UsageCount(requests, details, silent=self._only_echo)
        self._choices = {request.id: _StreamedText(index, request) for index, request in enumerate(requests)}
        self._calls = any(request.markup is not None for request in requests)

    async def whole(self, outputs: Mapping[str, RequestOutput]) -> dict[str, Any]:
        """The whole completion, of outputs by request id; a large one is made in a thread."""
        return self._whole(outputs) if self.is_small(outputs) else await asyncio.to_thread(self._whole, outputs)

    def _whole(self, outputs: Mapping[str, RequestOutput]) -> dict[str, Any]:
        for output in outputs.values():
            self.usage.add(output)
        choices: list[dict[str, Any]] = []
        completions: list[CompletionOutput] = []
        for output in joined(self._requests, outputs):
            report = self._prompt_report(output)
            for completion in output.outputs:
                choices.append(self._whole_choice(len(choices), output, completion, report))
                completions.append(completion)
        answer = self._head | {"choices": choices, "usage": self.usage.body()}
        return answer | ({"jinfercept": _answer_report(enumerate(completions))} if self._calls else {})

    def is_small(self, outputs: Mapping[str, RequestOutput]) -> bool:
        """Whether `whole` is short work."""
        prompt = (self._body.prompt_logprobs, self._body.logprobs if self._body.echo else None)
        return is_small(outputs.values(), prompt, self._body.logprobs)

    def _prompt_report(self, output: RequestOutput) -> _PromptReport:
        """Built once for all choices of a prompt."""
        body, report, reported = self._body, _PromptReport(), output.prompt_logprobs
        if body.prompt_logprobs is not None and reported is not None:
            report.scores = prompt_logprobs(reported)
        if body.echo and body.logprobs is not None and self._tokenizer is not None:
            tokens = list(zip(output.prompt_tokens, reported or [None] * len(output.prompt_tokens), strict=True))
            report.echoed = completion_logprobs(tokens, body.logprobs, self._tokenizer)
            report.length = sum(len(self._tokenizer.token_text(token_id)) for token_id, _ in tokens)
        if len(output.outputs) > 1:
            report.scores = None if report.scores is None else list(report.scores)
            report.echoed = {name: list(items) for name, items in report.echoed.items()}
        return report

    def _whole_choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, report: _PromptReport
    ) -> dict[str, Any]:
        body, echo = self._body, ""
        text, token_ids = completion.text, completion.token_ids
        reported = list(zip(token_ids, completion.logprobs or [None] * len(token_ids), strict=True))
        if self._only_echo:
            text, token_ids, reported = "", [], []
        if body.echo:
            echo = self._echo(output.prompt, output.prompt_tokens)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.logprobs is not None and self._tokenizer is not None:
            own = completion_logprobs(reported, body.logprobs, self._tokenizer, report.length)
            echoed = report.echoed
            choice["logprobs"] = {name: Lazy(chain(echoed.get(name, ()), items)) for name, items in own.items()}
        if report.scores is not None:
            choice["prompt_logprobs"] = report.scores
        if body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": output.prompt_token_ids}
        choice |= training_fields(body, completion)
        if body.return_routed_experts:
            choice["routed_experts"] = encoded_experts(completion.routed_experts)
        return choice

    async def stream(self, stream: AsyncStream) -> AsyncGenerator[bytes]:
        """Server-sent events of the engine's events of the requests."""
        options = self._body.stream_options
        async for event in stream:
            for chunk in self._chunks(event):
                yield encode_event(chunk)
        if options is not None and options.include_usage:
            yield encode_event(self._head | {"choices": [], "usage": self.usage.body()})
        yield DONE

    def _chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Token):
            choice = self._choices[event.request_id]
            self.usage.count(1)
            if not self._only_echo:
                choice.tokens.append((event.token_id, event.logprobs))
            text = self._begin(choice) + ("" if self._only_echo else event.text)
            if text or self._carries:
                yield self._chunk(choice, text)
        elif isinstance(event, Called | Interrupted | Intercepted | Resumed):
            choice, text = self._choices[event.request_id], ""
            if isinstance(event, Interrupted | Resumed):
                text = event.text
                choice.tokens += [(token_id, None) for token_id in event.token_ids]
            yield self._chunk(choice, text) | {"jinfercept": _event_report(event)}
        elif isinstance(event, Finished):
            choice, [completion] = self._choices[event.request_id], event.output.outputs
            self.usage.add(event.output)
            check_finish(event.output)
            text = self._begin(choice) + ("" if self._only_echo else event.text)
            chunk = self._chunk(choice, text, completion)
            yield chunk | ({"jinfercept": _answer_report([(choice.index, completion)])} if self._calls else {})

    @property
    def _carries(self) -> bool:
        """Whether chunks report their tokens."""
        return self._body.logprobs is not None or bool(self._body.return_token_ids)

    def _begin(self, choice: _StreamedText) -> str:
        """The echo of the prompt, before the first token of a text."""
        if choice.begun:
            return ""
        request = choice.request
        return self._echo(request.prompt, request.prompt_token_ids) if self._body.echo else ""

    def _chunk(self, choice: _StreamedText, text: str, end: CompletionOutput | None = None) -> dict[str, Any]:
        body = self._body
        choice_object: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": end.finish_reason if end else None,
        }
        if end is not None:
            choice_object["stop_reason"] = end.stop_reason
        if body.logprobs is not None and self._tokenizer is not None and choice.tokens:
            choice_object["logprobs"] = completion_logprobs(
                choice.tokens, body.logprobs, self._tokenizer, choice.offset
            )
        if body.return_token_ids:
            choice_object["token_ids"] = [token_id for token_id, _ in choice.tokens]
            if not choice.begun:
                choice_object["prompt_token_ids"] = list(choice.request.prompt_token_ids)
        choice.begun, choice.tokens = True, []
        choice.offset += len(text)
        chunk = self._head | {"choices": [choice_object]}
        options = body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.usage.body() if options.continuous_usage_stats else None
        return chunk

    def _echo(self, prompt: str | None, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids) if prompt is None else prompt


def _event_report(event: _CallEvent) -> dict[str, Any]:
    """The object `jinfercept` of a chunk for an event: `called`, `interrupts` or `trap`."""
    match event:
        case Called():
            return {"called": [{**_named(event.call), "arguments": event.call.arguments}]}
        case Intercepted():
            return {"trap": {"calls": [call.id for call in event.calls]}}
        case Interrupted() | Resumed():
            return {"interrupts": [_interrupt(interrupt) for interrupt in event.interrupts]}


def _answer_report(completions: Iterable[tuple[int, CompletionOutput]]) -> Mapping[str, Any]:
    """The object `jinfercept` of an answer: the `interrupts`, the `cancelled` calls and the `traps` of all its choices."""
    report: dict[str, list[dict[str, Any]]] = {"interrupts": [], "cancelled": [], "traps": []}
    for index, completion in completions:
        choice = {"choice": index}
        report["interrupts"] += [choice | _interrupt(interrupt) for interrupt in completion.interrupts]
        report["cancelled"] += [choice | _named(call) for call in completion.cancelled]
        report["traps"] += [
            choice
            | {
                "calls": [call.id for call in pause.calls],
                "seconds": round(pause.duration_s, 4),
                "context": pause.context._asdict() if pause.context is not None else None,
            }
            for pause in completion.interceptions
        ]
    return report


def _interrupt(interrupt: Interrupt) -> dict[str, Any]:
    result = interrupt.result
    return {**_named(interrupt.call), "status": result.status, "seconds": round(result.duration_s, 4)}


def _named(call: Call) -> dict[str, Any]:
    """A call by its id and its tool; None for markup that called nothing."""
    return {"id": call.id, "name": call.name or None}
