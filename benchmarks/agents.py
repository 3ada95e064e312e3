"""`python -m benchmarks agents`: coding agents on OpenAI-compatible servers, by the lengths of real sessions.

`agent_lengths.jsonl` has the first 14 calls of 16 sessions of Claude Code, anonymised, from the set that AIPerf replays
(callanjfox/kv-cache-tester, Apache-2.0): lengths and seconds, no texts. A line is a session: `id`, and its `calls`, lists of
prompt tokens, generated tokens, leading prompt tokens that were the previous call's, and seconds since its answer.

Clients play the sessions on `/v1/completions` with random token ids. A call's prompt is the previous prompt and answer with new
tokens behind; where the history was rewritten, it is the part of the previous prompt that stayed. Several servers are measured
one after the other; give each the same pool, and let none do anything else meanwhile.
"""

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
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


def prompts_of(session: Sequence[AgentCall], rng: Random) -> Generator[tuple[AgentCall, list[int]], list[int] | None]:
    """Every call with its prompt; answers are sent back into the generator."""
    tokens, answer = list[int](), list[int]()
    for call in session:
        begin = [*tokens, *answer] if call.kept is None else tokens[: call.kept]
        tokens = begin + [rng.randrange(VOCABULARY) for _ in range(max(1, call.prompt - len(begin)))]
        answer = (yield call, tokens) or []


def agents_command(servers: Servers, scale: Scale, clients: int, seed: int, json_path: str | None) -> int:
    """Replay on each server, and print a table.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        ConfigError: an option makes no sense, or a server does not answer.
    """
    check_least("--clients", clients, 1)
    for name, factor in scale._asdict().items():
        if factor < 0 or (factor == 0 and name != "seconds"):
            raise ConfigError(f"--scale-{name} is out of range", got=factor, fix="above 0")
    servers.check()
    check_outputs((("--json", json_path),))
    sessions, reports = load_sessions(scale), list[Report]()
    num_calls = sum(map(len, sessions))
    with servers.running(Console(stderr=True)) as running, bar(Console(stderr=True)) as progress:
        for server in running:
            done = teller(progress, server.target.name, num_calls)
            reports.append(asyncio.run(_replay(server, sessions, clients, seed, done)))
    show(_table(reports))
    if json_path is not None:
        write_all({json_path: lambda: write_json(json_path, reports)})
    return int(any(report["errors"] for report in reports))


async def _replay(
    server: RunningServer, sessions: Sequence[Sequence[AgentCall]], clients: int, seed: int, done: Callable[[int], None]
) -> Report:
    """The report of all sessions on one server, a client's one after another."""
    waiting, replies = list(enumerate(sessions)), list[ClientReply]()

    async def play(number: int, session: Sequence[AgentCall], client: Client) -> None:
        calls = prompts_of(session, Random(f"{seed}/{number}"))
        call, prompt = next(calls)
        while True:
            await asyncio.sleep(call.gap_s)
            replies.append(await client.ask(_ask(server.model, prompt, call.new)))
            done(len(replies))
            try:
                call, prompt = calls.send(replies[-1].token_ids)
            except StopIteration:
                return

    async def work(client: Client) -> None:
        while waiting:
            await play(*waiting.pop(0), client)

    async with Client(server.target) as client:
        await client.ask(_ask(server.model, [1, 2, 3], 2))  # warm
        await asyncio.gather(*(work(client) for _ in range(clients)))
    return _report(server, replies)


def _ask(model: str, prompt: list[int], new_tokens: int) -> Ask:
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return Ask("/completions", body | options)


def _report(server: RunningServer, replies: Sequence[ClientReply]) -> Report:
    good = [reply for reply in replies if reply.error is None]
    first_s = [reply.first_s for reply in good if reply.first_s is not None]
    generated = sum(reply.completion_tokens or 0 for reply in good)
    prompts, cached = sum(reply.prompt_tokens or 0 for reply in good), [reply.cached_tokens for reply in good]
    return {
        "server": server.target.name,
        "model": server.model,
        "calls": len(replies),
        "errors": len(replies) - len(good),
        "ms_per_token": 1e3 * sum(reply.seconds for reply in good) / max(1, generated),
        "first_token_p50_s": median(first_s) if first_s else None,
        "first_token_p95_s": quantiles(first_s, n=20)[-1] if len(first_s) > 1 else None,
        "prompt_tokens": prompts,
        "cached_share": None if None in cached or not prompts else sum(filter(None, cached)) / prompts,
    }


def _table(reports: Sequence[Report]) -> Table:
    columns = ("server", "calls", "errors", "ms/token", "first token, s", "p95", "prompt tokens", "cached")
    table = plain_table(columns, left=("server",), caption="ms/token: time of all calls over generated tokens")
    for report in reports:
        cached = report["cached_share"]
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
        )
    return table
