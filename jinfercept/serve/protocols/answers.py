"""What the answers of all dialects are made of: `AnswerState`, `ServerToolCalls` and `UsageCount`.

A client has one message, though the model may write several turns, with calls of the server's tools between them. The engine
runs these calls while the request is paused. A mixed turn, which calls tools of the server and of the client, ends the request,
since the client has to answer; the server's calls of such a turn are run here afterwards, by the same dispatcher, while the
engine retains the context for the client's follow-up.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from jinfercept.calls import Call, Result
from jinfercept.chat.messages import call_message
from jinfercept.engine.dispatcher import Dispatcher, lasted_s
from jinfercept.events import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Intercepted,
    Reasoning,
    Resumed,
)
from jinfercept.outputs import CompletionOutput, FinishReason, Interception, RequestOutput
from jinfercept.request import Request

Message = Mapping[str, Any]
Remember = Callable[[CompletionOutput], None]
"""Called with an answer of several turns, which the client sees as one message."""
Note = Callable[[Request, Sequence[Call], Sequence[Result]], object]
"""Called with a finished request, and with the calls that were run after its end."""


@final
class ServerToolCalls:
    """Runs the server's calls in the outputs of one body's requests.

    Args:
        client_tools: names of the tools that the client runs; calls of all other tools are the server's, if it runs any.
        max_rounds: maximum rounds of calls that are run.
        max_len: maximum tokens of a sequence.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        client_tools: Collection[str],
        max_rounds: int,
        max_len: int,
        remember: Remember,
        note: Note,
    ) -> None:
        self._requests = {request.id: request for request in requests}
        self.client_tools: Container[str] = client_tools if any(request.tools for request in requests) else _AllNames()
        self._max_rounds, self._max_len = max_rounds, max_len
        self._remember, self._note = remember, note

    async def settled(self, output: RequestOutput) -> RequestOutput:
        """An output with results for all calls of the server's tools.

        The calls that were run here are its last interception, of no tokens; the results follow the message with the calls.
        """
        [completion] = output.outputs
        last = completion.messages[-1]
        functions = [(call["id"], call["function"]) for call in last.get("tool_calls", ())]
        own = [
            Call(function["name"], function["arguments"], id=call_id)
            for call_id, function in functions
            if function["name"] not in self.client_tools
        ]
        if own:
            completion = await self._with_calls(self._requests[output.request_id], completion, own)
        if len(completion.messages) > 1:
            self._remember(completion)
        return replace(output, outputs=[completion])

    async def _with_calls(
        self, request: Request, completion: CompletionOutput, calls: Sequence[Call]
    ) -> CompletionOutput:
        """The output with an interception of the calls of its last message, and their results if the output ends for them."""
        *before, last = completion.messages
        if completion.finish_reason != "tool_calls" or completion.stop_reason == "max_rounds":
            last = dict(last)
            if rest := [call for call in last.pop("tool_calls") if call["function"]["name"] in self.client_tools]:
                last["tool_calls"] = rest
            completion = _with_pause(completion, Interception(tuple(calls)), [*before, last])
            cut = completion.finish_reason == "tool_calls"
            return replace(completion, finish_reason="length") if cut else completion
        results = await self._results(request, completion, calls)
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        end = len(completion.token_ids)
        pause = Interception(tuple(calls), results, (end, end), lasted_s(tuple(calls), results, request.tools))
        self._note(request, calls, results)
        return _with_pause(completion, pause, [*completion.messages, *messages])

    async def _results(
        self, request: Request, completion: CompletionOutput, calls: Sequence[Call]
    ) -> tuple[Result, ...]:
        """Results of the server's calls of a mixed turn, cut to the length that the model reads."""
        if len(completion.interceptions) >= self._max_rounds:
            why = f"error: not run, {self._max_rounds} rounds of calls are the limit"
            return tuple(Result(why, "error") for _ in calls)
        results = await run_calls(request, tuple(calls))
        assert request.render is not None, "a chat with calls"
        room = max(0, self._max_len - len(request.prompt_token_ids) - len(completion.token_ids) - 1)
        _, cut = await asyncio.to_thread(request.render.render, tuple(calls), results, room)
        return cut


