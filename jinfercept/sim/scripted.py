"""Scripts as requests and as the world around an engine: who arrives when, what calls return and after how long.

One loop plays them, whether the engine computes or only prices its plans, under a virtual clock or a real one. No JAX.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from threading import Event
from typing import NamedTuple, final

from jinfercept.engine.clock import Clock
from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError
from jinfercept.events import Finished
from jinfercept.intercept.detector import ScriptedDetector
from jinfercept.request import Call, Request, RequestOutput, Result, SamplingParams, Tool
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.workload import Script, Segment

Writer = Callable[[int, int, int], tuple[int, ...]]
"""Token ids that nobody generates, from a request's number, a place in it (0 is the prompt) and how many."""

SHOWN_EVERY_S = 0.1

Progress = Callable[[float, float], None]
"""Told seconds so far, and the most there can be."""


def plain_tokens(number: int, place: int, count: int) -> tuple[int, ...]:
    """A request's number as its tokens, so that no two requests share a page: for engines whose tokens mean nothing."""
    return (number,) * count


def random_tokens(vocab_size: int, seed: int) -> Writer:
    """Tokens below `vocab_size`; the same seed gives the same ones in every run."""
    return lambda number, place, count: tuple(Random(f"{seed} {number} {place}").choices(range(vocab_size), k=count))


def make_request(number: int, script: Script, write: Writer, told: bool = False) -> Request:
    """A scripted request: greedy, of a fixed length, calling at fixed places.

    Args:
        number: its id, and what its tokens depend on.
        write: its prompt.
        told: the engine is told how long each call will take.
    """
    calls = dict(_calls(script, told))
    params = SamplingParams(temperature=0.0, max_tokens=script.generated, ignore_eos=True)
    return Request(str(number), write(number, 0, script.prompt), params, detector=ScriptedDetector(calls))


def returned_tokens(request: Request) -> int:
    """Tokens that the calls of a scripted request return, all in all."""
    assert isinstance(request.detector, ScriptedDetector)
    return sum(int(call.arguments.split()[1]) for calls in request.detector.script.values() for call in calls)


def _calls(script: Script, told: bool) -> Iterator[tuple[int, list[Call]]]:
    generated = 0
    for segment in script.segments:
        generated += segment.decode
        if segment.call_s is not None:
            expected_s = segment.call_s if told else None
            yield generated, [Call(script.kind, f"{segment.call_s} {segment.returned}", expected_s=expected_s)]


def scaled(arrivals: Sequence[Arrival], tokens: float, seconds: float) -> list[Arrival]:
    """The same arrivals for a smaller machine: every number of tokens (at least 1) and every time multiplied.

    Raises:
        ConfigError: a factor is not above 0.
    """
    for name, factor in (("--scale-tokens", tokens), ("--scale-time", seconds)):
        if not 0 < factor < float("inf"):
            raise ConfigError(f"{name} is out of range", got=factor, fix="a finite number above 0")

    def count(value: int) -> int:
        return max(1, round(value * tokens)) if value else 0

    def segment(value: Segment) -> Segment:
        call_s = None if value.call_s is None else value.call_s * seconds
        return Segment(count(value.decode), call_s, count(value.returned))

    return [
        Arrival(at_s * seconds, Script(script.kind, count(script.prompt), tuple(map(segment, script.segments))))
        for at_s, script in arrivals
    ]


@final
class ScriptedEndpoints:
    """Answers scripted calls, whose arguments are `"seconds tokens"`, when their time has come; starts no threads.

    Args:
        clock: what time it is.
        write: the tokens that come back.
    """

    def __init__(self, clock: Clock, write: Writer) -> None:
        self.next_arrival_s = float("inf")  # an idle engine sleeps no longer than this
        self._clock, self._write = clock, write
        self._due: list[tuple[float, int, str, tuple[Call, ...]]] = []
        self._live: dict[str, int] = {}
        self._count = 0

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool]) -> None:
        self._count += 1
        self._live[request_id] = self._count
        seconds = max(float(call.arguments.split()[0]) for call in calls)
        heapq.heappush(self._due, (self._clock.now() + seconds, self._count, request_id, calls))

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        done = []
        while self._due and self._due[0][0] <= self._clock.now():
            _, number, request_id, calls = heapq.heappop(self._due)
            if self._live.get(request_id) == number:
                del self._live[request_id]
                done.append((request_id, tuple(self._answer(int(request_id), call) for call in calls)))
        return done

    def next_s(self) -> float:
        """When something will happen outside the engine: a return or an arrival."""
        return min(self._due[0][0] if self._due else float("inf"), self.next_arrival_s)

    def cancel(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def _answer(self, number: int, call: Call) -> Result:
        seconds, tokens = call.arguments.split()
        return Result("", token_ids=self._write(number, call.span[1], int(tokens)), duration_s=float(seconds))


class PlayedRun(NamedTuple):
    """What came of a run.

    Attributes:
        outputs: the requests that were served to their end, as they ended.
        given_up: those that were not, as far as they came.
        started_s: on the run's clock.
        seconds: how long the run was by that clock.
        wall_s: and by the wall clock.
    """

    outputs: list[RequestOutput]
    given_up: list[RequestOutput]
    started_s: float
    seconds: float
    wall_s: float


def play(
    engine: Engine,
    endpoints: ScriptedEndpoints,
    clock: Clock,
    requests: Sequence[tuple[float, Request]],
    most_s: float,
    progress: Progress,
    host_s: float = 0.0,
) -> PlayedRun:
    """Submit requests as their time comes and step the engine until all are done, or until `most_s` seconds have passed.

    What is unfinished then is aborted.

    Args:
        endpoints: the engine's.
        clock: the engine's.
        requests: with the second at which each arrives, in order.
        progress: told a few times a second, by the wall clock.
        host_s: seconds to wait after every step: what the engine's own work takes, where the clock does not see it.
    """
    started_s, began = clock.now(), time.monotonic()
    outputs: list[RequestOutput] = []
    live: set[str] = set()
    coming = iter(requests)
    upcoming = next(coming, None)
    now, shown = started_s, began
    while (upcoming is not None or engine.has_work) and now < started_s + most_s:
        while upcoming is not None and started_s + upcoming[0] <= now:
            engine.submit(upcoming[1])
            live.add(upcoming[1].id)
            upcoming = next(coming, None)
        endpoints.next_arrival_s = started_s + upcoming[0] if upcoming is not None else float("inf")
        if engine.has_work:
            finished = [event.output for event in engine.step() if isinstance(event, Finished)]
            live.difference_update(output.request_id for output in finished)
            outputs += finished
            if host_s:
                clock.wait(Event(), host_s)
        else:
            clock.wait(Event(), endpoints.next_arrival_s - now)
        now = clock.now()
        if time.monotonic() - shown > SHOWN_EVERY_S:
            progress(now - started_s, most_s)
            shown = time.monotonic()
    progress(most_s, most_s)
    for request_id in sorted(live, key=int):
        engine.abort(request_id)
    aborted = [event.output for event in engine.step() if isinstance(event, Finished)] if live else []
    served = [output for output in outputs if output.outputs[0].finish_reason in ("stop", "length")]
    failed = [output for output in outputs if output.outputs[0].finish_reason not in ("stop", "length")]
    return PlayedRun(served, failed + aborted, started_s, now - started_s, time.monotonic() - began)
