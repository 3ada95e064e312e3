"""Plays scripts on an engine: requests that arrive and call at scripted times, and a dispatcher that answers them.

One loop plays them, whether the engine computes or only prices its plans, under a virtual clock or a real one. No JAX.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import NamedTuple, Protocol, final

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.engine import Engine
from jinfercept.engine.protocols import Clock
from jinfercept.events import Finished
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sim.session_clients import Writer
from jinfercept.sim.workload import Script

SHOWN_EVERY_S = 0.1
"""Seconds between two calls of a `Progress`, by the wall clock."""

_SHARED_TOKEN = 1 << 30
"""Token that prompts share; tokens that are a request's number are below."""

Progress = Callable[[float, float], None]
"""Called with the seconds played so far, and the most that there can be."""


def plain_tokens(number: int, place: int, count: int) -> tuple[int, ...]:
    """A request's number as its tokens, so that no two requests share a page; for engines that compute nothing."""
    return (number,) * count


def one_prompt_tokens(number: int, place: int, count: int) -> tuple[int, ...]:
    """`plain_tokens`, but all prompts begin with the same tokens."""
    return ((number if place else _SHARED_TOKEN),) * count


def make_request(number: int, script: Script, write: Writer, known_durations: bool = False) -> Request:
    """A scripted request: greedy, of a fixed length, with calls at fixed places. `number` is its id and the seed of its
    tokens."""
    # for an oracle estimator, calls carry their duration
    calls = dict(_calls(script, known_durations))
    params = SamplingParams(temperature=0.0, max_tokens=script.generated, ignore_eos=True)
    return Request(str(number), write(number, 0, script.prompt), params, detector=ScriptedDetector(calls))


def returned_tokens(request: Request) -> int:
    """Tokens that all calls of a scripted request return together, without those of markup."""
    if request.detector is None:
        return 0
    assert isinstance(request.detector, ScriptedDetector)
    return sum(int(call.arguments.split()[1]) for calls in request.detector.script.values() for call in calls)


def ever_returns(request: Request) -> bool:
    """Whether all calls of a scripted request return: a request with one that lasts for ever can never finish."""
    if not isinstance(request.detector, ScriptedDetector):
        return True
    calls = (call for calls in request.detector.script.values() for call in calls)
    return all(float(call.arguments.split()[0]) < math.inf for call in calls)


def _calls(script: Script, known_durations: bool) -> Iterator[tuple[int, list[Call]]]:
    generated = 0
    for segment in script.segments:
        generated += segment.decode
        if segment.call_s is not None:
            expected_s = segment.call_s if known_durations else None
            name = segment.tool or script.kind
            yield generated, [Call(name, f"{segment.call_s} {segment.returned}", expected_s=expected_s)]


