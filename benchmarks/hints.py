"""`python -m benchmarks hints [MODEL]`: what hints of clients change for coding agents, simulated and on a server.

The same sessions are played with and without a hint. In the simulation a hint means what a scheduler could do with it at best,
so that a hint without an effect there needs no code: a time to live drops every context whose next turn comes later at once,
an expected length is the true one, and a hint about the return of a session, such as the end of a sub-agent, is the true second
of every return (`examples/rivals/belady.py`). The server plays `agent_lengths.jsonl`, shortened, with the hints as clients send
them.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean
from typing import Any, NamedTuple, final

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import track

from benchmarks.agents import OwnModel, Scale, load_sessions, prompts_of
from benchmarks.servers import Reply, child_server, complete, make_target
from jinfercept.cli.options import Maybe
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.orders import LONGER, MissingWork, Order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.sequence import Sequence as Scheduled
from jinfercept.sim.agent_sessions import fitting
from jinfercept.sim.agent_sessions import load_sessions as load_trace
from jinfercept.sim.reports import check_least, check_outputs, plain_table, show, write_json
from jinfercept.sim.scripted import (
    NEVER_S,
    NUMBERS,
    ScriptedDispatcher,
    SessionClients,
    SessionLoad,
    drive,
    plain_tokens,
    session_tokens,
)
from jinfercept.sim.simulation import Simulation, VirtualClock

_TTL_S = 300.0
_POOL, _PAGE, _LIVE = 400_000, 64, 8
"""Tokens of the pools of the device and of the host, and sessions at a time: each pool holds half of their contexts."""
_TOKEN_S = 0.02
"""Seconds of a generated token, about, where the expected length orders requests."""
_SHORT = Scale(1 / 64, 1 / 32, 0.1)
_CALLS, _CLIENTS = 4, 8
_FLAGS = {"max_num_seqs": 2, "kv_tokens": 4096, "max_model_len": 2048, "swap_space": 0, "overload": "serve"}
"""Of the server: as in the simulation, no session waits at the door (docs/serving.md) for those of the run before."""

Fields = Mapping[str, Any]


@final
class ShortAnswersFirst(Order):
    """The default order, with the seconds that the answer is expected to take as work that is missing."""

    def __init__(self, inputs: PolicyInputs) -> None:
        self._missing_work = MissingWork(inputs)

    def key(self, sequence: Scheduled, now: float) -> float:
        """Seconds."""
        return self._missing_work.key(sequence, now) + LONGER * _TOKEN_S * sequence.max_tokens


class Hint(NamedTuple):
    """A hint.

    Attributes:
        simulated: makes the hinted request of one whose `follow_up` has the session and the true seconds until the next turn.
        fields: of the body, by the number of a session and whether a call is its last one; None: no client sends it by itself.
        options: of the simulation.
        read: what the server does with it.
    """

    simulated: Callable[[Request, FollowUp], Request]
    fields: Callable[[int, bool], Fields] | None
    options: Fields
    read: str


def _plain(request: Request, told: FollowUp) -> Request:
    return request


def _preferred(number: int) -> bool:
    return number % 2 == 0


def _with_priority(request: Request, told: FollowUp) -> Request:
    return replace(request, priority=-5 if _preferred(int(request.id.partition(".")[0]) // NUMBERS) else 0)


def _with_follow_up(**fields: Callable[[FollowUp], Any]) -> Callable[[Request, FollowUp], Request]:
    return lambda request, told: replace(
        request, follow_up=FollowUp(**{name: value(told) for name, value in fields.items()})
    )


def _nvext(**hints: Any) -> Fields:
    return {"nvext": {"agent_hints": hints}}


_RETURNS = {"policy": "examples.rivals.belady:Belady", "estimator": "oracle"}
_ALL_KNOWN = _with_follow_up(expected_s=lambda told: told.expected_s)
HINTS: Mapping[str, Hint] = {
    "priority": Hint(
        _with_priority,
        lambda number, last: {"priority": -5} if _preferred(number) else {},
        {},
        "order of waiting requests",
    ),
    "jinfercept.release": Hint(
        _with_follow_up(last=lambda told: told.expected_s == NEVER_S),
        lambda number, last: {"jinfercept": {"release": last}},
        {},
        "context is not retained",
    ),
    "session_id, x-session-id": Hint(
        _with_follow_up(session=lambda told: told.session),
        lambda number, last: {"session_id": f"agent {number}"},
        {},
        "names the context",
    ),
    "jinfercept.expected_s": Hint(
        _ALL_KNOWN,
        lambda number, last: {"jinfercept": {"expected_s": 0.2}},
        {},
        "estimates, which the default policy does not use",
    ),
    "agent_hints.osl": Hint(_plain, lambda number, last: _nvext(osl=32), {"order": ShortAnswersFirst}, "nothing"),
    "agent_hints.speculative_prefill": Hint(
        _plain, lambda number, last: _nvext(speculative_prefill=True), {}, "nothing: the answer's KV is there"
    ),
    "cache_control.ttl, prompt_cache_retention": Hint(
        _with_follow_up(last=lambda told: told.expected_s is not None and told.expected_s > _TTL_S),
        lambda number, last: {"prompt_cache_retention": "24h"},
        {},
        "nothing",
    ),
    "prompt_cache_key": Hint(
        _plain, lambda number, last: {"prompt_cache_key": f"agent {number}"}, {}, "nothing; chooses a fleet's replica"
    ),
    "parents' ids, all returns": Hint(_ALL_KNOWN, None, _RETURNS, "nothing"),
}
"""By name."""


class Measured(NamedTuple):
    """Mean seconds to the first token, of sessions with even numbers and of the others; and tokens that a session had sent
    or read before and that were computed again, over those of its prompts."""

    even_s: float
    odd_s: float
    again: float

    @property
    def mean_s(self) -> float:
        return (self.even_s + self.odd_s) / 2


@final
class _HintedClients:
    """The clients of a load, whose requests have a hint."""

    def __init__(self, clients: SessionClients, hinted: Callable[[Request, FollowUp], Request]) -> None:
        self._clients, self._hinted = clients, hinted

    @property
    def next_s(self) -> float:
        return self._clients.next_s

    def due(self, now: float) -> Iterator[Request]:
        for request in self._clients.due(now):
            assert request.follow_up is not None
            yield self._hinted(replace(request, follow_up=FollowUp()), request.follow_up)

    def ended(self, output: RequestOutput) -> None:
        self._clients.ended(output)


def simulated(hint: Hint | None, seed: int, duration_s: float) -> Measured:
    """Play the sessions of the trace that ships with the package on the default policy."""
    options: dict[str, Any] = {"policy": "copy_ahead", "estimator": "history", "order": "missing_work"}
    simulation = Simulation(
        PROFILES["roofline-llama-3-8b-h100-attention"],
        duration_s=duration_s,
        drain_s=0.0,
        kv_tokens=_POOL,
        host_tokens=_POOL,
        page_size=_PAGE,
        max_model_len=_POOL,
        prefix_caching=True,
        **options | (dict(hint.options) if hint is not None else {}),
    )
    load = SessionLoad(
        fitting(load_trace("agents"), _POOL), seed, _LIVE, duration_s=duration_s, named=True, midway=True
    )
    clock = VirtualClock()
    dispatcher = ScriptedDispatcher(clock, plain_tokens)
    engine, _ = simulation.open_engine(clock, dispatcher)
    clients = SessionClients(load, session_tokens, known_durations=True)
    hinted = _HintedClients(clients, _plain if hint is None else hint.simulated)
    drive(engine, dispatcher, clock, hinted, simulation.most_s)
    records = [record for record in clients.records if record.submitted_s > duration_s / 4]
    delays = {
        even: [record.delay_s for record in records if _preferred(record.session // NUMBERS) is even]
        for even in (True, False)
    }
    again = sum(record.lost for record in records) / max(1, sum(record.prompt for record in records))
    return Measured(mean(delays[True]), mean(delays[False]), again)


def served(url: str, hint: Hint | None, seed: str) -> Measured:
    """Play shortened sessions on a server, with tokens that no other seed has."""
    sessions = [calls[:_CALLS] for calls in load_sessions(_SHORT)[:_CLIENTS]]
    fields = (lambda number, last: {}) if hint is None or hint.fields is None else hint.fields
    replies: list[tuple[int, int, Reply]] = []

    async def work(number: int, client: AsyncOpenAI) -> None:
        calls = prompts_of(sessions[number], Random(f"{seed}/{number}"))
        prompt = next(calls)
        for place in range(_CALLS):
            await asyncio.sleep(prompt.call.gap_s)
            last = place + 1 == _CALLS
            reply = await complete(client, "smollm2-135m", prompt.tokens, prompt.call.new, fields(number, last))
            replies.append((number, prompt.known, reply))
            if not last:
                prompt = calls.send(reply.token_ids)

    async def play() -> None:
        async with make_target(url, None, 600.0).client() as client:
            await asyncio.gather(*(work(number, client) for number in range(_CLIENTS)))

    asyncio.run(play())
    delays = {
        even: [reply.first_s or 0.0 for number, _, reply in replies if _preferred(number) is even]
        for even in (True, False)
    }
    again = sum(max(0, num_reusable - (reply.cached_tokens or 0)) for _, num_reusable, reply in replies)
    prompts = sum(reply.prompt_tokens or 0 for _, _, reply in replies)
    return Measured(mean(delays[True]), mean(delays[False]), again / max(1, prompts))


@dataclass(frozen=True, kw_only=True)
class Hints:
    """The command."""

    own: OwnModel = None
    seeds: int = 2
    """of the sessions"""
    duration: float = 600.0
    """seconds of a simulated run"""
    json: Maybe[str] = None
    """write the numbers to this file"""

    def run(self) -> int:
        """Measure every hint, and print a table; returns 0. Raises `ConfigError` if the options make no sense."""
        check_least("--seeds", self.seeds, 1)
        check_least("--duration", self.duration, 5.0)
        check_outputs((("--json", self.json),))
        named: dict[str, Hint | None] = {"none": None, **HINTS}
        rows: dict[str, dict[str, list[Measured]]] = {name: {} for name in named}
        for name, hint in _counted(named, "simulated"):
            rows[name]["simulated"] = [simulated(hint, seed, self.duration) for seed in range(self.seeds)]
        if self.own is not None:
            with child_server(self.own, _FLAGS) as url:
                served(url, None, "warm-up")
                sent = {name: hint for name, hint in named.items() if hint is None or hint.fields is not None}
                for name, hint in _counted(sent, "served"):
                    rows[name]["served"] = [served(url, hint, f"{name}/{seed}") for seed in range(self.seeds)]
        show(_table(rows))
        if self.json is not None:
            write_json(
                self.json,
                {
                    name: {kind: [run._asdict() for run in runs] for kind, runs in row.items()}
                    for name, row in rows.items()
                },
            )
        return 0


def _counted(hints: Mapping[str, Hint | None], title: str) -> Iterable[tuple[str, Hint | None]]:
    """The hints, with a display of how many have been measured."""
    return track(hints.items(), title, console=Console(stderr=True), transient=True)


def _table(rows: Mapping[str, Mapping[str, Sequence[Measured]]]) -> Any:
    columns = ["hint", "read as"]
    for kind in ("simulated", "served"):
        columns += [f"{kind}: even", "odd", "again"]
    caption = (
        "even, odd: mean seconds to the first token over those without the hint, of sessions with even and odd numbers (only\n"
        "even ones have the priority); again: share of prompt tokens computed again; none: seconds"
    )
    table = plain_table(columns, left=("hint", "read as"), caption=caption)
    for name, row in rows.items():
        cells = [name, "" if name == "none" else HINTS[name].read]
        for kind in ("simulated", "served"):
            runs, base = row.get(kind, ()), rows["none"].get(kind, ())
            if not runs:
                cells += ["-"] * 3
                continue
            for part in ("even_s", "odd_s"):
                values = [
                    getattr(run, part) / (1.0 if name == "none" else getattr(plain, part))
                    for run, plain in zip(runs, base, strict=True)
                ]
                cells.append(
                    f"{mean(values):.2f}" + (f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else "")
                )
            cells.append(f"{mean(run.again for run in runs):.1%}")
        table.add_row(*cells)
    return table