async def run_calls(request: Request, calls: tuple[Call, ...]) -> tuple[Result, ...]:
    """One result for each call, from the engine's dispatcher. If the coroutine is cancelled, so are the calls."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # an abandoned tool may outlast the event loop
            loop.call_soon_threadsafe(news.set)

    dispatcher = Dispatcher(wake, loop.time)
    try:
        dispatcher.call(request.id, calls, request.tools, request.tenant)
        while not (answers := dispatcher.poll()):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(dispatcher.next_s()):
                    await news.wait()
            news.clear()
        return answers[0][1]
    finally:
        dispatcher.close()


def call_reports(completion: CompletionOutput) -> list[dict[str, Any]]:
    """Reports on the calls that were run for an answer: `round`, `id`, `name`, `status`, `seconds`, `context` of each.

    `context` has the tokens of the request's context that were preserved, copied in and recomputed; None if it did not resume.
    """
    return [
        report
        for number, pause in enumerate(completion.interceptions)
        for report in round_reports(number, pause.calls, pause.results, pause)
    ]


def round_reports(
    number: int, calls: Sequence[Call], results: Sequence[Result] = (), pause: Interception | None = None
) -> list[dict[str, Any]]:
    """Reports on one round, of a request that has ended if `pause` is given; calls without results are running."""
    context = pause.context._asdict() if pause is not None and pause.context is not None else None
    still = "running" if pause is None else "not_run"
    return [
        {
            "round": number,
            "id": call.id,
            "name": call.name,
            "status": results[index].status if results else still,
            "seconds": round(results[index].duration_s, 4) if results else None,
            "context": context,
        }
        for index, call in enumerate(calls)
    ]


class _AllNames(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


def _with_pause(completion: CompletionOutput, pause: Interception, messages: Sequence[Message]) -> CompletionOutput:
    return replace(completion, interceptions=(*completion.interceptions, pause), messages=tuple(messages))


@final
class AnswerState:
    """One answer. The texts of its turns are one text each; calls of the server's tools are left out.

    Attributes:
        num_rounds: rounds of calls that the server has run.
        running: calls of the server's tools that run now.
    """

    def __init__(self, client_tools: Container[str]) -> None:
        self._client_tools = client_tools
        self._content, self._reasoning = _JoinedText(), _JoinedText()
        self._places: dict[int, int] = {}  # of the client's calls of this turn, by their index among all calls of it
        self.num_rounds = 0
        self.running: tuple[Call, ...] = ()

    def take(self, event: Event) -> Event | None:
        """The event as the client sees it, or None.

        It has the blank line before the text of a later turn, and the index among the client's calls.
        """
        match event:
            case Content():
                return Content(self._content.add(event.text))
            case Reasoning():
                return Reasoning(self._reasoning.add(event.text))
            case CallStarted() if event.name in self._client_tools:
                place = self._places[event.index] = len(self._places)
                return replace(event, index=place)
            case CallStarted():
                return None
            case Arguments() | CallEnded():
                place = self._places.get(event.index)
                return None if place is None else replace(event, index=place)
            case Intercepted():
                self.running = event.calls
            case Resumed():
                self.num_rounds, self.running = self.num_rounds + 1, ()
                self._places.clear()
                self._content.next_turn()
                self._reasoning.next_turn()
            case _:
                pass
        return event


def merged_message(completion: CompletionOutput, client_tools: Container[str]) -> Message:
    """The message that a client sees of a finished chat: the texts of all turns, and the calls of its own tools."""
    state, content, calls = AnswerState(client_tools), list[str](), list[Message]()
    for event in pieces_of(completion):
        match state.take(event):
            case Content(text):
                content.append(text)
            case CallEnded(call=call):
                calls.append(call_message(call))
            case _:
                pass
    return {"role": "assistant", "content": "".join(content), "tool_calls": calls}


def pieces_of(completion: CompletionOutput) -> Iterator[Event]:
    """The events that a stream has of a finished chat, each text and the arguments of each call in one piece, up to its end."""
    for place, pieces in enumerate(completion.pieces):
        if place:
            yield Resumed("", (), (), "")
        for piece in pieces:
            if isinstance(piece, CallEnded):
                yield CallStarted(piece.index, piece.call.name, piece.call.id)
                yield Arguments(piece.index, piece.call.arguments)
            yield piece


@final
class _JoinedText:
    """A text of several turns, with a blank line between two turns that are not separated by white space."""

    def __init__(self) -> None:
        self._last = ""
        self._is_new_turn = False

    def next_turn(self) -> None:
        self._is_new_turn = True

    def add(self, text: str) -> str:
        if not text:
            return ""
        gap = self._is_new_turn and self._last and not self._last.isspace() and not text[0].isspace()
        self._last, self._is_new_turn = text[-1], False
        return f"\n\n{text}" if gap else text


@final
class UsageCount:
    """Counts tokens while requests of one body run; a prompt with forks counts once.

    Args:
        details: fields of the log line; updated with the counts.
        silent: whether generated tokens are not counted, since the answer does not have them.

    Attributes:
        num_running: requests that have not ended.
    """

    def __init__(self, requests: Sequence[Request], details: dict[str, Any], *, silent: bool = False) -> None:
        self._prompt = sum(len(request.prompt_token_ids) for request in requests if request.leader is None)
        self.num_running = len(requests)
        self._firsts = {request.id for request in requests if request.leader is None}
        self._completion = 0
        self._ended = self._reasoning = self._cached = 0  # of requests that have ended
        self._reason: FinishReason = "stop"
        self._details, self._silent = details, silent
        details["prompt_tokens"] = self._prompt

    def count(self, tokens: int) -> None:
        self._completion += 0 if self._silent else tokens

    def add(self, output: RequestOutput) -> None:
        """Count a finished request by its own totals, once. The log has the reason of an aborted or failed one, if any."""
        completion = output.outputs[0]
        self.num_running -= 1
        self._cached += output.num_cached_tokens if output.request_id in self._firsts else 0
        if not self._silent:
            self._ended += completion.num_generated
            self._reasoning += completion.num_reasoning
        if self._reason not in ("abort", "error"):
            self._reason = completion.finish_reason
        usage = self.body()
        self._details.update(
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            finish_reason=self._reason,
        )
        if door_s := output.metrics.door_s:
            self._details["door_s"] = round(door_s, 3)

    def body(self) -> dict[str, Any]:
        """The current `usage` object; reasoning counts once its request has ended."""
        completion = max(self._completion, self._ended)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }
