"""What comes of a conversation's requests, as OpenAI's chat completion: whole, or chunk by chunk."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from jinfercept.chat.chats import Chats
from jinfercept.engine.async_streaming import AsyncStream
from jinfercept.engine.parallel_sampling import joined
from jinfercept.events import (
    Arguments,
    CallStarted,
    Content,
    Finished,
    Intercepted,
    Reasoning,
    Resumed,
    StreamEvent,
    Token,
)
from jinfercept.request import Call, CompletionOutput, Logprob, RequestOutput
from jinfercept.server.chat_protocol import ChatBody, NamedTool
from jinfercept.server.logprobs import chat_logprobs, prompt_logprobs
from jinfercept.server.report_size import SMALL_ENTRIES, is_small, num_reported
from jinfercept.server.server_turns import ServerTurns, call_reports, round_reports
from jinfercept.server.service import Service, check_finish
from jinfercept.server.sse import DONE, event, long_event
from jinfercept.server.usage import UsageCount
from jinfercept.server.visible_turns import Joint, visible_message
from jinfercept.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """One of `n` answers on its way: what the next chunk has to carry along, and how its turns become one message."""

    index: int
    begun: bool = False
    rounds: int = 0  # whose calls the server has run
    asked: tuple[Call, ...] = ()  # those of the last
    content: Joint = field(default_factory=Joint)
    reasoning: Joint = field(default_factory=Joint)
    calls: dict[int, int] = field(default_factory=dict)  # the client's of this turn, with their places in the message
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Mapping[int, Logprob] | None]] = field(default_factory=list)

    def note(self, told: Token, body: ChatBody) -> None:
        if body.logprobs:
            self.logprobs.append((told.token_id, told.logprobs))
        if body.return_token_ids:
            self.token_ids.append(told.token_id)

    def next_turn(self) -> None:
        self.rounds += 1
        self.calls.clear()
        self.content.next_turn()
        self.reasoning.next_turn()


@final
class ChatAnswer:
    """The answer to one body.

    Args:
        name: its id.
        model: as the client called it.
        body: what was asked.
        chats: what was made of it.
        turns: what the server runs of them.
        tokenizer: names tokens.
        details: for the log; filled in as they become known.

    Attributes:
        usage: counts its tokens.
    """

    def __init__(
        self,
        name: str,
        model: str,
        body: ChatBody,
        chats: Chats,
        turns: ServerTurns,
        tokenizer: Tokenizer,
        details: dict[str, Any],
    ) -> None:
        requests = chats.requests
        self._turns = turns
        self._wants_server_calls = bool(body.jinfercept and body.jinfercept.wants_server_tools)
        self._body, self._requests, self._readers, self._tokenizer = body, requests, chats.readers, tokenizer
        self._prompt = list(requests[0].prompt_token_ids)
        self._head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}
        details["id"] = name
        self.usage = UsageCount(requests, details)
        self._choices = {request.id: _Choice(index) for index, request in enumerate(requests)}

    async def whole(self, outputs: Mapping[str, RequestOutput]) -> dict[str, Any]:
        """All of it; what is left to the server to run is run.

        Args:
            outputs: by request id.
        """
        settled = await asyncio.gather(*map(self._turns.settled, outputs.values()))
        for one in settled:
            self.usage.add(one)
        [output] = joined(self._requests, {one.request_id: one for one in settled})
        answer = self._head | {
            "choices": [self._whole_choice(completion) for completion in output.outputs],
            "usage": self.usage.body(),
        }
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        reports = [{"choice": one.index} | report for one in output.outputs for report in call_reports(one)]
        return answer | self._server_calls(reports)

    def is_small(self, outputs: Mapping[str, RequestOutput]) -> bool:
        """Whether `whole` is encoded at once; what the server's tools add is not known yet, and counts for nothing."""
        best = (self._body.top_logprobs or 0) if self._body.logprobs else None
        return is_small(outputs.values(), (self._body.prompt_logprobs,), best)

    def _whole_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        said = visible_message(completion.messages, self._turns.own)
        calls = said["tool_calls"]
        message = {"role": "assistant", "content": said["content"] or (None if calls else "")}
        message |= _thought(said["reasoning_content"]) if said["reasoning_content"] else {}
        message |= {"tool_calls": calls} if calls else {}
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
        return choice

    def _finish_reason(self, completion: CompletionOutput) -> str:
        """As OpenAI and vLLM say it: who names the function to call is told that the answer stops."""
        named = isinstance(self._body.tool_choice, NamedTool)
        return "stop" if named and completion.finish_reason == "tool_calls" else completion.finish_reason

    async def stream(self, service: Service, stream: AsyncStream) -> AsyncGenerator[bytes]:
        """Server-sent events. Closed before its end, it gives the requests up.

        Args:
            stream: of the requests, as the engine tells of them.
        """
        self._head["object"] = "chat.completion.chunk"
        options = self._body.stream_options
        try:
            async for told in stream:
                assert isinstance(told, Token | Intercepted | Resumed | Finished), "a stream without readers"
                choice = self._choices[told.request_id]
                if isinstance(told, Token):
                    self.usage.count(1)
                    choice.note(told, self._body)
                for shown in self._readers[told.request_id].read(told):
                    if isinstance(shown, Finished):
                        self.usage.add(shown.output)
                        check_finish(shown.output)
                        shown = replace(shown, output=await self._turns.settled(shown.output))
                    is_long = num_reported(len(choice.logprobs), self._body.top_logprobs or 0) > SMALL_ENTRIES
                    for chunk in self._chunks(choice, shown):
                        yield await long_event(chunk) if is_long else event(chunk)
            if options is not None and options.include_usage:
                yield event(self._head | {"choices": [], "usage": self.usage.body()})
            yield DONE
        finally:
            await service.close(stream)

    def _chunks(self, choice: "_Choice", shown: StreamEvent) -> Iterator[dict[str, Any]]:
        """The chunks that something of one request makes. Those of the server's calls say nothing to ordinary clients."""
        match shown:
            case Finished():
                [completion] = shown.output.outputs
                yield from self._begun(choice)
                self.usage.add(shown.output)
                yield self._chunk(choice, {}, completion) | self._server_calls(call_reports(completion))
            case Intercepted():
                choice.asked = shown.calls
                yield from self._begun(choice)
                yield self._chunk(choice, {}) | self._server_calls(round_reports(choice.rounds, shown.calls))
            case Resumed():
                reports = round_reports(choice.rounds, choice.asked, shown.results)
                choice.next_turn()
                yield self._chunk(choice, {}) | self._server_calls(reports)
            case _ if (delta := self._delta(choice, shown)) is not None:
                yield from self._begun(choice)
                yield self._chunk(choice, delta)
            case _:
                pass

    def _begun(self, choice: "_Choice") -> Iterator[dict[str, Any]]:
        """The chunk that every choice begins with."""
        if not choice.begun:
            choice.begun = True
            prompt = {"prompt_token_ids": self._prompt} if self._body.return_token_ids else {}
            yield self._chunk(choice, {"role": "assistant", "content": ""}, carry=False) | prompt

    def _server_calls(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What is said of calls that the server runs: a list, perhaps empty, if the server's tools were asked for."""
        return {"jinfercept": {"server_calls": reports}} if reports or self._wants_server_calls else {}

    def _delta(self, choice: "_Choice", shown: StreamEvent) -> dict[str, Any] | None:
        """What is new in a message."""
        match shown:
            case Content():
                return {"content": choice.content.add(shown.text)}
            case Reasoning():
                return _thought(choice.reasoning.add(shown.text))
            case CallStarted() if shown.name in self._turns.own:
                place = choice.calls[shown.index] = len(choice.calls)
                function = {"name": shown.name, "arguments": ""}
                return {"tool_calls": [{"index": place, "id": shown.id, "type": "function", "function": function}]}
            case Arguments() if shown.index in choice.calls:
                return {"tool_calls": [{"index": choice.calls[shown.index], "function": {"arguments": shown.text}}]}
        return None

    def _chunk(
        self, choice: "_Choice", delta: dict[str, Any], end: CompletionOutput | None = None, carry: bool = True
    ) -> dict[str, Any]:
        one: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": self._finish_reason(end) if end else None,
        }
        if end is not None:
            one["stop_reason"] = end.stop_reason
        if carry and choice.logprobs:
            one["logprobs"] = chat_logprobs(choice.logprobs, self._body.top_logprobs or 0, self._tokenizer)
            choice.logprobs = []
        if carry and choice.token_ids:
            one["token_ids"], choice.token_ids = choice.token_ids, []
        chunk = self._head | {"choices": [one]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.usage.body() if options.continuous_usage_stats else None
        return chunk


def generated_tokens(completion: CompletionOutput) -> list[int]:
    """Its tokens without those that tools returned."""
    kept: list[int] = []
    start = 0
    for pause in completion.interceptions:
        if pause.results:
            kept += completion.token_ids[start : pause.span[0]]
            start = pause.span[1]
    return kept + completion.token_ids[start:]


def _thought(text: str) -> dict[str, str]:
    """What a model thinks before it answers, by the name that vLLM has for it now and by the one that most clients read."""
    return {"reasoning": text, "reasoning_content": text}
