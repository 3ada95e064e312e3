"""Plays scripts and sessions of agents on an engine: clients that submit requests at scripted times, and a dispatcher that
answers their calls.

One loop plays them, whether the engine computes or only prices its plans, under a virtual clock or a real one. No JAX.

A turn of a session is a request of its own, as agents send it to a server. Its prompt repeats the conversation so far, without
a name of the session, and the engine finds the context by the prompt. An answer that calls a tool ends with a call that the
client runs; a person reads any other answer. Nothing tells the engine that a session is over. A client that is refused at the
door comes again.
"""

import heapq
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from threading import Event
from typing import NamedTuple, Protocol, final

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.dispatcher import Clock
from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError
from jinfercept.events import Finished
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.door import RETRY_S
from jinfercept.sim.agent_sessions import ScriptedSession
from jinfercept.sim.workload import Script, arrival_times

Writer = Callable[[int, int, int], tuple[int, ...]]
"""Makes token ids of prompts and results, from a request's or a session's number, a place in it (0: the prompt) and a count."""

FIRST_SESSIONS_S = 120.0
"""Seconds in which the first of a number of live sessions begin, unless a load says otherwise."""

NEVER_S = 1e9
"""Seconds after which, to an oracle, a client returns that never does."""

MOST_TURNS = 1 << 12
"""Most turns of a session of which each adds tokens of its own."""

NUMBERS = 1 << 6
"""Numbers of a session and its sub-agents; the next session begins behind them."""


TOKENS = 1 << 30
"""Tokens of `session_tokens` are below it."""


def session_tokens(number: int, place: int, count: int) -> tuple[int, ...]:
    """A `Writer` for engines that compute nothing: a turn adds one token, repeated, which no other turn has."""
    return ((number * MOST_TURNS + place % MOST_TURNS) % TOKENS,) * count


@dataclass(frozen=True)
class SessionLoad:
    """Sessions of a run, drawn in random order, each once before any comes again."""

    sessions: Sequence[ScriptedSession]
    seed: int  # decides that order and the times
    live: int = 0  # sessions at a time, without sub-agents: where one ends, another begins; 0: they come at a rate
    rate: float = 0.0  # sessions per second, Poisson, where `live` is 0
    duration_s: float = 1200.0  # seconds in which sessions begin
    named: bool = False  # turns carry the name of their session, as some clients send it
    ramp_s: float = FIRST_SESSIONS_S  # seconds in which the first `live` sessions begin
    # The first `live` sessions begin with any of their turns, whose whole prompt is then new, so that a short run has
    # contexts as long as those of an hour. A run of more live sessions begins with those of a smaller run, and others.
    midway: bool = False

    def __len__(self) -> int:
        return self.live or round(self.rate * self.duration_s)

    def __post_init__(self) -> None:
        if self.live < 0 or not (self.live or self.rate > 0):
            raise ConfigError("no session can begin", got=f"live={self.live}, rate={self.rate}", fix="a number above 0")


class TurnRecord(NamedTuple):
    """A turn that was submitted. Times are seconds of the run."""

    # number of its session: `NUMBERS` times its place among the drawn sessions; of a sub-agent, a number behind it
    session: int
    turn: int  # its place in the session
    submitted_s: float
    first_token_s: float | None  # None if it had none when the run ended
    finished_s: float  # at its end, or the run's
    finished: bool  # served to its end
    prompt: int  # tokens, as the next three
    generated: int
    new: int  # of the prompt: neither sent nor read by the session before, nor shared by all
    cached: int  # of the prompt: not computed for this turn
    door_s: float  # seconds of waiting at the door and of refusals there

    @property
    def lost(self) -> int:
        """Tokens that were computed for the turn although the session had sent or read them before, or all sessions share
        them."""
        return max(0, self.prompt - self.new - self.cached) if self.first_token_s is not None else 0

    @property
    def delay_s(self) -> float:
        """Turn delay: seconds from the submission, or from when it came in at the door, to the first token or the run's end."""
        return (self.finished_s if self.first_token_s is None else self.first_token_s) - self.submitted_s - self.door_s


@dataclass(slots=True)
class _Live:
    number: int
    script: ScriptedSession
    root: int  # number of the parent of sub-agents, else its own
    first: int = 0  # the turn with which it begins
    turn: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))
    refused: TurnRecord | None = None  # the last time at the door


