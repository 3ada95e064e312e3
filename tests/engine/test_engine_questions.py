"""Questions to an engine that runs, rests or is closed: each is answered between two steps."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from jinfercept.calls import Tool
from jinfercept.engine import engine as engine_module
from jinfercept.engine.engine import Engine
from jinfercept.engine.thread import EngineThread
from jinfercept.events import Event, Finished
from tests.support.engine_requests import request
from tests.support.fake_engine import POLICIES, make_engine

Running = tuple[EngineThread, Engine]


@pytest.fixture
def running() -> Iterator[Running]:
    engine = make_engine(POLICIES["copy_ahead"](), num_pages=2000, max_num_seqs=16, buckets=(16, 64))
    thread = EngineThread(engine)
    yield thread, engine
    thread.close()


def asked_who(running: Running) -> Future[tuple[str, int]]:
    thread, engine = running
    return thread.ask(lambda: (threading.current_thread().name, len(engine.scheduler.unfinished)))


def submit(running: Running, name: str, max_tokens: int) -> "queue.Queue[Any]":
    events: queue.Queue[list[Event] | BaseException] = queue.Queue()
    running[0].submit([request(name, [1, 2, 3], max_tokens)], events.put)
    return events


def last(events: "queue.Queue[Any]") -> Finished:
    while not isinstance(event := events.get(timeout=60)[-1], Finished):
        pass
    return event


def test_an_engine_that_waits_for_a_call_answers_without_waiting_for_it(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_IDLE_S", 600.0)
    called, give = threading.Event(), threading.Event()

    def slow(text: str) -> str:
        called.set()
        give.wait(600)
        return ""

    tools = {"tool": Tool(slow, name="tool")}
    events: queue.Queue[Any] = queue.Queue()
    running[0].submit([request("a", [1, 2, 3], 8, {2: [1]}, tools=tools)], events.put)
    assert called.wait(60)
    for _ in range(5):
        assert asked_who(running).result(60) == ("jinfercept-engine", 1)
    give.set()
    last(events)


def test_many_askers_beside_many_requests_are_all_answered(running: Running) -> None:
    answers: list[Future[tuple[str, int]]] = []
    asking = threading.Thread(target=lambda: answers.extend(asked_who(running) for _ in range(300)))
    asking.start()
    for round_ in range(3):
        streams = [submit(running, f"{round_}-{i}", 40) for i in range(6)]
        assert {last(events).output.outputs[0].finish_reason for events in streams} == {"length"}
    asking.join()
    assert all(0 <= answer.result(60)[1] <= 6 for answer in answers)


def test_a_question_that_fails_tells_who_asked_and_hurts_nobody(running: Running) -> None:
    events = submit(running, "a", 200)
    events.get(timeout=60)
    with pytest.raises(ZeroDivisionError):
        running[0].ask(lambda: 1 // 0).result(60)
    assert last(events).output.outputs[0].finish_reason == "length"
