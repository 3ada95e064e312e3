"""A soak: rounds of random clients on one server, after each of which everything has to be settled and is checked.

A round is a time of load, then silence: what the server still holds is looked at, and every greedy answer is asked for once
more, one after another, under a salt that shares no page with the first.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.soak.client import RESPONSES, TEXT, Ask, Got, Said, send
from tests.soak.tally import Tally
from tests.soak.visits import KINDS, Visitor, same
from tests.soak.watch import Watch

if TYPE_CHECKING:
    from httpx2 import AsyncClient

TIE = 1e-4
"""Difference of log probabilities below which the order of sums decides which token is drawn."""
_SETTLE_S = 20.0
_RESTART_S = 60.0
"""For an MCP server to be started again; the pauses between two tries grow up to half of it."""


class Plan(NamedTuple):
    """What is done.

    Attributes:
        rounds: times of load, each with its checks.
        round_s: of load.
        clients: at a time.
        patience_s: seconds without a byte after which a request counts as hung.
        seed: of everything that clients do.
        mcp: whether the server has an MCP server, which is killed once a round.
    """

    rounds: int
    round_s: float
    clients: int
    patience_s: float
    seed: int
    mcp: bool


class _Answered(NamedTuple):
    """An answer that has to come out the same on an idle server."""

    kind: str
    ask: Ask
    got: Got


async def soak(url: str, pid: int, model: str, plan: Plan, tally: Tally) -> None:
    """Do it.

    Args:
        url: of the server, without a version.
        pid: of its process.
        model: to ask for.
        tally: what comes of it; filled in as it comes, so that there is something to report of one that is interrupted.
    """
    from httpx2 import AsyncClient, HTTPError, Limits

    limits = Limits(max_connections=None, max_keepalive_connections=0)
    async with AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as http:
        watch = Watch(http, pid)
        for number in range(plan.rounds):
            answered = await _load(http, watch, model, plan, number, tally)
            try:
                tally.settle(await watch.settled(_SETTLE_S))
            except HTTPError as error:
                tally.fail("lost", "server", f"it does not answer any more: {type(error).__name__} {error}")
                break
            await _check(http, plan, answered, tally)
            print(
                f"round {number + 1} of {plan.rounds}: {tally.requests.total()} requests, {tally.losses()}", flush=True
            )
        tally.check_growth()


async def _load(
    http: "AsyncClient",
    watch: Watch,
    model: str,
    plan: Plan,
    number: int,
    tally: Tally,
) -> list[_Answered]:
    """One round's clients, until all have ended their visits. Returns what is to be checked."""
    answered = list[_Answered]()
    began_s, load_s = time.monotonic(), plan.round_s
    kinds, weights = list(KINDS), [weight for _, weight in KINDS.values()]

    async def client(place: int) -> None:
        rng, visits = Random(f"{plan.seed}/{number}/{place}"), 0
        while time.monotonic() < began_s + load_s:
            [kind] = rng.choices(kinds, weights)
            name, visits = f"{plan.seed}-{number}-{place}-{visits}", visits + 1
            await _visit(http, model, plan, kind, rng, name, tally, answered)

    killing = [_kill(watch, load_s, Random(f"{plan.seed}/{number}"), tally)] if plan.mcp else []
    await asyncio.gather(*(client(place) for place in range(plan.clients)), *killing)
    return answered


async def _visit(
    http: "AsyncClient",
    model: str,
    plan: Plan,
    kind: str,
    rng: Random,
    name: str,
    tally: Tally,
    answered: list[_Answered],
) -> None:
    async def sent(ask: Ask, steady: bool) -> Got:
        got = await send(http, ask, plan.patience_s)
        tally.note(kind, got)
        if steady and got.end == "answered":
            answered.append(_Answered(kind, ask, got))
        return got

    tally.visits[kind] += 1
    play, _ = KINDS[kind]
    try:
        await play(Visitor(rng, sent, model, plan.mcp, name))
    except (ValueError, LookupError, TypeError) as error:  # an answer of another shape than was asked for
        tally.fail("wrong", kind, f"{type(error).__name__}: {error}")


