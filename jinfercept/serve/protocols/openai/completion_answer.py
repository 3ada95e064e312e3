"""Text completions: the body, and outputs of requests as OpenAI's answer, one object or a stream of chunks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, final

from pydantic import BeforeValidator, Discriminator, Field, Tag

from jinfercept.calls import Call
from jinfercept.chat.tokenizer.decoding import IncrementalDetokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.events import Called, Event, Finished, Intercepted, Interrupted, Resumed, Token
from jinfercept.outputs import CompletionOutput, Interrupt, Logprob, RequestOutput
from jinfercept.request import Request
from jinfercept.serve.protocols.answers import ServerToolCalls
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.chat_answer import ChoicesAnswer
from jinfercept.serve.protocols.openai.logprobs import Reported, completion_logprobs, encoded_experts, prompt_logprobs
from jinfercept.serve.protocols.schemas import (
    FIRST_ERROR,
    Body,
    ModelName,
    Natural,
    NumBest,
    SamplingBody,
    Text,
    TokenId,
    training_fields,
)

MAX_PROMPTS = 2048

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=2**22), FIRST_ERROR]


def _kind(prompt: Any) -> str:
    """Tag of a prompt's type, by its first item: the other types are not tried, so errors are about the type that is meant."""
    if not isinstance(prompt, list) or not prompt:
        return "Texts" if isinstance(prompt, list) else "Text"
    return {int: "Ids", list: "IdLists"}.get(type(prompt[0]), "Texts")


Prompts = Annotated[
    Annotated[Text, Tag("Text")]
    | Annotated[Ids, Tag("Ids")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), FIRST_ERROR, Tag("Texts")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS), FIRST_ERROR, Tag("IdLists")],
    Discriminator(_kind),
]
"""A text, its token ids, or several of one kind."""


class CompletionBody(SamplingBody):
    """Prompts, and the parameters of their continuations."""

    prompt: Prompts
    max_tokens: Natural | None = None
    logprobs: Annotated[NumBest | None, BeforeValidator(lambda number: int(number) if number is True else number)] = (
        None
    )
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokensBody(Body):
    """Token ids, and the parameters of their continuations by vLLM's names."""

    model: ModelName | None = None
    token_ids: Ids
    sampling_params: dict[str, Any]


_CallEvent = Called | Interrupted | Intercepted | Resumed
"""The events of a request that calls in markup, beside its tokens and its end."""


