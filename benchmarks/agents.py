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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Annotated, Any, NamedTuple

from openai import APIError, AsyncOpenAI, OpenAI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tyro import conf

from benchmarks.servers import Reply, Target, child_server, complete, make_target
from jinfercept.cli.options import HOSTS, Maybe, Repeated, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import check_least, check_outputs, plain_table, show, write_json

LENGTHS = Path(__file__).with_name("agent_lengths.jsonl")
BLOCK = 64
"""Tokens by which the trace counts what two prompts have in common."""
VOCABULARY = 16_000
"""Token ids below it are drawn: those of every model that is likely to be served."""


class RunningServer(NamedTuple):
    """A running server, and the model that requests name."""

    target: Target
    model: str


type OwnModel = Annotated[
    conf.Positional[str | None],
    conf.arg(
        metavar="[MODEL]",
        help="start jinfercept serve with it: smollm2-135m, a Hugging Face directory or hub id, or a .gguf file",
        help_behavior_hint="",
    ),
]


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
    reply: Reply


def replay(
    server: RunningServer,
    sessions: Sequence[Sequence[AgentCall]],
    clients: int,
    seed: int,
    done: Callable[[int], None],
) -> list[AgentReply]:
    """Play sessions on a server; a client plays one after another.

    Args:
        clients: at a time.
        seed: of the tokens.
        done: called with the number of answers.
    """
    waiting, replies = enumerate(sessions), list[AgentReply]()

    async def work(client: AsyncOpenAI) -> None:
        for number, session in waiting:
            calls = prompts_of(session, Random(f"{seed}/{number}"))
            prompt = next(calls)
            for _ in session:
                await asyncio.sleep(prompt.call.gap_s)
                reply = await complete(client, server.model, prompt.tokens, prompt.call.new)
                replies.append(AgentReply(prompt, reply))
                done(len(replies))
                with suppress(StopIteration):
                    prompt = calls.send(reply.token_ids)

    async def play() -> None:
        async with server.target.client() as client:
            await complete(client, server.model, [1, 2, 3], 2)  # warm
            await asyncio.gather(*(work(client) for _ in range(clients)))

    asyncio.run(play())
    return replies


@dataclass(frozen=True, kw_only=True)
class Agents:
    """The command."""

    own: OwnModel = None
    base_url: Annotated[Repeated, conf.arg(metavar="[NAME=]URL")] = ()
    """of a server that runs; several are compared"""
    model: Maybe[str] = None
    """to ask it for (default: the first that it names)"""
    api_key: Maybe[str] = None
    """to send (default: none)"""
    timeout: float = 600.0
    """seconds of a request"""
    clients: int = 8
    """agents at a time"""
    scale_prompts: float = 0.03
    """factor on the lengths of prompts, which are 12,000 to 62,000 tokens"""
    scale_answers: float = 0.05
    """factor on the lengths of answers"""
    scale_seconds: float = 0.1
    """factor on the seconds of tools"""
    seed: int = 0
    """of the tokens of prompts"""
    json: Maybe[str] = None
    """write the numbers to this file"""
    engine: Annotated[EngineOptions, engine_flags("seed", *HOSTS)]

    def run(self) -> int:
        """Replay on each server, and print a table.

        Returns:
            The exit status: 1 if a request failed.

        Raises:
            ConfigError: an option makes no sense, or a server does not answer.
        """
        scale = Scale(self.scale_prompts, self.scale_answers, self.scale_seconds)
        self._check(scale)
        sessions = load_sessions(scale)
        reports = list[Report]()
        with self._running() as running:
            for server in running:
                with _counted(server.target.name, sessions) as done:
                    replies = replay(server, sessions, self.clients, self.seed, done)
                reports.append(_report(server, replies))
        show(_table(reports))
        if self.json is not None:
            write_json(self.json, reports)
        return int(any(report["errors"] for report in reports))

    def _check(self, scale: Scale) -> None:
        """Raise `ConfigError` if the flags contradict each other."""
        check_least("--clients", self.clients, 1)
        for name, factor in scale._asdict().items():
            if factor < 0 or (factor == 0 and name != "seconds"):
                raise ConfigError(f"--scale-{name} is out of range", got=factor, fix="above 0")
        check_outputs((("--json", self.json),))
        check_least("--timeout", self.timeout, 0.001)
        if bool(self.base_url) == (self.own is not None):
            got = "both" if self.base_url else "neither"
            raise ConfigError("give either a MODEL or --base-url to measure", got=got, fix="give one of them")
        if self.base_url and self.engine:
            flags = ", ".join("--" + name.replace("_", "-") for name in self.engine)
            raise ConfigError(
                "these flags need a server that the command starts itself", got=flags, fix="give MODEL, or no such flag"
            )
        self._targets()

    @contextmanager
    def _running(self) -> Iterator[list[RunningServer]]:
        """All servers, while they run. Raises `ConfigError` if one does not answer."""
        if self.own is None:
            yield [self._server(target) for target in self._targets()]
            return
        with child_server(self.own, self.engine) as url:
            yield [self._server(make_target(f"jinfercept={url}", None, self.timeout))]

    def _targets(self) -> list[Target]:
        targets = [make_target(url, self.api_key, self.timeout) for url in self.base_url]
        names = [target.name for target in targets]
        if len(set(names)) < len(names):
            raise ConfigError("two servers have the same name", got=", ".join(names), fix="give NAME=URL")
        return targets

    def _server(self, target: Target) -> RunningServer:
        client = OpenAI(base_url=target.url, api_key=target.api_key or "none", timeout=target.timeout_s)
        try:
            return RunningServer(target, self.model or client.models.list().data[0].id)
        except (APIError, LookupError, TypeError) as error:
            fix = "start it, or check --base-url, --api-key and --model"
            raise ConfigError(f"{target.name} names no model", got=error, fix=fix) from None


@contextmanager
def _counted(title: str, sessions: Sequence[Sequence[AgentCall]]) -> Iterator[Callable[[int], None]]:
    """A progress display of all calls; the result sets how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=sum(map(len, sessions)))
        yield lambda done: progress.update(task, completed=done)


def _report(server: RunningServer, replies: Sequence[AgentReply]) -> Report:
    counted = [(prompt, reply) for prompt, reply in replies if reply.error is None]
    good = [reply for _, reply in counted]
    first_s = [reply.first_s for reply in good if reply.first_s is not None]
    generated = sum(reply.completion_tokens or 0 for reply in good)
    prompts, cached = sum(reply.prompt_tokens or 0 for reply in good), [reply.cached_tokens for reply in good]
    return {
        "server": server.target.name,
        "model": server.model,
        "calls": len(replies),
        "errors": len(replies) - len(good),
        "ms_per_token": 1e3 * sum(reply.end_s - reply.sent_s for reply in good) / max(1, generated),
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
