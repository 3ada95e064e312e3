"""Streams in event loops: what they yield, and that a task that leaves leaves nothing behind."""

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from jinfercept import LLM, ScriptedDetector, Tool
from jinfercept.calls import Call
from jinfercept.events import Finished, Token
from jinfercept.outputs import RequestOutput
from tests.support.engine_state import LONG, PARAMS, prompt, settle, tokens_of


def test_agenerate_is_generate(llm: LLM) -> None:
    expected = llm.generate([prompt(1), prompt(2)], PARAMS)
    outputs = asyncio.run(llm.agenerate([prompt(1), prompt(2)], PARAMS))
    assert [output.outputs[0].token_ids for output in outputs] == [single.outputs[0].token_ids for single in expected]


@pytest.mark.parametrize("where", ["waiting", "elsewhere", "whole"])
def test_a_cancelled_task_gives_its_request_up(llm: LLM, where: str) -> None:
    begun, over = threading.Event(), threading.Event()

    def hang(argument: str) -> str:
        begun.set()
        over.wait(60)
        return ""

    async def listen() -> None:
        tools, detector = [Tool(hang, name="hang")], ScriptedDetector({2: [Call("hang", "")]})
        if where == "whole":
            await llm.agenerate(prompt(1), LONG, tools=tools, detector=detector)
        stream = llm.astream(prompt(1), LONG, tools=tools, detector=detector)
        async for _ in stream:
            if where == "elsewhere":
                await asyncio.sleep(60)

    async def cancel() -> None:
        task = asyncio.create_task(listen())
        assert await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(settle, llm)

    asyncio.run(cancel())
    over.set()


def test_waiting_with_a_timeout_loses_nothing(llm: LLM) -> None:
    missed = threading.Event()

    def nap(argument: str) -> list[int]:
        assert missed.wait(60)
        return [5]

    async def listen() -> list[Any]:
        stream = llm.astream(
            prompt(1), PARAMS, tools=[Tool(nap, name="nap")], detector=ScriptedDetector({2: [Call("nap", "")]})
        )
        events: list[Any] = []
        while not (events and isinstance(events[-1], Finished)):
            try:
                events.append(await asyncio.wait_for(anext(stream), 0.05))
            except TimeoutError:
                missed.set()
        return events

    events = asyncio.run(listen())
    assert len(tokens_of(events)) == 12


def test_a_loop_that_ends_gives_its_requests_up(gated: LLM) -> None:
    async def begin() -> Any:
        stream = gated.astream(prompt(1), LONG)
        await anext(stream)
        return stream

    stream = asyncio.run(begin())
    settle(gated)
    del stream


@pytest.mark.parametrize("number", [24, pytest.param(2000, marks=pytest.mark.slow)])
def test_clients_that_come_and_go_lose_nothing_and_leave_nothing(llm: LLM, number: int) -> None:
    rng = random.Random(number)
    expected = [output.outputs[0].token_ids for output in llm.generate([prompt(i) for i in range(100)], PARAMS)]

    async def client(index: int, rng: random.Random) -> None:
        await asyncio.sleep(rng.random() * number / 500)
        tool = Tool(lambda _: time.sleep(0.01) or [5], name="tool")
        detector = ScriptedDetector({rng.randrange(1, 20): [Call("tool", "")]}) if rng.random() < 0.5 else None
        stays, seen = rng.random() < 0.6, list[int]()
        params = PARAMS if stays else LONG
        async for event in llm.astream(prompt(index), params, tools=[tool] if detector else (), detector=detector):
            if isinstance(event, Token):
                seen.append(event.token_id)
            if not stays and rng.random() < 0.1:
                return
        assert len(seen) == params.max_tokens
        assert detector is not None or seen[:12] == expected[index % 100]

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(client(i % 100, random.Random(i))) for i in range(number)]
        for task in rng.sample(tasks, number // 5):
            asyncio.get_running_loop().call_later(rng.random() * number / 400, task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [result for result in results if isinstance(result, Exception)] == []

    whole: list[RequestOutput] = []
    beside = threading.Thread(target=lambda: whole.extend(llm.generate([prompt(i) for i in range(8)], PARAMS)))
    beside.start()
    asyncio.run(all_of_them())
    beside.join(60)
    assert [output.outputs[0].token_ids for output in whole] == expected[:8]
    settle(llm)
