"""The order of calls in the queue of a tool."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from jinfercept.errors import RequestError
from jinfercept.sched.tenants import FairSlots
from jinfercept.tools.calls import CallQueue
from tests.support.tool_runner import tool_runner, until


class Calls:
    """Calls of one queue, each of which runs until it is ended.

    Args:
        line: the queue.
        stubborn: whether a call that is cancelled goes on.
    """

    def __init__(self, line: CallQueue, stubborn: bool) -> None:
        self.line, self.stubborn = line, stubborn
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def come(self, tenant: str, *names: str) -> None:
        """Start calls of a tenant; they run or wait."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.ensure_future(self.line.run(tenant, lambda name=name: self._work(name)))
        await settled()

    async def end(self, name: str) -> None:
        """End a running call."""
        self._ends[name].set()
        await settled()

    async def _work(self, name: str) -> str:
        self.begun.append(name)
        while True:
            try:
                await self._ends[name].wait()
                return name
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise


async def settled() -> None:
    """Let all tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def scene(most: int, play: Callable[[Calls], Awaitable[None]], *, stubborn: bool = False) -> None:
    async def run() -> None:
        await play(Calls(CallQueue(most), stubborn))

    asyncio.run(run())


def names(tenant: str, number: int) -> list[str]:
    return [f"{tenant}{index}" for index in range(number)]


def test_tenants_take_turns_and_calls_of_one_tenant_come_in_their_order() -> None:
    async def play(calls: Calls) -> None:
        for tenant in "abc":
            await calls.come(tenant, *names(tenant, 3))
        for _ in range(8):
            await calls.end(calls.begun[-1])
        assert calls.begun == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]

    scene(1, play)


def test_a_tenant_with_calls_that_run_waits_for_one_without() -> None:
    async def play(calls: Calls) -> None:
        await calls.come("b", "b0")
        await calls.come("a", *names("a", 6))
        await calls.come("b", "b1", "b2")
        await calls.come("c", "c0")
        await calls.end("a1")
        assert calls.begun == ["b0", "a0", "a1", "c0"]
        await calls.end("a0")
        assert calls.begun[4:] == ["a2"]  # now it is the one without
        await calls.end("c0")
        assert calls.begun[5:] == ["b1"]  # one each, and b's last one is longer ago

    scene(3, play)


def test_tenants_that_come_again_and_again_do_not_keep_another_from_its_turn() -> None:
    async def play(calls: Calls) -> None:
        await calls.come("a", "a0")
        await calls.come("patient", "patient")
        await calls.come("b", "b0")
        for index in range(3):
            await calls.end(calls.begun[-1])
            await calls.come("a", f"a{index + 1}")
            await calls.come("b", f"b{index + 1}")
        assert calls.begun[:2] == ["a0", "patient"]
        assert {name[0] for name in calls.begun[2:]} == {"a", "b"}

    scene(1, play)


def test_a_call_that_is_cancelled_in_line_loses_no_slot_and_no_place() -> None:
    async def play(calls: Calls) -> None:
        await calls.come("a", "a0", "a1", "a2")
        await calls.come("b", "b0", "b1")
        calls.tasks["b0"].cancel()
        await settled()
        calls.tasks["a1"].cancel()
        await calls.end("a0")
        assert calls.begun == ["a0", "b1"]
        await calls.end("b1")
        assert calls.begun == ["a0", "b1", "a2"]
        await calls.end("a2")
        await calls.come("c", "c0")
        assert calls.begun[-1] == "c0"

    scene(1, play)


@pytest.mark.parametrize("first", ["the slot", "the cancellation"])
def test_a_call_that_is_cancelled_in_the_moment_of_its_turn_hands_it_on(first: str) -> None:
    async def play() -> None:
        turns = FairSlots(1)
        await turns.begin("a")
        cancelled, other = (asyncio.ensure_future(turns.begin(tenant)) for tenant in "bc")
        await settled()
        if first == "the slot":
            turns.end("a")
            cancelled.cancel()
        else:
            cancelled.cancel()
            turns.end("a")
        await settled()
        assert cancelled.cancelled()
        assert other.done()
        turns.end("c")
        await asyncio.wait_for(turns.begin("d"), 60)

    asyncio.run(play())


def test_a_call_that_is_cancelled_before_its_work_begins_gives_its_slot_back() -> None:
    async def play() -> None:
        turns = FairSlots(1)
        await turns.begin("a")
        waiting = [asyncio.ensure_future(turns.begin("a")) for _ in range(2)]
        await settled()
        turns.end("a")
        waiting[0].cancel()
        await settled()
        assert [task.cancelled() for task in waiting] == [True, False]
        assert waiting[1].done()

    asyncio.run(play())


def test_a_call_that_goes_on_after_it_was_cancelled_keeps_its_slot() -> None:
    async def play(calls: Calls) -> None:
        await calls.come("a", "a0", "a1")
        calls.tasks["a0"].cancel()
        await calls.come("b", "b0")
        assert calls.tasks["a0"].cancelled()
        assert calls.begun == ["a0"]
        await calls.end("a0")
        assert calls.begun == ["a0", "b0"]
        await calls.end("b0")
        await calls.end("a1")

    scene(1, play, stubborn=True)


PERSON = '[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks the boss"\n'


def test_a_number_that_json_does_not_have_reaches_no_inbox(tmp_path: Path) -> None:
    number = """parameters = {type = "object", properties = {n = {type = "number"}}}\n"""
    with tool_runner(tmp_path, PERSON + number) as runner:
        assert "Infinity is no finite number" in runner.ask("boss", n=math.inf).text


def test_a_call_that_nobody_answers_says_so(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON + "timeout_s = 0.1") as runner:
        result = runner.ask("boss", question="May I?")
        assert (result.status, result.text) == ("timeout", "error: TimeoutError: no person answered within 0.1 s")
        assert runner.loaded.inbox.pending() == []


def test_a_call_of_an_aborted_request_waits_no_more(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON) as runner:
        runner.call("r", "boss", question="May I?")
        until(lambda: bool(runner.loaded.inbox.pending()))
        runner.dispatcher.cancel("r")
        until(lambda: not runner.loaded.inbox.pending())


def test_one_at_a_time_is_put_to_a_person_who_says_so(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON + "max_concurrency = 1") as runner:
        inbox = runner.loaded.inbox
        for name in ("a", "b"):
            runner.call(name, "boss", question=name)
            until(lambda: bool(inbox.pending()))
        for name in ("a", "b"):
            until(lambda name=name: [call.request_id for call in inbox.pending()] == [name])
            inbox.answer(inbox.pending()[0].id, name.upper())
            assert runner.result(name).text == name.upper()


def test_of_many_threads_that_answer_each_call_one_succeeds(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON) as runner:
        inbox = runner.loaded.inbox
        names = [f"r{number}" for number in range(40)]
        for name in names:
            runner.call(name, "boss", question=name)
        until(lambda: len(inbox.pending()) == len(names))
        waiting, wins = inbox.pending(), []

        def answer() -> None:
            for pending in waiting:
                try:
                    inbox.answer(pending.id, pending.request_id)
                except RequestError:
                    continue
                wins.append(pending.id)

        threads = [threading.Thread(target=answer) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(wins) == sorted(pending.id for pending in waiting)
        assert all(runner.result(name).text == name for name in names)


def test_closed_tools_answer_nobody(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON) as runner:
        runner.call("r", "boss", question="May I?")
        until(lambda: bool(runner.loaded.inbox.pending()))
        runner.loaded.close()
        assert runner.result("r").status == "error"
        assert runner.loaded.inbox.pending() == []
        assert "these tools are closed" in runner.ask("boss", question="Still there?").text
