"""`python -m benchmarks agents`: coding agents on OpenAI-compatible servers, by the lengths of real sessions.

`agent_lengths.jsonl` has the first 14 calls of 16 sessions of Claude Code, anonymised, from the set that AIPerf replays
(callanjfox/kv-cache-tester, Apache-2.0): lengths and seconds, no texts. A line is a session: `id`, and its `calls`, lists of
prompt tokens, generated tokens, leading prompt tokens that were the previous call's, and seconds since its answer.

Clients play the sessions on `/v1/completions` with random token ids. A call's prompt is the previous prompt and answer with new
tokens behind; where the history was rewritten, it is the part of the previous prompt that stayed. Several servers are measured
one after the other; give each the same pool, and let none do anything else meanwhile.

`--restart` plays the first half of the calls of every session, then the second. It does so on a server, and on one that ends
between the halves, so that another one goes on in its place: what that computes again, its disk did not keep.
"""

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from jinfercept.bench.openai_client import Ask, Client, ClientReply
from jinfercept.bench.servers import RunningServer, Servers
from jinfercept.bench.session_shape import bar, teller
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import check_outputs, write_all, write_json
from jinfercept.sim.tables import check_least, plain_table, show

LENGTHS = Path(__file__).with_name("agent_lengths.jsonl")
BLOCK = 64
"""Tokens by which the trace counts what two prompts have in common."""
VOCABULARY = 16_000
"""Token ids below it are drawn: those of every model that is likely to be served."""


class AgentCall(NamedTuple):
    """A call of the model.

    Attributes:
        prompt, new: tokens of the prompt, and that are generated.
        kept: leading tokens of the prompt that were the previous call's; None: all of them.
        gap_s: seconds between the previous answer and this call.
    """

    prompt: int
    new: int
    kept: int | None
    gap_s: float


class Scale(NamedTuple):
    """Factors on the lengths of prompts and of answers, and on the seconds between calls."""

    prompts: float
    answers: float
    seconds: float


Report = dict[str, Any]


