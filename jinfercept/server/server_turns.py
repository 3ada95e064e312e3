"""The server's part of a conversation's turns: calls that clients do not run, and do not see as theirs.

The engine runs them while the request is paused. A turn that calls tools of both kinds ends the request, since its client has
to answer; the server's calls of such a turn are run here, when it has ended, by the same dispatcher: the engine keeps the
context for the client's return meanwhile, as it would anyway, and needs no state for half a pause.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from jinfercept.intercept.dispatcher import Dispatcher
from jinfercept.request import Call, CompletionOutput, Interception, Request, RequestOutput, Result

Message = Mapping[str, Any]
Remember = Callable[[Sequence[Message]], None]
"""Told of the turns of an answer, if some of them are hidden."""
Note = Callable[[Request, Sequence[Call], Sequence[Result]], object]
"""Called with a request and those of its calls that were run when it had ended."""


@final
class ServerTurns:
    """Of the requests that one body makes.

    Args:
        requests: they have the server's tools.
        own: names of the tools that the client runs; calls of all others are the server's, if it runs any.
        max_rounds: turns whose calls are run.
        max_len: tokens of a sequence.
        remember: told once an answer is there.
        note: told what was run here.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        own: Collection[str],
        max_rounds: int,
        max_len: int,
        remember: Remember,
        note: Note,
    ) -> None:
        self._requests = {request.id: request for request in requests}
        self.own: Container[str] = own if any(request.tools for request in requests) else _Every()
        self._max_rounds, self._max_len = max_rounds, max_len
        self._remember, self._note = remember, note

    async def settled(self, output: RequestOutput) -> RequestOutput:
        """An output in which no call is left but the client's.

        What was run here is its last interception, of no tokens; the results are behind the message that calls.
        """
        request, [completion] = self._requests[output.request_id], output.outputs
        *before, last = completion.messages
        calls = [_call(one) for one in last.get("tool_calls", ()) if one["function"]["name"] not in self.own]
        if calls and (completion.finish_reason != "tool_calls" or completion.stop_reason == "max_rounds"):
            last = dict(last)
            if others := [one for one in last.pop("tool_calls") if one["function"]["name"] in self.own]:
                last["tool_calls"] = others
            completion = _with_pause(completion, Interception(tuple(calls)), [*before, last])
            if completion.finish_reason == "tool_calls":
                completion = replace(completion, finish_reason="length")
        elif calls:
            results = await self._results(request, completion, calls)
            told = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
                for call, result in zip(calls, results, strict=True)
            ]
            end, lasted_s = len(completion.token_ids), max(result.duration_s for result in results)
            pause = Interception(tuple(calls), results, (end, end), lasted_s)
            self._note(request, calls, results)
            completion = _with_pause(completion, pause, [*completion.messages, *told])
        if len(completion.messages) > 1:
            self._remember(completion.messages)
        return replace(output, outputs=[completion])

    async def _results(
        self, request: Request, completion: CompletionOutput, calls: Sequence[Call]
    ) -> tuple[Result, ...]:
        """Of calls in a turn that ends with the client's, cut as the model would have read them."""
        if len(completion.interceptions) >= self._max_rounds:
            why = f"error: not run, {self._max_rounds} rounds of calls are the limit"
            return tuple(Result(why, "error") for _ in calls)
        results = await run_calls(request, tuple(calls))
        assert request.render is not None, "a chat with calls"
        room = max(0, self._max_len - len(request.prompt_token_ids) - len(completion.token_ids) - 1)
        _, cut = await asyncio.to_thread(request.render.render, tuple(calls), results, room)
        return cut


async def run_calls(request: Request, calls: tuple[Call, ...]) -> tuple[Result, ...]:
    """One result for each call, as the engine's dispatcher gives them; cancelled, it cancels the calls."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # a tool that nobody waits for may outlast the server
            loop.call_soon_threadsafe(news.set)

    dispatcher = Dispatcher(wake, loop.time)
    try:
        dispatcher.call(request.id, calls, request.tools)
        while not (done := dispatcher.poll()):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(dispatcher.next_s()):
                    await news.wait()
            news.clear()
        return done[0][1]
    finally:
        dispatcher.close()


def call_reports(completion: CompletionOutput) -> list[dict[str, Any]]:
    """What became of the calls that were run for an answer: of each `round`, `id`, `name`, `status`, `seconds`, `context`.

    `context` says in tokens what became of the request's context meanwhile; None where it did not go on.
    """
    return [
        report
        for number, pause in enumerate(completion.interceptions)
        for report in round_reports(number, pause.calls, pause.results, pause)
    ]


def round_reports(
    number: int, calls: Sequence[Call], results: Sequence[Result] = (), pause: Interception | None = None
) -> list[dict[str, Any]]:
    """Of one round; calls without results run.

    Args:
        pause: once it is over.
    """
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


class _Every(Container[str]):
    """All names that there are."""

    def __contains__(self, name: object) -> bool:
        return True


def _with_pause(completion: CompletionOutput, pause: Interception, messages: Sequence[Message]) -> CompletionOutput:
    return replace(completion, interceptions=(*completion.interceptions, pause), messages=tuple(messages))


def _call(message: Message) -> Call:
    function = message["function"]
    return Call(function["name"], function["arguments"], id=message["id"])
