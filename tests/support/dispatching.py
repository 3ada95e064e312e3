"""A dispatcher as an engine uses it, and a tool that hangs."""

import threading
import time
from collections.abc import Callable

from jinfercept.calls import Call, Result, Tool
from jinfercept.engine.dispatcher import Dispatcher

SOON_S = 0.05
LONG_S = 60.0
THE_END = threading.Event()
"""Never set: what hangs waits for it."""


class Service:
    """A dispatcher, and the waiting that an engine does."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.dispatcher = Dispatcher(self.wake.set)

    def call(self, request_id: str, function: Callable[[str], object], timeout_s: float = LONG_S) -> None:
        tools = {"tool": Tool(function, name="tool", timeout_s=timeout_s)}
        self.dispatcher.call(request_id, (Call("tool", "x"),), tools)

    def results(self, number: int) -> dict[str, tuple[Result, ...]]:
        """The next `number` interceptions that are over."""
        done: dict[str, tuple[Result, ...]] = {}
        give_up_s = time.monotonic() + LONG_S
        while len(done) < number:
            assert time.monotonic() < give_up_s, f"only {len(done)} of {number} returned"
            done.update(self.dispatcher.poll())
            if len(done) < number:
                deadline = self.dispatcher.next_s()
                self.wake.wait(max(0.0, min(1.0, deadline - time.monotonic())) if deadline is not None else 1.0)
                self.wake.clear()
        return done


def hangs(arguments: str) -> str:
    THE_END.wait(LONG_S)
    return "too late"