@final
class SessionClients:
    """The clients of a load, for `sim.scripted.drive`. Times are seconds of the run, which starts at `started_s` of the
    engine's clock.

    With `known_durations`, requests carry the seconds until the next turn, for an oracle estimator.
    """

    def __init__(self, load: SessionLoad, write: Writer, known_durations: bool = False, started_s: float = 0.0) -> None:
        self.started_s = started_s
        self._load, self._write, self._known_durations = load, write, known_durations
        self._rng = Random(load.seed)
        self._draws = Random(f"sessions {load.seed}") if load.midway else self._rng
        self._bag: list[ScriptedSession] = []
        self._due: list[tuple[float, int, _Live]] = []
        self._sent: dict[str, tuple[float, _Live]] = {}
        self._open: dict[int, int] = {}  # unfinished sessions by the number of the one that began them
        self.records: list[TurnRecord] = []  # turns that have ended, in the order of their ends
        self.streams: dict[str, list[int]] = {}  # generated tokens of finished turns, by request id
        # sessions that have begun, sub-agents too, and those of them whose last turn was served
        self.begun = self.ended_sessions = self._count = self._drawn = 0
        if load.live:
            ramp_s = min(load.ramp_s, load.duration_s)
            times = sorted(self._rng.uniform(0.0, ramp_s) for _ in range(load.live))
        else:
            times = arrival_times(load.rate, load.duration_s, self._rng)
        self._times: Iterator[float] = iter(times)
        self._next_begin_s = next(self._times, inf)

    @property
    def next_s(self) -> float:
        return min(self._next_begin_s, self._due[0][0] if self._due else inf)

    def due(self, now: float) -> Iterator[Request]:
        while self._next_begin_s <= now:
            self._draw(self._next_begin_s)
            self._next_begin_s = next(self._times, inf)
        while self._due and self._due[0][0] <= now:
            at_s, _, live = heapq.heappop(self._due)
            request = self._request(live)
            self._sent[request.id] = (at_s, live)
            yield request

    def ended(self, output: RequestOutput) -> None:
        """Record an answer that has ended. The session goes on after its pause, or another one begins."""
        at_s, live = self._sent.pop(output.request_id)
        script, metrics = live.script.turns[live.turn], output.metrics
        finished = output.outputs[0].finish_reason in ("stop", "length")
        came_s = at_s
        if live.refused is not None:
            self.records.remove(live.refused)
            came_s = live.refused.submitted_s
        first_s, finished_s = metrics.first_token_s, metrics.finished_s - self.started_s
        record = TurnRecord(
            live.number,
            live.turn,
            came_s,
            None if first_s is None else first_s - self.started_s,
            finished_s,
            finished,
            script.prompt,
            output.outputs[0].num_generated,
            script.prompt - (script.kept if live.turn > live.first else live.script.shared),
            output.num_cached_tokens,
            metrics.door_s + at_s - came_s,
        )
        self.records.append(record)
        live.refused = None if finished else record
        if not finished:
            self._push(finished_s + RETRY_S, live)
            return
        live.tokens.extend(output.outputs[0].token_ids)
        self.streams[output.request_id] = output.outputs[0].token_ids
        for sub in live.script.sub_agents:
            if sub.after_turn == live.turn:
                number = live.number + 1 + live.script.sub_agents.index(sub)
                self._begin(sub.session, finished_s, number, live.root)
        live.turn += 1
        if live.turn < len(live.script.turns):
            self._push(finished_s + live.script.turns[live.turn].pause_s, live)
            return
        self.ended_sessions += 1
        self._open[live.root] -= 1
        if not self._open[live.root]:
            del self._open[live.root]
            if self._load.live and finished_s < self._load.duration_s:
                self._draw(finished_s)

    def _draw(self, at_s: float) -> None:
        if not self._bag:
            self._bag = list(self._load.sessions)
            self._draws.shuffle(self._bag)
        number, script = self._drawn * NUMBERS, self._bag.pop()
        midway = self._load.midway and self._drawn < self._load.live
        self._drawn += 1
        self._begin(script, at_s, number, number, self._draws.randrange(len(script.turns)) if midway else 0)

    def _begin(self, script: ScriptedSession, at_s: float, number: int, root: int, first: int = 0) -> None:
        self.begun += 1
        self._open[root] = self._open.get(root, 0) + 1
        self._push(at_s, _Live(number, script, root, first, first))

    def _push(self, at_s: float, live: _Live) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_s, self._count, live))

    def _request(self, live: _Live) -> Request:
        script = live.script
        turn = script.turns[live.turn]
        if live.turn > live.first:
            del live.tokens[turn.kept :]
        else:
            # number 0 writes the tokens that all share; a session's number + 1 and a turn's place write the turn's own
            live.tokens = array("i", self._write(0, 0, script.shared))
        live.tokens.extend(self._write(live.number + 1, live.turn, turn.prompt - len(live.tokens)))
        last = live.turn + 1 == len(script.turns)
        expected_s = None
        if self._known_durations:
            expected_s = NEVER_S if last else script.turns[live.turn + 1].pause_s
        calls = {turn.decode: [Call(turn.tool, "", by_caller=True)]} if turn.calls else {}
        return Request(
            f"{live.number}.{live.turn}",
            live.tokens[:],
            SamplingParams(temperature=0.0, max_tokens=turn.decode, ignore_eos=True),
            detector=ScriptedDetector(calls) if calls else None,
            ids_below=TOKENS if self._write is session_tokens else None,
            follow_up=FollowUp(f"session {live.number}" if self._load.named else "", expected_s),
        )


def plain_tokens(number: int, place: int, count: int) -> tuple[int, ...]:
    """A request's number as its tokens, so that no two requests share a page; for engines that compute nothing."""
    return (number,) * count


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
    host_s: float = 0.0,
) -> PlayedRun:
    """Play requests, given in order with the second at which each arrives, as `drive`."""
    listed = _ListedRequests(requests)
    lasted = drive(engine, dispatcher, clock, listed, most_s, host_s)
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
    host_s: float = 0.0,
) -> RunSeconds:
    """Submit requests at their times and step the engine until all have finished or wait for calls that never return. Then,
    or after `most_s` seconds, abort the others.

    `host_s` seconds pass after every step, for the engine's own
    work, which a virtual clock does not see.

    Raises:
        PluginError: a policy, an order or an estimator of the user's own failed, so that the rest of the run would say
            nothing of it. Any other exception of a step of the engine is raised too.
    """
    started_s, began = clock.now(), time.monotonic()
    live: dict[str, None] = {}
    now = started_s
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
