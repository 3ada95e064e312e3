"""`jinfercept bench sessions`: the time of a turn among other sessions, and the share of its prompt that is recomputed.

With `newcomer`: the first-token time of a new prompt after each round, while all sessions pause, beside that of a new prompt on
an idle server before the first round.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Annotated

from rich.console import Console

from jinfercept.bench.conversations import Style
from jinfercept.bench.openai_client import Client, ClientReply
from jinfercept.bench.servers import RunningServer
from jinfercept.bench.session_rounds import Going, Visit, later_turns, rounds, take_turns, visit_rows
from jinfercept.bench.session_shape import SessionShape, bar, check, teller, write_files
from jinfercept.cli.options import HOSTS, Several, Switch, engine_flags
from jinfercept.cli.session_flags import OutputFlags, OwnModel, ServerFlags, ShapeFlags
from jinfercept.cli.session_tables import Report, plot, rounds_table, summary_table
from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import write_json
from jinfercept.sim.tables import check_least, numbers, show

IDLE_TRIES = 4
"""New prompts on an idle server."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """The command."""

    own: OwnModel = None
    servers: ServerFlags = field(default_factory=ServerFlags)
    sessions: Several = ()
    """how many; each number is measured by itself (default: 4,8)"""
    concurrent: Switch = False
    """all at once, instead of one after another"""
    newcomer: Switch = False
    """after each round a new prompt: its first-token time"""
    session_ids: Switch = False
    """name the session in the header x-session-id"""
    seed: int = 0
    """of texts and tools"""
    shape: ShapeFlags = field(default_factory=ShapeFlags)
    output: OutputFlags = field(default_factory=OutputFlags)
    engine: Annotated[EngineOptions, engine_flags("seed", *HOSTS)]

    def run(self) -> int:
        """Measure, and print tables.

        Returns:
            The exit status: 1 if a request failed.

        Raises:
            ConfigError: an option makes no sense, or a server does not answer.
        """
        servers, style, shape = self.servers.servers(self.own, self.engine), self.shape.style(), self.shape.shape()
        going = Going(self.concurrent, self.session_ids)
        counts = numbers("--sessions", self.sessions or ("4,8",), int)
        check_least("--sessions", counts[0], 1)
        if self.newcomer and self.concurrent:
            raise ConfigError("newcomers come between rounds", got="--concurrent", fix="leave it or --newcomer out")
        check(servers, style, shape, self.output.json, self.output.plot)
        console, reports = Console(stderr=True), list[Report]()
        try:
            with servers.running(console) as running, bar(console) as progress:
                for server in running:
                    for count in counts:
                        done = teller(progress, f"{server.target.name}, {count} sessions", count * shape.turns)
                        measured = _measure(server, style, shape, going, count, self.newcomer, self.seed, done)
                        reports.append(asyncio.run(measured))
                        if reports[-1]["interrupted"]:
                            raise KeyboardInterrupt
        finally:  # what there is, also if interrupted
            if reports:
                self._report(reports)
        return int(any(report["errors"] for report in reports))

    def _report(self, reports: Sequence[Report]) -> None:
        """Print tables, and write the files that were asked for."""
        show(rounds_table(reports))
        if summary := summary_table(reports):
            print()
            show(summary)
        write_files(
            {
                self.output.json: lambda path: write_json(path, reports),
                self.output.plot: lambda path: plot(path, reports),
            }
        )


async def _measure(
    server: RunningServer,
    style: Style,
    shape: SessionShape,
    going: Going,
    count: int,
    newcomer: bool,
    seed: int,
    done: Callable[[int], None],
) -> Report:
    """The report of `count` sessions on one server."""
    name = f"{seed}/{count} sessions"
    async with Client(server.target) as client:

        async def first(who: str) -> ClientReply:
            talk = style.talk(server.model, shape.prompt_tokens, f"{name}/{who}")
            return await client.ask(talk.ask(shape.new_tokens))

        await first("warm-up")
        idle = [await first(f"idle {number}") for number in range(IDLE_TRIES)] if newcomer else []
        new = list[ClientReply]()

        async def ask_newcomer() -> None:
            new.append(await first(f"newcomer {len(new)}"))

        scripts = [shape.script(Random(f"{name}/{number}")) for number in range(count)]
        between = ask_newcomer if newcomer else None
        visits, interrupted = list[Visit](), False
        try:
            await take_turns(client, server.model, style, scripts, going, name, done, between, visits)
        except asyncio.CancelledError:  # Ctrl-C
            if not visits:
                raise
            interrupted = True
    visit_rounds = rounds(visits, going.concurrent)
    replies = [*idle, *(visit.reply for visit in visits), *new]
    return {
        "server": server.target.name,
        "model": server.model,
        "sessions": count,
        "concurrent": going.concurrent,
        "interrupted": interrupted,
        "rounds": visit_rounds,
        "later_turns": later_turns(visit_rounds),
        "newcomer": _newcomer(idle, new),
        "errors": [f"{reply.error}: {reply.detail}" for reply in replies if reply.error is not None],
        "rows": visit_rows(visits),
    }


def _newcomer(idle: Sequence[ClientReply], new: Sequence[ClientReply]) -> Report | None:
    """First-token times, seconds, and the ratio of their medians; None if they were not wanted or did not come."""
    usual, first_s = ([reply.first_s for reply in replies if reply.first_s is not None] for replies in (idle, new))
    if not usual or not first_s:
        return None
    return {"idle_s": usual, "ttft_s": first_s, "ratio": median(first_s) / median(usual)}
