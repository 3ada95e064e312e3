"""`jinfercept bench sessions`: the time of a turn among other sessions, and the share of its prompt that is recomputed.

With `newcomer`: the first-token time of a new prompt after each round, while all sessions pause, beside that of a new prompt on
an idle server before the first round.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from tyro import conf

from jinfercept.bench.client_report import number, percent
from jinfercept.bench.conversations import Style
from jinfercept.bench.openai_client import Client, ClientReply
from jinfercept.bench.servers import RunningServer, Servers
from jinfercept.bench.session_rounds import Going, Visit, later_turns, rounds, take_turns, visit_rows
from jinfercept.bench.session_shape import SessionShape, bar, check, teller, tool_times
from jinfercept.cli.options import HOSTS, Maybe, Repeated, Several, Switch, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.sim.plots import Bars, draw
from jinfercept.sim.reports import write_files, write_json
from jinfercept.sim.tables import check_least, numbers, plain_table, show

IDLE_TRIES = 4
"""New prompts on an idle server."""
type OwnModel = Annotated[
    conf.Positional[str | None],
    conf.arg(
        metavar="[MODEL]",
        help="start jinfercept serve with it: smollm2-135m, a Hugging Face directory or hub id, or a .gguf file",
        help_behavior_hint="",
    ),
]
Report = dict[str, Any]


@dataclass(frozen=True)
class ServerFlags:
    base_url: Annotated[Repeated, conf.arg(metavar="[NAME=]URL")] = ()
    """of a server that runs; several are compared"""
    model: Maybe[str] = None
    """to ask it for (default: the first that it names)"""
    api_key: Maybe[str] = None
    """to send (default: none)"""
    timeout: float = 600.0
    """seconds of a request"""

    def servers(self, own: str | None, engine: EngineOptions) -> Servers:
        """The servers at URLs, or one of a model of its own, with these options."""
        return Servers(self.base_url, self.model, self.api_key, self.timeout, own, engine)


@dataclass(frozen=True)
class ShapeFlags:
    system_tokens: int = 0
    """prompt that all sessions begin with; 0: none"""
    prompt_tokens: int = 900
    """prompt of a session's own"""
    turns: int = 4
    """answers of a session, between which a tool runs"""
    new_tokens: int = 16
    """of an answer"""
    tool_tokens: int = 40
    """of a tool's result"""
    tool_seconds: str = "0"
    """that a tool takes: X, exp:MEAN or lognormal:MEDIAN,SIGMA"""
    token_ids: Annotated[Maybe[int], conf.arg(metavar="BELOW")] = None
    """prompts of random token ids on /v1/completions, not words in a chat"""
    tool_role: Literal["tool", "user"] = "tool"
    """who brings a tool's result"""
    ignore_eos: bool = True
    """ask for all of --new-tokens, as vLLM's extension allows"""

    def style(self) -> Style:
        """How a client talks."""
        return Style(
            system_tokens=self.system_tokens,
            vocabulary=self.token_ids,
            tool_role=self.tool_role,
            ignore_eos=self.ignore_eos,
        )

    def shape(self) -> SessionShape:
        """The lengths of a session. Raises `ConfigError` for `tool_seconds` that are no duration."""
        seconds = tool_times(self.tool_seconds)
        return SessionShape(self.turns, self.prompt_tokens, self.tool_tokens, self.new_tokens, seconds)


@dataclass(frozen=True)
class OutputFlags:
    json: Maybe[str] = None
    """write everything to this file, a row for each request"""
    plot: Maybe[str] = None
    """draw it into this file"""


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
            raise ConfigError("--newcomer excludes --concurrent", got="--concurrent", fix="leave it or --newcomer out")
        check(servers, style, shape, self.output.json, self.output.plot)
        console, reports = Console(stderr=True), list[Report]()
        try:
            with servers.running(console) as running, bar(console) as progress:
                for server in running:
                    for count in counts:
                        advance = teller(progress, f"{server.target.name}, {count} sessions", count * shape.turns)
                        measured = _measure(server, style, shape, going, count, self.newcomer, self.seed, advance)
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
    advance: Callable[[int], None],
) -> Report:
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
            await take_turns(client, server.model, style, scripts, going, name, advance, between, visits)
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