async def _kill(watch: Watch, load_s: float, rng: Random, tally: Tally) -> None:
    """Kill the MCP server at some moment; it has to be there again soon."""
    import psutil

    await asyncio.sleep(rng.uniform(0.2, 0.6) * load_s)
    before = watch.mcp_servers()
    for pid in before:
        with suppress(psutil.Error):
            psutil.Process(pid).kill()
    tally.kills += bool(before)
    until_s = time.monotonic() + _RESTART_S
    while not set(watch.mcp_servers()) - set(before):
        if time.monotonic() > until_s:
            tally.fail("lost", "MCP server", "it was killed and is not started again")
            return
        await asyncio.sleep(0.1)


async def _check(http: "AsyncClient", plan: Plan, answered: Sequence[_Answered], tally: Tally) -> None:
    """Ask for every answer once more, alone and without what the first left behind; count what differs."""
    for kind, ask, got in answered:
        body = {name: value for name, value in ask.body.items() if name not in ("stream", "stream_options")}
        body |= {
            "cache_salt": f"check {tally.checked.total()}",
            "jinfercept": body.get("jinfercept", {}) | {"release": True},
        }
        again = await send(http, Ask(ask.path, body | _reported(ask.path)), plan.patience_s)
        if ask.body.get("previous_response_id") or again.prompt_ids != got.prompt_ids:
            # a follow-up has the tokens that the model wrote, and what is asked alone those of the text
            if "tools" in body or not got.prompt_ids:
                tally.rewritten[kind] += 1
                continue
            body = {
                name: body[name] for name in ("model", "max_tokens", "temperature", "return_token_ids", "cache_salt")
            }
            again = await send(http, Ask(TEXT, body | {"prompt": got.prompt_ids} | _reported(TEXT)), plan.patience_s)
        if again.end != "answered":
            tally.fail("hung" if again.end == "hung" else "lost", f"check of {kind}", again.detail)
            continue
        tally.checked[kind] += 1
        for index, choice in got.choices.items():
            expected = again.choices[index]
            if not same(choice, expected):
                if is_tied(choice, expected):
                    tally.ties[kind] += 1
                else:
                    why = f"{ask.path} {str(ask.body)[:300]}: {_parted(choice, expected)}"
                    tally.fail("wrong", kind, why)


def _reported(path: str) -> dict[str, Any]:
    """Fields that ask for the two best tokens of every place."""
    if path == RESPONSES:
        return {"top_logprobs": 2}
    return {"logprobs": 2} if path == TEXT else {"logprobs": True, "top_logprobs": 2}


def is_tied(reply: Said, expected: Said) -> bool:
    """Whether the two best tokens are as good as equal where two answers part; without token ids, anywhere."""
    gaps = [_gap(logprob) for logprob in expected.logprobs]
    if reply.token_ids and expected.token_ids:
        pairs = zip(reply.token_ids, expected.token_ids, strict=False)
        place = next((place for place, (first, second) in enumerate(pairs) if first != second), None)
        return place is not None and place < len(gaps) and gaps[place] < TIE
    return min(gaps, default=1.0) < TIE


def _gap(reported: Any) -> float:
    """Between the two best tokens of one place, as a chat reports them, or a completion (text to log probability)."""
    best = (
        [logprob["logprob"] for logprob in reported["top_logprobs"]]
        if "top_logprobs" in reported
        else [*reported.values()]
    )
    best = sorted(best, reverse=True)
    return best[0] - best[1] if len(best) > 1 else 1.0


def _parted(reply: Said, expected: Said) -> str:
    """Where two answers part, and how they go on from there."""
    got, alone = (answer.token_ids or answer.text for answer in (reply, expected))
    pairs = enumerate(zip(got, alone, strict=False))
    place = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(got), len(alone)))
    return f"at {place} of {len(got)}: {got[place : place + 9]!r}, alone {alone[place : place + 9]!r}"
