"""Two models of a replica for simulated fleets: the engine itself, with priced steps, and a coarse one for many of them.

The coarse one has no steps: it computes a request's times when the request arrives, from a queue of prompts, the price of a
step with so many requests at a time, and a pool of memory from which the least recently used contexts fall.
"""

import heapq
from collections import OrderedDict
from math import inf
from typing import NamedTuple, Protocol, final

from benchmarks.fleet_sessions import Turn
from jinfercept.events import Finished
from jinfercept.kv.page import Residency
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.sequence import Sequence
from jinfercept.sim.scripted import ScriptedDispatcher, plain_tokens
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.simulator import VirtualClock

_SHARED_TOKEN = 1 << 30


class FinishedTurn(NamedTuple):
    """A turn with its times.

    Attributes:
        first_token_s, finished_s: seconds of the cluster's clock.
        cached_tokens: of its prompt that were not recomputed.
    """

    turn: Turn
    first_token_s: float
    finished_s: float
    cached_tokens: int


class SimulatedReplica(Protocol):
    """A replica on the clock of a cluster."""

    @property
    def next_s(self) -> float:
        """Second of its next event; infinity while it is idle."""
        ...

    def submit(self, turn: Turn, now: float) -> None: ...

    def advance(self) -> list[FinishedTurn]:
        """Play the next event; returns the turns that end with it."""
        ...

    def queue_s(self, now: float) -> float:
        """Seconds until it would begin with a turn that arrives now."""
        ...


# -- fine --------------------------------------------------------------------------------------------------------------


@final
class SteppedReplica:
    """The engine of a `Simulation`: the real scheduler and pages, whose steps are priced.

    Args:
        simulation: its machine, policy and limits.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._profile = simulation.profile
        self._clock = VirtualClock()
        self._opened = simulation.open_engine(self._clock, ScriptedDispatcher(self._clock, plain_tokens))
        self._chunk_tokens = self._opened.buckets[-1]
        self._turns: dict[str, Turn] = {}

    @property
    def next_s(self) -> float:
        return self._clock.time if self._turns else inf

    def submit(self, turn: Turn, now: float) -> None:
        if not self._turns:
            self._clock.time = max(self._clock.time, now)
        name = f"{turn.session.number} {turn.number}"
        params = SamplingParams(temperature=0.0, max_tokens=turn.new_tokens, ignore_eos=True)
        segment = turn.session.script.segments[turn.number]
        follow_up = FollowUp(last=segment.call_s is None, reader=segment.tool or turn.session.script.kind)
        self._turns[name] = turn
        self._opened.engine.submit(Request(name, prompt_of(turn), params, follow_up=follow_up))

    def advance(self) -> list[FinishedTurn]:
        finished = list[FinishedTurn]()
        for event in self._opened.engine.step():
            if not isinstance(event, Finished):
                continue
            if event.failure is not None:
                raise event.failure
            output = event.output
            turn, metrics = self._turns.pop(output.request_id), output.metrics
            first_s = metrics.finished_s if metrics.first_token_s is None else metrics.first_token_s
            finished.append(FinishedTurn(turn, first_s, metrics.finished_s, output.num_cached_tokens))
        return finished

    def queue_s(self, now: float) -> float:
        scheduler = self._opened.engine.scheduler
        tokens = sum(
            _missing_tokens(sequence, scheduler.kv.page_size) for sequence in (*scheduler.running, *scheduler.waiting)
        )
        return max(0.0, self._clock.time - now) + self._profile.recompute_s(tokens, self._chunk_tokens)


def _missing_tokens(sequence: Sequence, page_size: int) -> int:
    if sequence.context.held:
        missing = sequence.length - sequence.context.ready
        return missing if missing > 1 else 0
    resident = sum(run.num_pages for run in sequence.context.runs() if run.residency is not Residency.MISSING)
    return max(0, sequence.length - resident * page_size)


def prompt_of(turn: Turn) -> tuple[int, ...]:
    """Token ids of a turn's prompt: those that sessions share, those of the session, and zeros that the model generated."""
    session = turn.session
    own = session.number + 1
    tokens = [_SHARED_TOKEN] * session.shared_tokens + [own] * session.script.prompt
    for segment in session.script.segments[: turn.number]:
        tokens += [0] * segment.decode + [own] * segment.returned
    return tuple(tokens)


# -- coarse ------------------------------------------------------------------------------------------------------------


