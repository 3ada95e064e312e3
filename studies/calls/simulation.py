"""Simulations of requests whose calls are markup in the tokens that they are forced to generate."""

import heapq
import json
from collections.abc import Mapping, Sequence

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.call_markup import ContextMarkup
from jinfercept.chat.text_stream import TextStream
from jinfercept.engine.dispatcher import Clock
from jinfercept.errors import ConfigError
from jinfercept.request import Request
from jinfercept.sched.estimator import ESTIMATORS
from jinfercept.sim.run_stats import Report
from jinfercept.sim.scripted import ScriptedDispatcher, plain_tokens
from jinfercept.sim.simulation import RunWatch, Simulation, VirtualClock, reads_durations
from studies.calls.markup import CallArrival


class CallSimulation(Simulation):
    """A simulation whose arrivals are requests with calls in markup."""

    def run(  # pyright: ignore[reportIncompatibleMethodOverride] # other arrivals
        self,
        arrivals: Sequence[CallArrival],
        watch: RunWatch | None = None,
    ) -> Report:
        if reads_durations(self.estimator):
            fix = f"one of {', '.join(ESTIMATORS)}"
            raise ConfigError("an oracle cannot see calls in markup", got=self.estimator_name, fix=fix)
        clock = VirtualClock()
        requests = [(arrival.at_s, arrival.request(number)) for number, arrival in enumerate(arrivals)]
        return self.play(requests, _MarkupDispatcher(clock), clock, watch, open_text=_open_text)


class _MarkupDispatcher(ScriptedDispatcher):
    """Answers calls in markup, whose arguments are `{"seconds": …, "tokens": …}`, with text."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, plain_tokens)
        self._started: list[tuple[float, int, str, Call]] = []

    def start(self, request_id: str, call: Call, tools: Mapping[str, Tool], tenant: str) -> None:
        self._count += 1
        seconds: float = json.loads(call.arguments)["seconds"]
        heapq.heappush(self._started, (self._clock.now() + seconds, self._count, request_id, call))

    def poll_started(self) -> list[tuple[str, Call, Result]]:
        results = list[tuple[str, Call, Result]]()
        while self._started and self._started[0][0] <= self._clock.now():
            _, _, request_id, call = heapq.heappop(self._started)
            scripted = json.loads(call.arguments)
            results.append((request_id, call, Result("r" * scripted["tokens"], duration_s=scripted["seconds"])))
        return results

    def next_s(self) -> float:
        return min([super().next_s(), *(started[0] for started in self._started[:1])])

    def cancel(self, request_id: str) -> None:
        super().cancel(request_id)
        self._started = [started for started in self._started if started[2] != request_id]
        heapq.heapify(self._started)


def _open_text(request: Request) -> TextStream:
    assert isinstance(request.markup, ContextMarkup)
    return TextStream(request.markup.tokenizer, (), False, False)
