"""Outputs of a chat's requests as OpenAI's chat completion: one object, or a stream of chunks."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from jinfercept import events
from jinfercept.engine.parallel_sampling import joined
from jinfercept.engine.streaming import AsyncStream
from jinfercept.outputs import CompletionOutput, Logprob, RequestOutput
from jinfercept.protocols.answers import (
    AnswerState,
    ServerToolCalls,
    UsageCount,
    call_reports,
    pieces_of,
    round_reports,
)
from jinfercept.protocols.encoding import DONE, encode_event, encode_long_event
from jinfercept.protocols.errors import check_finish
from jinfercept.protocols.openai.chat_schemas import ChatBody, NamedTool, custom_input
from jinfercept.protocols.openai.logprobs import (
    SMALL_ENTRIES,
    chat_logprobs,
    encoded_experts,
    is_small,
    num_reported,
    prompt_logprobs,
)
from jinfercept.protocols.schemas import training_fields
from jinfercept.request import Request
from jinfercept.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _StreamedChoice:
    """One of `n` streamed answers.

    Attributes:
        begun: whether its first chunk is sent.
        custom: places of the calls of custom tools, whose input comes in one chunk.
        token_ids, logprobs: reported with the next chunk.
    """

    index: int
    state: AnswerState
    begun: bool = False
    custom: set[int] = field(default_factory=set)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Mapping[int, Logprob] | None]] = field(default_factory=list)


@final
class ChatAnswer:
    """The chat completion for one body.

    Args:
        tool_calls: runs the calls of the server's tools.
        details: fields of the log line; filled in as they become known.
    """

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
        self._tool_calls = tool_calls
        self._wants_server_calls = bool(body.jinfercept and body.jinfercept.wants_server_tools)
        self._are_async = bool(body.jinfercept and body.jinfercept.async_calls is not None)
        self._body, self._requests, self._tokenizer = body, requests, tokenizer
        self._custom = {tool.function.name for tool in body.tools or () if tool.type == "custom"}
        self._head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}
        details["id"] = name
        self.usage = UsageCount(requests, details)
        self._choices = {
            request.id: _StreamedChoice(index, AnswerState(tool_calls.client_tools))
            for index, request in enumerate(requests)
        }

    async def whole(self, outputs: Mapping[str, RequestOutput]) -> dict[str, Any]:
        """The whole completion; pending calls of the server's tools are run first."""
        settled = await asyncio.gather(*map(self._tool_calls.settled, outputs.values()))
        for output in settled:
            self.usage.add(output)
        [output] = joined(self._requests, {output.request_id: output for output in settled})
        answer = self._head | {
            "choices": [self._whole_choice(completion) for completion in output.outputs],
            "usage": self.usage.body(),
        }
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        reports = [{"choice": choice.index} | report for choice in output.outputs for report in call_reports(choice)]
        return answer | self._extension(reports, output.outputs)

    def is_small(self, outputs: Mapping[str, RequestOutput]) -> bool:
        """Whether `whole` is small enough to be encoded on the event loop; results of the server's tools are not counted."""
        best = (self._body.top_logprobs or 0) if self._body.logprobs else None
        return is_small(outputs.values(), (self._body.prompt_logprobs,), best)

    def _whole_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        streamed = _StreamedChoice(completion.index, AnswerState(self._tool_calls.client_tools))
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for piece in pieces_of(completion):
            _add(message, self._delta(streamed, streamed.state.take(piece)))
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
            choice["logprobs"] = chat_logprobs(pairs, self._body.top_logprobs or 0, self._tokenizer)
        if self._body.return_token_ids:
            choice["token_ids"] = generated_tokens(completion)
        choice |= training_fields(self._body, completion)
        if self._body.return_routed_experts:
            choice["routed_experts"] = encoded_experts(completion.routed_experts)
        return choice

    def _finish_reason(self, completion: CompletionOutput) -> str:
        """The reason as in OpenAI and vLLM: `stop` instead of `tool_calls` if the body names the function to call."""
        named = isinstance(self._body.tool_choice, NamedTool)
        return "stop" if named and completion.finish_reason == "tool_calls" else completion.finish_reason

    async def stream(self, stream: AsyncStream) -> AsyncGenerator[bytes]:
        """Server-sent events.

        Args:
            stream: the engine's events of the requests.
        """
        self._head["object"] = "chat.completion.chunk"
        options = self._body.stream_options
        async for event in stream:
            choice = self._choices[event.request_id]
            if isinstance(event, events.Token):
                self.usage.count(1)
                if self._body.logprobs:
                    choice.logprobs.append((event.token_id, event.logprobs))
                if self._body.return_token_ids:
                    choice.token_ids.append(event.token_id)
                continue
            if isinstance(event, events.Finished):
                self.usage.add(event.output)
                check_finish(event.output)
                event = replace(event, output=await self._tool_calls.settled(event.output))
            best = self._body.top_logprobs or 0
            is_long = bool(choice.logprobs) and num_reported(len(choice.logprobs), best) > SMALL_ENTRIES
            for chunk in self._chunks(choice, event):
                yield await encode_long_event(chunk) if is_long else encode_event(chunk)
        if options is not None and options.include_usage:
            yield encode_event(self._head | {"choices": [], "usage": self.usage.body()})
        yield DONE

    def _chunks(self, choice: _StreamedChoice, event: events.Event) -> list[dict[str, Any]]:
        """The chunks for an event of one request. Chunks about the server's calls have an empty delta."""
        number, ran = choice.state.num_rounds, choice.state.running
        match shown := choice.state.take(event):
            case events.Intercepted(calls=calls):
                chunk = self._chunk(choice, {}) | self._extension(round_reports(number, calls))
            case events.Resumed(results=results):
                chunk = self._chunk(choice, {}) | self._extension(round_reports(number, ran, results))
            case events.Finished(output=output):
                [completion] = output.outputs
                self.usage.add(output)
                chunk = self._chunk(choice, {}, completion) | self._extension(call_reports(completion), [completion])
            case _:
                if not (delta := self._delta(choice, shown)):
                    return []
                chunk = self._chunk(choice, delta)
        if choice.begun:
            return [chunk]
        choice.begun = True
        prompt = {"prompt_token_ids": list(self._requests[0].prompt_token_ids)} if self._body.return_token_ids else {}
        return [self._chunk(choice, {"role": "assistant", "content": ""}, carry=False) | prompt, chunk]

    def _delta(self, choice: _StreamedChoice, event: events.Event | None) -> dict[str, Any]:
        """What an event adds to the message; {} for nothing."""
        match event:
            case events.Content(text):
                return {"content": text}
            case events.Reasoning(text):
                return _thought(text)
            case events.CallStarted(index, name, call_id) if name in self._custom:
                choice.custom.add(index)
                call = {"index": index, "id": call_id, **_custom_call(name, "")}
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

        Args:
            ended: the outputs that end with this, whose cancelled calls are listed if the body has asynchronous ones.
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

    def _chunk(
        self, choice: _StreamedChoice, delta: dict[str, Any], end: CompletionOutput | None = None, carry: bool = True
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": self._finish_reason(end) if end else None,
        }
        if end is not None:
            shown["stop_reason"] = end.stop_reason
        if carry and choice.logprobs:
            shown["logprobs"] = chat_logprobs(choice.logprobs, self._body.top_logprobs or 0, self._tokenizer)
            choice.logprobs = []
        if carry and choice.token_ids:
            shown["token_ids"], choice.token_ids = choice.token_ids, []
        chunk = self._head | {"choices": [shown]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.usage.body() if options.continuous_usage_stats else None
        return chunk


def _add(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta of a stream to the whole message, as a client does."""
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


def generated_tokens(completion: CompletionOutput) -> list[int]:
    """Token ids of a completion without those of tool results."""
    generated: list[int] = []
    start = 0
    for pause in completion.interceptions:
        if pause.results:
            generated += completion.token_ids[start : pause.span[0]]
            start = pause.span[1]
    return generated + completion.token_ids[start:]


def _custom_call(name: str, text: str) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, "input": text}}


def _thought(text: str) -> dict[str, str]:
    """Reasoning text under vLLM's current name, and under the name that most clients read."""
    return {"reasoning": text, "reasoning_content": text}
