"""Runs the server's calls of mixed turns, and reports on all calls that the server ran.

The engine runs calls of the server's tools while the request is paused. A mixed turn, which calls tools of the server and of
the client, ends the request, since the client has to answer; the server's calls of such a turn are run here afterwards, by the
same dispatcher, while the engine retains the context for the client's follow-up.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from jinfercept.calls import Call, Result
from jinfercept.intercept.dispatcher import Dispatcher, lasted_s
from jinfercept.outputs import CompletionOutput, Interception, RequestOutput
from jinfercept.request import Request

Message = Mapping[str, Any]
Remember = Callable[[Sequence[Message]], None]
"""Called with the turns of an answer, if the client does not see all of them."""
Note = Callable[[Request, Sequence[Call], Sequence[Result]], object]
"""Called with a finished request, and with the calls that were run after its end."""


@final
class ServerToolCalls:
    """Runs the server's calls in the outputs of one body's requests.

    Args:
        client_tools: names of the tools that the client runs; calls of all other tools are the server's, if it runs any.
        max_rounds: maximum rounds of calls that are run.
        max_len: maximum tokens of a sequence.
        remember: called with the turns of a complete answer.
        note: called with the calls that were run here.

    Attributes:
        client_tools: names of the tools that the client runs; all names if the server runs none.
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
        own = [call for call in last.get("tool_calls", ()) if call["function"]["name"] not in self.client_tools]
        if own:
            completion = await self._with_calls(self._requests[output.request_id], completion, [*map(_call, own)])
        if len(completion.messages) > 1:
            self._remember(completion.messages)
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
    """Reports on one round; calls without results are running.

    Args:
        results: of the calls, once they have ended.
        pause: of the request, once it has ended.
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


class _AllNames(Container[str]):
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


def _with_pause(completion: CompletionOutput, pause: Interception, messages: Sequence[Message]) -> CompletionOutput:
    return replace(completion, interceptions=(*completion.interceptions, pause), messages=tuple(messages))


def _call(message: Message) -> Call:
    function = message["function"]
    return Call(function["name"], function["arguments"], id=message["id"])
