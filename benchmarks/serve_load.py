"""Plays sessions against a server: at their arrivals, or so many at a time. Knows no reports.

A session is a script: its prompt, then turns of so many generated tokens, each but the last with a tool's seconds and result.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

from jinfercept.bench.conversations import Style
from jinfercept.bench.openai_client import Client, ClientReply, Target
from jinfercept.sim.workload import Script


class ClientLoad(NamedTuple):
    """How sessions come: `request_rate` of them a second, as a Poisson process, or always `concurrency` at a time."""

    request_rate: float | None
    concurrency: int | None

    def arrivals(self, number: int, seed: str) -> list[float]:
        """Seconds after the start at which so many sessions begin; all 0 where clients take one after another."""
        if self.request_rate is None:
            return [0.0] * number
        rng = Random(f"arrivals {seed}")
        return list(accumulate(rng.expovariate(self.request_rate) for _ in range(number)))

    def __str__(self) -> str:
        return f"{self.concurrency} clients" if self.request_rate is None else f"{self.request_rate:g}/s"


class PlayedSession(NamedTuple):
    """What came of one session.

    Attributes:
        script: it.
        began_s, ended_s: its first request was sent, its last answer came, as `time.perf_counter` says.
        tool_s: seconds in between that its tools took.
        replies: to its turns; after one that failed there are no more.
    """

    script: Script
    began_s: float
    ended_s: float
    tool_s: float
    replies: list[ClientReply]


class LoadRun(NamedTuple):
    """Everything that was played.

    Attributes:
        seconds: from the first request to the last answer.
        client_cpu_s: that this process took for it.
        sessions: by their numbers.
        planned: how many there were to be.
        interrupted: by the user, so that fewer were played.
    """

    seconds: float
    client_cpu_s: float
    sessions: list[PlayedSession]
    planned: int
    interrupted: bool


def run_load(
    target: Target,
    model: str,
    style: Style,
    scripts: Sequence[Script],
    load: ClientLoad,
    seed: str,
    told: Callable[[int], None] = lambda done: None,
) -> LoadRun:
    """Play all sessions.

    Args:
        target, model: who is asked for what.
        style: how clients talk.
        scripts: the sessions, in order.
        load: how they come.
        seed: of arrivals and of what is said; the same one says the same.
        told: of how many sessions are over.

    Returns:
        What there is; if interrupted, the sessions that were over.

    Raises:
        ConfigError: the server cannot do what `style` needs.
        KeyboardInterrupt: before any session was over.
    """
    played: dict[int, PlayedSession] = {}

    async def go() -> None:
        async with Client(target) as client:

            async def play(number: int) -> None:
                talk_seed = f"{seed}/{number}"
                played[number] = await _play(client, model, style, scripts[number], talk_seed)
                told(len(played))

            await _drive(play, len(scripts), load, seed)

    cpu_s, interrupted = time.process_time(), False
    try:
        asyncio.run(go())
    except KeyboardInterrupt:
        interrupted = True
    cpu_s = time.process_time() - cpu_s
    if interrupted and not played:
        raise KeyboardInterrupt
    sessions = [played[number] for number in sorted(played)]
    began_s, ended_s = min(played.began_s for played in sessions), max(played.ended_s for played in sessions)
    return LoadRun(ended_s - began_s, cpu_s, sessions, len(scripts), interrupted)


async def _drive(play: Callable[[int], Coroutine[Any, Any, None]], number: int, load: ClientLoad, seed: str) -> None:
    """Play so many sessions as the load says."""
    waiting = iter(enumerate(load.arrivals(number, seed)))
    began_s = time.perf_counter()

    async def client() -> None:
        for session, at_s in waiting:
            await asyncio.sleep(began_s + at_s - time.perf_counter())
            await play(session)

    await asyncio.gather(*(client() for _ in range(load.concurrency or number)))


async def _play(client: Client, model: str, style: Style, script: Script, seed: str) -> PlayedSession:
    """One session, to its end or to its first failure."""
    talk, replies, tool_s = style.talk(model, script.prompt, seed), list[ClientReply](), 0.0
    for segment in script.segments:
        reply = await client.ask(talk.ask(segment.decode))
        replies.append(reply)
        if reply.error is not None or segment.call_s is None:
            break
        paused_s = time.perf_counter()
        await asyncio.sleep(segment.call_s)
        tool_s += time.perf_counter() - paused_s
        talk.extend(reply, segment.returned)
    return PlayedSession(script, replies[0].sent_s, replies[-1].end_s, tool_s, replies)
