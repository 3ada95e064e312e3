"""Outputs of a chat's requests as OpenAI's chat completion: one object, or a stream of chunks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, final

from jinfercept import events
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.outputs import CompletionOutput, Logprob, RequestOutput
from jinfercept.request import Request
from jinfercept.serve.protocols.answers import (
    AnswerState,
    ServerToolCalls,
    UsageCount,
    call_reports,
    pieces_of,
    round_reports,
)
from jinfercept.serve.protocols.openai.chat_schemas import ChatBody, custom_input, named_function
from jinfercept.serve.protocols.openai.logprobs import (
    SMALL_ENTRIES,
    chat_logprobs,
    encoded_experts,
    prompt_logprobs,
)
from jinfercept.serve.protocols.schemas import StreamOptions, training_fields


@dataclass(slots=True)
class _StreamedChoice:
    """One of `n` streamed answers.

    Attributes:
        custom: places of the calls of custom tools, whose input comes in one chunk.
        token_ids, logprobs: reported with the next chunk.
    """

    index: int
    state: AnswerState
    begun: bool = False
    custom: set[int] = field(default_factory=set)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Mapping[int, Logprob] | None]] = field(default_factory=list)


class ChoicesAnswer:
    """What chat and text completions have in common: an answer of choices, one for each request.

    Args:
        kind, chunk_kind: `object` of a whole answer, and of a chunk.
        details: fields of the log line; filled in as they become known.
        silent: whether generated tokens are not counted, since the answer does not have them.
    """

    first: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        kind: str,
        chunk_kind: str,
        name: str,
        model: str,
        options: StreamOptions | None,
        requests: Sequence[Request],
        details: dict[str, Any],
        *,
        silent: bool = False,
    ) -> None:
        details["id"] = name
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._chunk_head = self._head | {"object": chunk_kind}
        self._requests, self.usage = requests, UsageCount(requests, details, silent=silent)
        self._includes_usage = options is not None and bool(options.include_usage)
        self._counts_on = self._includes_usage and options is not None and bool(options.continuous_usage_stats)

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        chunk = self._chunk_head | {"choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = self.usage.body() if self._counts_on else None
        return chunk

    def _last(self) -> Iterator[dict[str, Any]]:
        if self._includes_usage and not self.usage.num_running:
            yield self._chunk_head | {"choices": [], "usage": self.usage.body()}


@final
class ChatAnswer(ChoicesAnswer):
    """The chat completion for one body."""

    def __init__(
        self,
        name: str,
        model: str,
        body: ChatBody,
        requests: Sequence[Request],
        tool_calls: ServerToolCalls,
        tokenizer: Tokenizer,
        details: dict[str, Any],
    ) -> None:
        kind = "chat.completion"
        super().__init__(kind, f"{kind}.chunk", name, model, body.stream_options, requests, details)
        self.tool_calls: ServerToolCalls | None = tool_calls
        self._body, self._tokenizer = body, tokenizer
        self._wants_server_calls = bool(body.jinfercept and body.jinfercept.wants_server_tools)
        self._are_async = bool(body.jinfercept and body.jinfercept.async_calls is not None)
        self._custom = {named_function(tool) for tool in body.tools or () if tool["type"] == "custom"}
        self._choices = {
            request.id: _StreamedChoice(index, AnswerState(tool_calls.client_tools))
            for index, request in enumerate(requests)
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        first, completions = outputs[0], [output.outputs[0] for output in outputs]
        choices = [self._whole_choice(output.request_id, output.outputs[0]) for output in outputs]
        answer = self._head | {"choices": choices, "usage": self.usage.body()}
        if first.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = first.prompt_token_ids
        reports = [
            {"choice": place} | report
            for place, completion in enumerate(completions)
            for report in call_reports(completion)
        ]
        return answer | self._extension(reports, completions)

    def _whole_choice(self, request_id: str, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[request_id]
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for piece in pieces_of(completion):
            _add(message, self._delta(choice, choice.state.take(piece)))
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        if completion.logprobs is not None:
            choice.logprobs = list(zip(completion.token_ids, completion.logprobs, strict=True))
        if self._body.return_token_ids:
            choice.token_ids = [*compress(completion.token_ids, completion.loss_mask)]  # without results
        shown = self._shown(choice, completion) | training_fields(self._body, completion)
        if self._body.return_routed_experts:
            shown["routed_experts"] = encoded_experts(completion.routed_experts)
        return shown | {"message": message}

    def _finish_reason(self, completion: CompletionOutput) -> str:
        """The reason as in OpenAI and vLLM: `stop` instead of `tool_calls` if the body names the function to call."""
        chosen = self._body.tool_choice
        named = isinstance(chosen, dict) and "function" in chosen
        return "stop" if named and completion.finish_reason == "tool_calls" else completion.finish_reason

    def take(self, event: events.Event) -> Iterator[dict[str, Any]]:
        """The chunks for an event of one request. Chunks about the server's calls have an empty delta."""
        choice, end = self._choices[event.request_id], None
        delta, more = dict[str, Any](), dict[str, Any]()
        if isinstance(event, events.Token):
            self.usage.count(1)
            if self._body.logprobs:
                choice.logprobs.append((event.token_id, event.logprobs))
            if self._body.return_token_ids:
                choice.token_ids.append(event.token_id)
            if len(choice.logprobs) * (1 + (self._body.top_logprobs or 0)) < SMALL_ENTRIES:
                return
        number, ran = choice.state.num_rounds, choice.state.running
        match shown := choice.state.take(event):
            case events.Token():
                pass  # no chunk has more log probabilities
            case events.Intercepted(calls=calls):
                more = self._extension(round_reports(number, calls))
            case events.Resumed(results=results):
                more = self._extension(round_reports(number, ran, results))
            case events.Finished(output=output):
                [end] = output.outputs
                more = self._extension(call_reports(end), [end])
            case _:
                if not (delta := self._delta(choice, shown)):
                    return
        if not choice.begun:
            choice.begun, begun = True, {"role": "assistant", "content": ""}
            first = {"index": choice.index, "delta": begun, "logprobs": None, "finish_reason": None}
            prompt = list(self._requests[0].prompt_token_ids)
            yield self._chunk(first) | ({"prompt_token_ids": prompt} if self._body.return_token_ids else {})
        yield self._chunk(self._shown(choice, end) | {"delta": delta}) | more
        if end is not None:
            yield from self._last()

    def _shown(self, choice: _StreamedChoice, end: CompletionOutput | None) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "logprobs": None,
            "finish_reason": None if end is None else self._finish_reason(end),
        }
        if end is not None:
            shown["stop_reason"] = end.stop_reason
        if choice.logprobs:
            shown["logprobs"] = chat_logprobs(choice.logprobs, self._body.top_logprobs or 0, self._tokenizer)
        if choice.token_ids:
            shown["token_ids"] = choice.token_ids
        choice.logprobs, choice.token_ids = [], []
        return shown

    def _delta(self, choice: _StreamedChoice, event: events.Event | None) -> dict[str, Any]:
        match event:
            case events.Content(text):
                return {"content": text}
            case events.Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}  # vLLM's current name, and what most clients read
            case events.CallStarted(index, name, call_id) if name in self._custom:
                choice.custom.add(index)
                call = {"index": index, "id": call_id, "type": "custom", "custom": {"name": name, "input": ""}}
            case events.CallStarted(index, name, call_id):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
            case events.CallEnded(index, ended) if ended.name in self._custom:
                call = {"index": index, "custom": {"input": custom_input(ended.arguments)}}
            case events.Arguments(index, text) if index not in choice.custom:
                call = {"index": index, "function": {"arguments": text}}
            case _:
                return {}
        return {"tool_calls": [call]}

    def _extension(
        self, reports: Sequence[Mapping[str, Any]], ended: Sequence[CompletionOutput] = ()
    ) -> dict[str, Any]:
        """The field `jinfercept`: reports on the server's calls, an empty list if its tools were requested and not called.

        The outputs in `ended` end with this; their cancelled calls are listed if the body has asynchronous ones.
        """
        if not reports and not self._wants_server_calls:
            return {}
        cancelled = [
            {"choice": completion.index, "id": call.id, "name": call.name}
            for completion in ended
            for call in completion.cancelled
        ]
        more = {"cancelled": cancelled} if self._are_async and ended else {}
        return {"jinfercept": {"server_calls": reports, **more}}


def _add(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name != "tool_calls":
            message |= {name: message.get(name, "") + value} if value else {}
            continue
        [call] = value
        calls = message.setdefault("tool_calls", [])
        if (index := call.pop("index")) == len(calls):
            calls.append(call)
        elif "custom" in call:
            calls[index]["custom"] |= call["custom"]
        else:
            calls[index]["function"]["arguments"] += call["function"]["arguments"]