@final
class CoarseReplica:
    """A replica without steps: prompts one after another, answers side by side, contexts in the order of use.

    A prompt waits for those before it, and for memory if running requests hold it all. Full steps then compute the tokens that
    are not held, at their price for as many requests as run, beside the copy of what is only on the host. A generated token
    takes the price of a step that only decodes, or of a full one for the share of the time in which prompts are computed. A
    context that leaves the device and the host is lost. What sessions share is held once.

    Args:
        simulation: its machine and pools; policy and estimator are not simulated.
    """

    def __init__(self, simulation: Simulation) -> None:
        profile = self._profile = simulation.profile
        self._kv_tokens, self._host_tokens = simulation.kv_tokens, simulation.host_tokens
        self._chunk_tokens = simulation.buckets[-1] if simulation.buckets else profile.saturation
        self._most_running = simulation.max_num_seqs
        self._free_s = 0.0
        self._running: list[tuple[float, int]] = []
        self._running_tokens = 0
        self._ends: list[tuple[float, int, FinishedTurn]] = []
        self._count = 0
        self._contexts: OrderedDict[int, int] = OrderedDict()
        self._context_tokens = 0
        self._busy_s, self._busy_at = 0.0, 0.0
        self._shared_tokens = 0

    @property
    def next_s(self) -> float:
        return self._ends[0][0] if self._ends else inf

    def submit(self, turn: Turn, now: float) -> None:
        profile, number, shared = self._profile, turn.session.number, turn.session.shared_tokens
        own = self._contexts.pop(number, 0)
        self._context_tokens -= own
        held_tokens, host_tokens = min(own + shared, turn.prompt_tokens - 1), self._on_host(own)
        if not own:
            held_tokens = shared if self._shared_tokens else 0
        self._shared_tokens = max(self._shared_tokens, shared)
        need = turn.prompt_tokens + turn.new_tokens - shared
        start_s = max(now, self._free_s)
        while self._running and (
            self._running[0][0] <= start_s
            or self._running_tokens + need > self._kv_tokens - shared
            or len(self._running) >= self._most_running
        ):
            end_s, tokens = heapq.heappop(self._running)
            self._running_tokens -= tokens
            start_s = max(start_s, end_s)
        num_running = len(self._running)
        contexts = self._running_tokens + num_running * shared + turn.prompt_tokens
        room = max(1, self._chunk_tokens - num_running)
        full_s = profile.step_s(room + num_running, contexts)
        decode_s = profile.step_s(num_running + 1, contexts)
        missing = turn.prompt_tokens - held_tokens
        prompt_s = missing / room * full_s
        self._free_s = start_s + prompt_s
        last_s = profile.step_s(min(missing, room) + num_running, contexts)
        first_s = max(self._free_s, start_s + last_s, start_s + profile.swap_s(host_tokens)) + decode_s / 2
        share = min(1.0, self._busy_share(prompt_s, now))
        token_s = (1.0 - share) * decode_s + share * full_s
        end_s = first_s + token_s * (turn.new_tokens - 1)
        heapq.heappush(self._running, (end_s, need))
        self._running_tokens += need
        self._count += 1
        heapq.heappush(self._ends, (end_s, self._count, FinishedTurn(turn, first_s, end_s, held_tokens)))

    def advance(self) -> list[FinishedTurn]:
        finished = heapq.heappop(self._ends)[2]
        turn = finished.turn
        if turn.session.script.segments[turn.number].call_s is not None:
            tokens = turn.prompt_tokens + turn.new_tokens - turn.session.shared_tokens
            self._contexts[turn.session.number] = tokens
            self._context_tokens += tokens
            while self._context_tokens > self._kv_tokens + self._host_tokens - self._running_tokens and self._contexts:
                self._context_tokens -= self._contexts.popitem(last=False)[1]
        return [finished]

    def queue_s(self, now: float) -> float:
        return max(0.0, self._free_s - now)

    def _on_host(self, held_tokens: int) -> int:
        """Tokens of a context that are only on the host: the share of all contexts that the device has no room for."""
        over = self._context_tokens + held_tokens + self._running_tokens + self._shared_tokens - self._kv_tokens
        return (
            round(held_tokens * min(1.0, over / (self._context_tokens + held_tokens)))
            if held_tokens and over > 0
            else 0
        )

    def _busy_share(self, prompt_s: float, now: float) -> float:
        """Share of the last seconds, decayed, in which prompts were computed."""
        self._busy_s *= 0.5 ** ((now - self._busy_at) / _BUSY_HALF_LIFE_S)
        self._busy_s, self._busy_at = self._busy_s + prompt_s, now
        return self._busy_s * _LN_2 / _BUSY_HALF_LIFE_S


_BUSY_HALF_LIFE_S, _LN_2 = 10.0, 0.6931