def load_sessions(scale: Scale, path: Path = LENGTHS) -> list[list[AgentCall]]:
    """The sessions of a file, scaled; a prompt is at least one token longer than what it keeps."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_scaled(json.loads(line)["calls"], scale) for line in lines]


def _scaled(calls: Sequence[Sequence[float]], scale: Scale) -> list[AgentCall]:
    scaled, before = list[AgentCall](), 0.0
    for number, (prompt, new, kept, gap_s) in enumerate(calls):
        whole = kept >= before - BLOCK
        left = None if whole and number else round(kept * scale.prompts)
        tokens = max(round(prompt * scale.prompts), (left or 0) + 1)
        scaled.append(
            AgentCall(tokens, max(1, round(new * scale.answers)), left, gap_s * scale.seconds if number else 0.0)
        )
        before = prompt
    return scaled


class AgentPrompt(NamedTuple):
    """A call with its prompt.

    Attributes:
        known: leading tokens that the session has sent or read before.
    """

    call: AgentCall
    tokens: list[int]
    known: int


def prompts_of(session: Sequence[AgentCall], rng: Random) -> Generator[AgentPrompt, list[int]]:
    """Every call with its prompt; answers are sent back into the generator."""
    tokens, answer = list[int](), list[int]()
    for call in session:
        begin = [*tokens, *answer] if call.kept is None else tokens[: call.kept]
        tokens = begin + [rng.randrange(VOCABULARY) for _ in range(max(1, call.prompt - len(begin)))]
        answer = yield AgentPrompt(call, tokens, len(begin))


class AgentReply(NamedTuple):
    """What a server answered to a call."""

    prompt: AgentPrompt
    reply: ClientReply


class Replay:
    """Sessions on a server, as far as they have come.

    Args:
        sessions: a client plays one after another.
        clients: at a time.
        seed: of the tokens.
        done: called with the number of answers.
    """

    def __init__(
        self, sessions: Sequence[Sequence[AgentCall]], clients: int, seed: str, done: Callable[[int], None]
    ) -> None:
        self._clients, self._done = clients, done
        self._sessions = [prompts_of(session, Random(f"{seed}/{number}")) for number, session in enumerate(sessions)]
        self._next: list[AgentPrompt | None] = [next(calls, None) for calls in self._sessions]
        self.replies: list[AgentReply] = []

    def play(self, server: RunningServer, most_calls: int | None = None) -> None:
        """Go on with every session, for so many calls at most."""
        asyncio.run(self._play(server, most_calls))

    async def _play(self, server: RunningServer, most_calls: int | None) -> None:
        waiting = list(range(len(self._sessions)))

        async def work(client: Client) -> None:
            while waiting:
                await self._go_on(waiting.pop(0), server.model, client, most_calls)

        async with Client(server.target) as client:
            await client.ask(_ask(server.model, [1, 2, 3], 2))  # warm
            await asyncio.gather(*(work(client) for _ in range(self._clients)))

    async def _go_on(self, number: int, model: str, client: Client, most_calls: int | None) -> None:
        for _ in count() if most_calls is None else range(most_calls):
            prompt = self._next[number]
            if prompt is None:
                return
            await asyncio.sleep(prompt.call.gap_s)
            reply = await client.ask(_ask(model, prompt.tokens, prompt.call.new))
            self.replies.append(AgentReply(prompt, reply))
            self._done(len(self.replies))
            try:
                self._next[number] = self._sessions[number].send(reply.token_ids)
            except StopIteration:
                self._next[number] = None


def agents_command(
    servers: Servers, scale: Scale, clients: int, seed: int, *, restart: bool, json_path: str | None
) -> int:
    """Replay on each server, and print a table.

    Args:
        restart: replay on a server of ours, and on one that is ended and started again half-way.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        ConfigError: an option makes no sense, or a server does not answer.
    """
    check_least("--clients", clients, 1)
    for name, factor in scale._asdict().items():
        if factor < 0 or (factor == 0 and name != "seconds"):
            raise ConfigError(f"--scale-{name} is out of range", got=factor, fix="above 0")
    if restart and servers.own is None:
        raise ConfigError("--restart ends a server that is started here", got="no MODEL", fix="give a MODEL")
    servers.check()
    check_outputs((("--json", json_path),))
    sessions = load_sessions(scale)
    reports = (_restarted if restart else _unbroken)(servers, sessions, clients, seed)
    show(_table(reports))
    if json_path is not None:
        write_all({json_path: lambda: write_json(json_path, reports)})
    return int(any(report["errors"] for report in reports))


def _unbroken(servers: Servers, sessions: Sequence[Sequence[AgentCall]], clients: int, seed: int) -> list[Report]:
    """The report of each server."""
    reports, num_calls = list[Report](), sum(map(len, sessions))
    with servers.running(Console(stderr=True)) as running, bar(Console(stderr=True)) as progress:
        for server in running:
            replay = Replay(sessions, clients, str(seed), teller(progress, server.target.name, num_calls))
            replay.play(server)
            reports.append(_report(server, server.target.name, replay.replies))
    return reports


def _restarted(servers: Servers, sessions: Sequence[Sequence[AgentCall]], clients: int, seed: int) -> list[Report]:
    """The reports of a server, and of one that another one replaces half-way; the two have tokens of their own."""
    reports, num_calls = list[Report](), sum(map(len, sessions))
    half = max(map(len, sessions)) // 2
    for title, is_replaced in (("unbroken", False), ("restarted", True)):
        with bar(Console(stderr=True)) as progress:
            replay = Replay(sessions, clients, f"{seed}/{title}", teller(progress, title, num_calls))
            with servers.running(Console(quiet=True)) as [server]:
                replay.play(server, half)
                if not is_replaced:
                    replay.play(server)
            if is_replaced:
                with servers.running(Console(quiet=True)) as [server]:
                    replay.play(server)
        reports.append(_report(server, title, replay.replies))
    return reports


def _ask(model: str, prompt: list[int], new_tokens: int) -> Ask:
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return Ask("/completions", body | options)


def _report(server: RunningServer, title: str, replies: Sequence[AgentReply]) -> Report:
    counted = [(prompt, reply) for prompt, reply in replies if reply.error is None]
    good = [reply for _, reply in counted]
    first_s = [reply.first_s for reply in good if reply.first_s is not None]
    generated = sum(reply.completion_tokens or 0 for reply in good)
    prompts, cached = sum(reply.prompt_tokens or 0 for reply in good), [reply.cached_tokens for reply in good]
    return {
        "server": title,
        "model": server.model,
        "calls": len(replies),
        "errors": len(replies) - len(good),
        "ms_per_token": 1e3 * sum(reply.seconds for reply in good) / max(1, generated),
        "first_token_p50_s": median(first_s) if first_s else None,
        "first_token_p95_s": quantiles(first_s, n=20)[-1] if len(first_s) > 1 else None,
        "prompt_tokens": prompts,
        "cached_share": None if None in cached or not prompts else sum(filter(None, cached)) / prompts,
        "computed_again": None
        if None in cached
        else sum(max(0, prompt.known - (reply.cached_tokens or 0)) for prompt, reply in counted),
    }


def _table(reports: Sequence[Report]) -> Table:
    columns = ("server", "calls", "errors", "ms/token", "first token, s", "p95", "prompt tokens", "cached", "again")
    caption = (
        "ms/token: time of all calls over generated tokens; again: tokens that a session had sent or read before\n"
        "and that were computed again, parts of pages among them"
    )
    table = plain_table(columns, left=("server",), caption=caption)
    for report in reports:
        cached, again = report["cached_share"], report["computed_again"]
        table.add_row(
            report["server"],
            str(report["calls"]),
            str(report["errors"]),
            f"{report['ms_per_token']:.0f}",
            *(
                f"{report[name]:.2f}" if report[name] is not None else "-"
                for name in ("first_token_p50_s", "first_token_p95_s")
            ),
            f"{report['prompt_tokens']:,}",
            "-" if cached is None else f"{cached:.0%}",
            "-" if again is None else f"{again:,}",
        )
    return table