class _StreamedText:
    """State of one streamed choice: its unreported tokens, and the complete characters of those that were reported."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        self.index, self.request = index, request
        self.begun = False
        self.tokens: list[Reported] = []
        self._decoder = tokenizer and IncrementalDetokenizer(tokenizer, request.params.skip_special_tokens)
        self._offset = 0

    def offsets(self) -> list[int]:
        """Of each unreported token, the characters of the text that are complete before it."""
        assert self._decoder is not None
        offsets = list[int]()
        for token_id, _ in self.tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.add(token_id))
        return offsets


class CompletionAnswer(ChoicesAnswer):
    """The text completion for one body; forks follow the request they are forked from."""

    def __init__(
        self,
        name: str,
        model: str,
        body: CompletionBody,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        details: dict[str, Any],
    ) -> None:
        if tokenizer is None and (body.echo or body.logprobs is not None):
            raise ApiError.bad(
                "echo and logprobs need a tokenizer, and the model has none", "echo" if body.echo else "logprobs"
            )
        kind, self._only_echo = "text_completion", body.max_tokens == 0
        super().__init__(kind, kind, name, model, body.stream_options, requests, details, silent=self._only_echo)
        self._body, self._tokenizer = body, tokenizer
        self._choices = {request.id: _StreamedText(index, request, tokenizer) for index, request in enumerate(requests)}
        self._prompt_scores = dict[str, Sequence[Mapping[int, Logprob] | None] | None]()  # by their first requests
        self.tool_calls: ServerToolCalls | None = None
        self._calls = any(request.markup is not None for request in requests)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = list(map(self._whole_choice, self._choices.values(), outputs))
        answer = self._head | {"choices": choices, "usage": self.usage.body()}
        completions = enumerate(output.outputs[0] for output in outputs)
        return answer | ({"jinfercept": _answer_report(completions)} if self._calls else {})

    def _whole_choice(self, choice: _StreamedText, output: RequestOutput) -> dict[str, Any]:
        body, [completion] = self._body, output.outputs
        text = self._begin(choice)
        prompt_scores = self._prompt_scores.setdefault(
            choice.request.leader or output.request_id, output.prompt_logprobs
        )
        if body.echo and body.logprobs is not None:
            choice.tokens += _reported(output.prompt_tokens, prompt_scores)
        if not self._only_echo:
            text += completion.text
            choice.tokens += _reported(completion.token_ids, completion.logprobs)
        shown = self._shown(choice, text, completion) | training_fields(body, completion)
        if body.prompt_logprobs is not None and prompt_scores is not None:
            shown["prompt_logprobs"] = prompt_logprobs(prompt_scores)
        if body.return_token_ids and body.echo:
            shown["token_ids"] = [] if self._only_echo else completion.token_ids
        if body.return_routed_experts:
            shown["routed_experts"] = encoded_experts(completion.routed_experts)
        return shown

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        choice = self._choices[event.request_id]
        match event:
            case Token():
                self.usage.count(1)
                if not self._only_echo:
                    choice.tokens.append((event.token_id, event.logprobs))
                text = self._begin(choice) + ("" if self._only_echo else event.text)
                if text or self._carries:
                    yield self._chunk(self._shown(choice, text))
            case Called() | Intercepted():
                yield self._chunk(self._shown(choice, "")) | {"jinfercept": _event_report(event)}
            case Interrupted() | Resumed():
                choice.tokens += _reported(event.token_ids, None)
                yield self._chunk(self._shown(choice, event.text)) | {"jinfercept": _event_report(event)}
            case Finished():
                [completion] = event.output.outputs
                text = self._begin(choice) + ("" if self._only_echo else event.text)
                report = {"jinfercept": _answer_report([(choice.index, completion)])} if self._calls else {}
                yield self._chunk(self._shown(choice, text, completion)) | report
                yield from self._last()
            case _:
                pass

    @property
    def _carries(self) -> bool:
        return self._body.logprobs is not None or bool(self._body.return_token_ids)

    def _begin(self, choice: _StreamedText) -> str:
        """The echo of the prompt, before the first token of a text."""
        request = choice.request
        if choice.begun or not self._body.echo:
            return ""
        assert self._tokenizer is not None
        return self._tokenizer.decode(request.prompt_token_ids) if request.prompt is None else request.prompt

    def _shown(self, choice: _StreamedText, text: str, end: CompletionOutput | None = None) -> dict[str, Any]:
        body = self._body
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": end.finish_reason if end else None,
        }
        if end is not None:
            shown["stop_reason"] = end.stop_reason
        if body.logprobs is not None and self._tokenizer is not None and choice.tokens:
            offsets = choice.offsets()
            shown["logprobs"] = completion_logprobs(choice.tokens, offsets, body.logprobs, self._tokenizer)
        if body.return_token_ids:
            shown["token_ids"] = [token_id for token_id, _ in choice.tokens]
            if not choice.begun:
                shown["prompt_token_ids"] = list(choice.request.prompt_token_ids)
        choice.begun, choice.tokens = True, []
        return shown


_OF_TOKENS = ("index", "token_ids", "logprobs", "finish_reason")


@final
class TokensAnswer(CompletionAnswer):
    """The same in the form of vLLM's `/inference/v1/generate`."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = super().whole(outputs)["choices"]
        for choice in choices:
            if (report := choice["logprobs"]) is not None:
                choice["logprobs"] = {"content": [{"logprob": value} for value in report["token_logprobs"]]}
        return {
            "choices": [{name: choice[name] for name in _OF_TOKENS} for choice in choices],
            "prompt_logprobs": choices[0].get("prompt_logprobs"),
        }


def _reported(token_ids: Sequence[int], scores: Sequence[Mapping[int, Logprob] | None] | None) -> list[Reported]:
    return list(zip(token_ids, scores or [None] * len(token_ids), strict=True))


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
    return {"id": call.id, "name": call.name or None}