class ScriptedDispatcher:
    """Answers scripted calls after their seconds; starts no threads.

    A call pauses its request. Its arguments are `"seconds tokens"`.
    """

    def __init__(self, clock: Clock, write: Writer) -> None:
        self.next_arrival_s = float("inf")  # an idle engine sleeps no longer than this
        self.lost: set[str] = set()  # requests that wait for a call that never returns
        self._clock, self._write = clock, write
        self._due: list[tuple[float, int, str, tuple[Call, ...]]] = []
        self._live: dict[str, int] = {}
        self._count = 0

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool], tenant: str) -> None:
        self._count += 1
        self._live[request_id] = self._count
        seconds = max(float(call.arguments.split()[0]) for call in calls)
        if seconds == math.inf:
            self.lost.add(request_id)
            return
        heapq.heappush(self._due, (self._clock.now() + seconds, self._count, request_id, calls))

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]:
        results = []
        while self._due and self._due[0][0] <= self._clock.now():
            _, number, request_id, calls = heapq.heappop(self._due)
            if self._live.get(request_id) == number:
                del self._live[request_id]
                results.append((request_id, tuple(self._answer(int(request_id), call) for call in calls)))
        return results

    def start(self, request_id: str, call: Call, tools: Mapping[str, Tool], tenant: str) -> None:
        raise AssertionError("the calls of scripts pause their requests")

    def poll_started(self) -> list[tuple[str, Call, Result]]:
        return []

    def next_s(self) -> float:
        """Second of the clock at the next return or arrival."""
        return min(self._due[0][0] if self._due else math.inf, self.next_arrival_s)

    def cancel(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.lost.discard(request_id)

    def _answer(self, number: int, call: Call) -> Result:
        seconds, tokens = call.arguments.split()
        return Result("", token_ids=self._write(number, call.span[1], int(tokens)), duration_s=float(seconds))


class RunSeconds(NamedTuple):
    """The length of a run by its clock and by the wall clock, and the second of its clock at which it started."""

    started_s: float
    seconds: float
    wall_s: float


class PlayedRun(NamedTuple):
    """The result of a run."""

    outputs: list[RequestOutput]  # requests that were served to their end, in the order of their ends
    aborted: list[RequestOutput]  # requests that failed or were unfinished at the end, with their tokens so far
    lasted: RunSeconds


class Clients(Protocol):
    """The source of the requests that are played. Times are seconds of the run."""

    @property
    def next_s(self) -> float:
        """When the next request is submitted; infinity if that depends on answers, or if none will be."""
        ...

    def due(self, now: float) -> Iterable[Request]:
        """The requests that are submitted until now, in order."""
        ...

    def ended(self, output: RequestOutput) -> None:
        """A request has ended; at the run's end also one that was aborted."""
        ...


def play(
    engine: Engine,
    dispatcher: ScriptedDispatcher,
    clock: Clock,
    requests: Sequence[tuple[float, Request]],
    most_s: float,
    progress: Progress,
    host_s: float = 0.0,
) -> PlayedRun:
    """Play requests, given in order with the second at which each arrives, as `drive`."""
    listed = _ListedRequests(requests)
    lasted = drive(engine, dispatcher, clock, listed, most_s, progress, host_s)
    served = [output for output in listed.outputs if output.outputs[0].finish_reason in ("stop", "length")]
    failed = [output for output in listed.outputs if output.outputs[0].finish_reason not in ("stop", "length")]
    return PlayedRun(served, failed, lasted)


@final
class _ListedRequests:
    def __init__(self, requests: Sequence[tuple[float, Request]]) -> None:
        self._coming = iter(requests)
        self._next = next(self._coming, None)
        self.outputs: list[RequestOutput] = []

    @property
    def next_s(self) -> float:
        return math.inf if self._next is None else self._next[0]

    def due(self, now: float) -> Iterator[Request]:
        while self._next is not None and self._next[0] <= now:
            request = self._next[1]
            self._next = next(self._coming, None)
            yield request

    def ended(self, output: RequestOutput) -> None:
        self.outputs.append(output)


def drive(
    engine: Engine,
    dispatcher: ScriptedDispatcher,
    clock: Clock,
    clients: Clients,
    most_s: float,
    progress: Progress,
    host_s: float = 0.0,
) -> RunSeconds:
    """Submit requests at their times and step the engine until all have finished or wait for calls that never return. Then,
    or after `most_s` seconds, abort the others.

    `progress` is called a few times a second, by the wall clock. `host_s` seconds pass after every step, for the engine's own
    work, which a virtual clock does not see.

    Raises:
        PluginError: a policy, an order or an estimator of the user's own failed, so that the rest of the run would say
            nothing of it. Any other exception of a step of the engine is raised too.
    """
    started_s, began = clock.now(), time.monotonic()
    live: dict[str, None] = {}
    now, shown = started_s, began
    while (clients.next_s < math.inf or len(live) > len(dispatcher.lost)) and now < started_s + most_s:
        for request in clients.due(now - started_s):
            engine.submit(request)
            live[request.id] = None
            if engine.scheduler.door.overload == "refuse" and engine.place_at_door((request,)):
                engine.abort(request.id)
        dispatcher.next_arrival_s = started_s + clients.next_s
        if engine.has_work or not engine.quiescent:
            _end(engine, clients, live)
            if host_s:
                clock.wait(Event(), host_s)
        else:
            clock.wait(Event(), dispatcher.next_arrival_s - now)
        now = clock.now()
        if time.monotonic() - shown > SHOWN_EVERY_S:
            progress(now - started_s, most_s)
            shown = time.monotonic()
    progress(most_s, most_s)
    for request_id in live:
        engine.abort(request_id)
    if live:
        _end(engine, clients, live)
    return RunSeconds(started_s, now - started_s, time.monotonic() - began)


def _end(engine: Engine, clients: Clients, live: dict[str, None]) -> None:
    ended = [event for event in engine.step() if isinstance(event, Finished)]
    for event in ended:
        if event.failure is not None:
            raise event.failure
    for event in ended:
        live.pop(event.request_id, None)
        clients.ended(event.output)
