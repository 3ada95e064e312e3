"""A gate before the end of long answers: they last for as long as a test needs them, however slow the machine is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jinfercept.engine.engine import Engine
from jinfercept.engine.thread import EngineThread
from jinfercept.events import Event
from jinfercept.llm import LLM
from tests.support.engine_state import engine_of

REST_S = 1.0
"""Seconds between two steps, at most, while the thread rests."""


class Gate:
    """Lets the engine's thread rest, instead of stepping, while nothing but long answers runs.

    Whatever else arrives is served as ever: a request, an abort, a question, the result of a call. While another answer is
    written, the long ones go on with it, by a token a step; while the thread rests, by a token a second, so that no call
    misses its time-out. An engine that is restarted has no gate.

    Args:
        after: tokens that an answer has written when it begins to count as long.
    """

    def __init__(self, thread: EngineThread, engine: Engine, after: int) -> None:
        self._thread, self._engine, self._after = thread, engine, after
        self._whole_step = engine.step
        self._is_open = False
        self._stepped_s = 0.0
        self._is_settled = False  # the last step neither began nor ended a request
        vars(engine)["step"] = self._step

    def open(self) -> None:
        """Long answers go on to their ends."""
        self._is_open = True
        self._engine.wake.set()

    def _step(self) -> list[Event]:
        running, wake = self._engine.scheduler.running, self._engine.wake
        if self._is_settled and self._holds():
            rest_s = self._stepped_s + REST_S - time.monotonic()
            woken = wake.wait(max(0.0, rest_s))
            wake.clear()
            is_asked = bool(self._thread._questions)  # pyright: ignore[reportPrivateUsage]
            if woken and is_asked and time.monotonic() < self._stepped_s + REST_S:
                return []
        self._stepped_s = time.monotonic()
        before = [sequence.id for sequence in running]
        events = self._whole_step()
        self._is_settled = before == [sequence.id for sequence in running]
        return events

    def _holds(self) -> bool:
        """Whether only long answers run, and nothing has arrived."""
        scheduler = self._engine.scheduler
        arrived = self._engine.num_waiting > len(scheduler.waiting) + len(scheduler.door.sequences)
        is_long = [sequence.generated >= self._after for sequence in scheduler.running]
        return not self._is_open and not arrived and bool(is_long) and all(is_long)


@contextmanager
def closed_gate(llm: LLM, after: int = 40) -> Iterator[Gate]:
    """A gate that is closed until the test opens it, at the latest at the end of the context."""
    gate = Gate(llm.engine.thread, engine_of(llm), after)
    try:
        yield gate
    finally:
        gate.open()
