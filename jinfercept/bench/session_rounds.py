"""Sessions of several turns, played in rounds: every session's first turn, then every second one; or all sessions at once.

In rounds, requests run one after another, and a round takes as long as its requests: waiting for tools is not counted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from jinfercept.bench.client_report import row, share, total
from jinfercept.bench.conversations import Conversation, Style
from jinfercept.bench.openai_client import Client, ClientReply
from jinfercept.sim.workload import Script


class Visit(NamedTuple):
    """A request: the number of its session, its turn from 1 on, and the reply."""

    session: int
    turn: int
    reply: ClientReply


class Going(NamedTuple):
    """The order of sessions.

    Attributes:
        concurrent: all sessions at once; else in rounds.
        session_ids: requests name their session in the header `x-session-id`.
    """

    concurrent: bool
    session_ids: bool


async def take_turns(
    client: Client,
    model: str,
    style: Style,
    scripts: Sequence[Script],
    going: Going,
    seed: str,
    told: Callable[[int], None] = lambda done: None,
    between: Callable[[], Awaitable[None]] | None = None,
    visits: list[Visit] | None = None,
) -> list[Visit]:
    """Play sessions of equally many turns. A session whose request fails takes no further turns.

    Args:
        model: that requests name.
        scripts: one for each session.
        going: the order of the sessions.
        seed: of the conversations' texts.
        told: called with the number of finished requests.
        between: awaited after every round, while all sessions pause; ignored where sessions are concurrent.
        visits: list to append to, so that a cancelled call leaves its results there.

    Raises:
        ConfigError: the server cannot do what `style` needs.
    """
    visits, turns = [] if visits is None else visits, range(len(scripts[0].segments))
    names = [f"{seed}/{number}" for number in range(len(scripts))]
    sessions = [
        _Session(style.talk(model, script.prompt, name), 0.0) for script, name in zip(scripts, names, strict=True)
    ]

    async def take(number: int, turn: int) -> None:
        session, segment = sessions[number], scripts[number].segments[turn]
        if session.ready_s is None:
            return
        await asyncio.sleep(session.ready_s - time.perf_counter())
        headers = {"x-session-id": names[number]} if going.session_ids else {}
        reply = await client.ask(session.conversation.ask(segment.decode)._replace(headers=headers))
        visits.append(Visit(number, turn + 1, reply))
        told(len(visits))
        session.ready_s = None
        if reply.error is None and segment.call_s is not None:
            session.ready_s = reply.end_s + segment.call_s
            session.conversation.extend(reply, segment.returned)

    async def take_all(number: int) -> None:
        for turn in turns:
            await take(number, turn)

    if going.concurrent:
        await asyncio.gather(*map(take_all, range(len(sessions))))
    else:
        for turn in turns:
            for number in range(len(sessions)):
                await take(number, turn)
            if between is not None:
                await between()
    return visits


@dataclass(slots=True)
class _Session:
    """An open session, and the second at which its tool returns; None: it has ended."""

    conversation: Conversation
    ready_s: float | None


def rounds(visits: Sequence[Visit], concurrent: bool) -> list[dict[str, Any]]:
    """A report for each turn.

    Returns:
        `round_s`: in rounds the sum of the requests' seconds; concurrent, from the first start to the last end. `request_s`,
        `ttft_s`: means in seconds. Tokens: sums over successful requests, None where the server does not count. `cached_share`:
        share of the prompt tokens that the server took from its cache.
    """
    return [
        _round([visit.reply for visit in visits if visit.turn == turn], turn, concurrent)
        for turn in sorted({visit.turn for visit in visits})
    ]


def later_turns(reports: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Turns 2 and on together: means of a round, and shares of all their tokens; None if there are none."""
    later = [report for report in reports if report["turn"] > 1 and report["request_s"] is not None]
    if not later:
        return None
    prompt, cached = (total(report[name] for report in later) for name in ("prompt_tokens", "cached_tokens"))
    means = {name: fmean(report[name] for report in later) for name in ("round_s", "request_s", "ttft_s")}
    return means | {
        "slowest_round_s": max(report["round_s"] for report in later),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": share(cached, prompt),
    }


def visit_rows(visits: Sequence[Visit]) -> list[dict[str, Any]]:
    """A row for each request, in the order of their ends."""
    origin_s = min(visit.reply.sent_s for visit in visits)
    return [{"session": visit.session, "turn": visit.turn} | row(visit.reply, origin_s) for visit in visits]


def _round(replies: Sequence[ClientReply], turn: int, concurrent: bool) -> dict[str, Any]:
    successes = [reply for reply in replies if reply.error is None]
    prompt, cached = (total(getattr(reply, name) for reply in successes) for name in ("prompt_tokens", "cached_tokens"))
    together_s = max(reply.end_s for reply in replies) - min(reply.sent_s for reply in replies)
    return {
        "turn": turn,
        "requests": len(replies),
        "failed": len(replies) - len(successes),
        "round_s": together_s if concurrent else sum(reply.seconds for reply in replies),
        "request_s": fmean(reply.seconds for reply in successes) if successes else None,
        "ttft_s": fmean(reply.first_s or reply.seconds for reply in successes) if successes else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": share(cached, prompt),
    }