def rounds_table(reports: Sequence[Report]) -> Table:
    """A row for each round; below it what failed."""
    caption = "round s: its requests one after another; not recomputed: share of prompt tokens"
    if reports[0]["concurrent"]:
        caption = "round s: from its first start to its last end; not recomputed: share of prompt tokens"
    columns = ("turn", "requests", "round s", "request s", "TTFT ms", "prompt tokens", "cached", "not recomputed")
    shown = plain_table(("server", "sessions", *columns, "failed"), left=("server",), caption=caption)
    for report in reports:
        for turn in report["rounds"]:
            shown.add_row(
                report["server"],
                str(report["sessions"]),
                str(turn["turn"]),
                str(turn["requests"]),
                number(turn["round_s"]),
                number(turn["request_s"]),
                _ms(turn["ttft_s"]),
                _count(turn["prompt_tokens"]),
                _count(turn["cached_tokens"]),
                percent(turn["cached_share"]),
                str(turn["failed"]),
            )
        for error, times in Counter(report["errors"]).items():
            shown.add_row(report["server"], str(report["sessions"]), f"{times} × {error}")
    return shown


def summary_table(reports: Sequence[Report]) -> Table | None:
    """What the later turns come to, sessions against fewer sessions, and a newcomer's wait; None if there is none of it.

    `× fewest`: a round's time over that of the fewest sessions, each for its number of sessions: 1 is as many times as long
    as there are more sessions.
    """
    shown_reports = [report for report in reports if report["later_turns"] or report["newcomer"]]
    if not shown_reports:
        return None
    columns = ("turns 2… round s", "slowest", "request s", "TTFT ms", "not recomputed", "× fewest")
    newcomer = ("idle TTFT ms", "newcomer's", "×") if any(report["newcomer"] for report in shown_reports) else ()
    caption = "× fewest: of a round, for its number of sessions"
    shown = plain_table(("server", "sessions", *columns, *newcomer), left=("server",), caption=caption)
    for report in shown_reports:
        later, new = report["later_turns"] or {}, report["newcomer"]
        cells = [number(later.get(name)) for name in ("round_s", "slowest_round_s", "request_s")]
        cells += [_ms(later.get("ttft_s")), percent(later.get("cached_share")), _growth(report, reports)]
        if newcomer:
            cells += (
                [_ms(median(new["idle_s"])), _ms(median(new["ttft_s"])), f"{new['ratio']:.2f}"] if new else ["-"] * 3
            )
        shown.add_row(report["server"], str(report["sessions"]), *cells)
    return shown


def plot(path: str, reports: Sequence[Report]) -> None:
    """Draw rounds beside each other: time of a request, first token, share that was not recomputed."""
    panels = (("a request", "s", "request_s"), ("its first token", "s", "ttft_s"))
    panels = (*panels, ("prompt tokens not recomputed", "share", "cached_share"))
    bars = []
    for title, unit, key in panels:
        by_turn: dict[str, dict[str, float]] = {}
        for report in reports:
            for turn in report["rounds"]:
                name = f"{report['server']}, {report['sessions']} sessions"
                by_turn.setdefault(f"turn {turn['turn']}", {})[name] = turn[key] or 0.0
        bars.append(Bars(title, unit, by_turn, beside=True))
    draw(path, [bars])


def _growth(report: Report, reports: Sequence[Report]) -> str:
    """A round of it over a round of the fewest sessions on that server, for its number of sessions."""
    fewest = next(other for other in reports if other["server"] == report["server"])
    if report is fewest or not report["later_turns"] or not fewest["later_turns"]:
        return "-"
    times = report["later_turns"]["round_s"] / fewest["later_turns"]["round_s"]
    return f"{times * fewest['sessions'] / report['sessions']:.2f}"


def _ms(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"
