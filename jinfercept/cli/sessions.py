"""`jinfercept bench sessions`: what a turn costs while other sessions take theirs, and what of its prompt is computed again.

With `newcomer`: how long somebody new waits for a first token after each round, while all sessions pause, beside the same on an
idle server before the first.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from jinfercept.bench.client_report import number, percent
from jinfercept.bench.conversations import Style
from jinfercept.bench.openai_client import Client, ClientReply
from jinfercept.bench.servers import RunningServer, Servers
from jinfercept.bench.session_rounds import Going, Visit, later_turns, rounds, take_turns, visit_rows
from jinfercept.bench.session_shape import SessionShape, bar, check, teller, write_files
from jinfercept.errors import ConfigError
from jinfercept.sim.plots import Bars, draw
from jinfercept.sim.reports import write_json
from jinfercept.sim.tables import check_least, numbers, show

IDLE_TRIES = 4
"""New prompts on an idle server."""

Report = dict[str, Any]


def sessions_command(
    servers: Servers,
    style: Style,
    shape: SessionShape,
    going: Going,
    *,
    sessions: Sequence[str],
    newcomer: bool,
    seed: int,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """Run the command.

    Args:
        servers, style, shape, going: see there.
        sessions: numbers of them, each text may hold several, with commas; each number is measured by itself.
        newcomer: after every round, ask for one new prompt.
        seed: of what is said, and of how long tools take.
        json_path, plot_path: files to write.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        ConfigError: an option makes no sense, or a server does not answer.
    """
    counts = numbers("--sessions", sessions, int)
    check_least("--sessions", counts[0], 1)
    if newcomer and going.concurrent:
        raise ConfigError("newcomers come between rounds", got="--concurrent", fix="leave it or --newcomer out")
    check(servers, style, shape, json_path, plot_path)
    console, reports = Console(stderr=True), list[Report]()
    try:
        with servers.running(console) as running, bar(console) as progress:
            for server in running:
                for count in counts:
                    told = teller(progress, f"{server.target.name}, {count} sessions", count * shape.turns)
                    found = asyncio.run(_measure(server, style, shape, going, count, newcomer, seed, told))
                    reports.append(found)
                    if found["interrupted"]:
                        raise KeyboardInterrupt
    finally:  # what there is, also if interrupted
        if reports:
            show(rounds_table(reports))
            if summary := summary_table(reports):
                print()
                show(summary)
            write_files(
                {json_path: lambda path: write_json(path, reports), plot_path: lambda path: plot(path, reports)}
            )
    return int(any(one["errors"] for one in reports))


async def _measure(
    server: RunningServer,
    style: Style,
    shape: SessionShape,
    going: Going,
    count: int,
    newcomer: bool,
    seed: int,
    told: Callable[[int], None],
) -> Report:
    """So many sessions on one server."""
    name = f"{seed}/{count} sessions"
    async with Client(server.target) as client:

        async def first(who: str) -> ClientReply:
            talk = style.talk(server.model, shape.prompt_tokens, f"{name}/{who}")
            return await client.ask(talk.ask(shape.new_tokens))

        await first("warm-up")
        idle = [await first(f"idle {one}") for one in range(IDLE_TRIES)] if newcomer else []
        new = list[ClientReply]()

        async def somebody_new() -> None:
            new.append(await first(f"newcomer {len(new)}"))

        scripts = [shape.script(Random(f"{name}/{one}")) for one in range(count)]
        between = somebody_new if newcomer else None
        visits, interrupted = list[Visit](), False
        try:
            await take_turns(client, server.model, style, scripts, going, name, told, between, visits)
        except asyncio.CancelledError:  # Ctrl-C
            if not visits:
                raise
            interrupted = True
    found = rounds(visits, going.concurrent)
    replies = [*idle, *(one.reply for one in visits), *new]
    return {
        "server": server.target.name,
        "model": server.model,
        "sessions": count,
        "concurrent": going.concurrent,
        "interrupted": interrupted,
        "rounds": found,
        "later_turns": later_turns(found),
        "newcomer": _newcomer(idle, new),
        "errors": [f"{reply.error}: {reply.detail}" for reply in replies if reply.error is not None],
        "rows": visit_rows(visits),
    }


def _newcomer(idle: Sequence[ClientReply], new: Sequence[ClientReply]) -> Report | None:
    """First-token times, seconds, and the ratio of their medians; None if they were not wanted or did not come."""
    usual, found = ([one.first_s for one in replies if one.first_s is not None] for replies in (idle, new))
    if not usual or not found:
        return None
    return {"idle_s": usual, "ttft_s": found, "ratio": median(found) / median(usual)}


# -- what is shown -----------------------------------------------------------------------------------------------------


def rounds_table(reports: Sequence[Report]) -> Table:
    """A row for each round; below it what failed."""
    caption = "round s: its requests one after another; not recomputed: share of prompt tokens"
    if reports[0]["concurrent"]:
        caption = "round s: from its first start to its last end; not recomputed: share of prompt tokens"
    columns = ("turn", "requests", "round s", "request s", "TTFT ms", "prompt tokens", "cached", "not recomputed")
    shown = _table(("server", "sessions", *columns, "failed"), caption)
    for one in reports:
        for turn in one["rounds"]:
            shown.add_row(
                one["server"],
                str(one["sessions"]),
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
        for error, times in Counter(one["errors"]).items():
            shown.add_row(one["server"], str(one["sessions"]), f"{times} × {error}")
    return shown


def summary_table(reports: Sequence[Report]) -> Table | None:
    """What the later turns come to, sessions against fewer sessions, and a newcomer's wait; None if there is none of it.

    `× fewest`: a round's time over that of the fewest sessions, each for its number of sessions: 1 is as many times as long
    as there are more sessions.
    """
    told = [one for one in reports if one["later_turns"] or one["newcomer"]]
    if not told:
        return None
    columns = ("turns 2… round s", "slowest", "request s", "TTFT ms", "not recomputed", "× fewest")
    newcomer = ("idle TTFT ms", "newcomer's", "×") if any(one["newcomer"] for one in told) else ()
    shown = _table(("server", "sessions", *columns, *newcomer), "× fewest: of a round, for its number of sessions")
    for one in told:
        later, new = one["later_turns"] or {}, one["newcomer"]
        cells = [number(later.get(name)) for name in ("round_s", "slowest_round_s", "request_s")]
        cells += [_ms(later.get("ttft_s")), percent(later.get("cached_share")), _growth(one, reports)]
        if newcomer:
            cells += (
                [_ms(median(new["idle_s"])), _ms(median(new["ttft_s"])), f"{new['ratio']:.2f}"] if new else ["-"] * 3
            )
        shown.add_row(one["server"], str(one["sessions"]), *cells)
    return shown


def plot(path: str, reports: Sequence[Report]) -> None:
    """Draw rounds beside each other: time of a request, first token, share that was not recomputed."""
    panels = (("a request", "s", "request_s"), ("its first token", "s", "ttft_s"))
    panels = (*panels, ("prompt tokens not recomputed", "share", "cached_share"))
    bars = []
    for title, unit, key in panels:
        found: dict[str, dict[str, float]] = {}
        for one in reports:
            for turn in one["rounds"]:
                name = f"{one['server']}, {one['sessions']} sessions"
                found.setdefault(f"turn {turn['turn']}", {})[name] = turn[key] or 0.0
        bars.append(Bars(title, unit, found, beside=True))
    draw(path, [bars])


def _growth(one: Report, reports: Sequence[Report]) -> str:
    """A round of it over a round of the fewest sessions on that server, for its number of sessions."""
    fewest = next(other for other in reports if other["server"] == one["server"])
    if one is fewest or not one["later_turns"] or not fewest["later_turns"]:
        return "-"
    times = one["later_turns"]["round_s"] / fewest["later_turns"]["round_s"]
    return f"{times * fewest['sessions'] / one['sessions']:.2f}"


def _table(columns: Sequence[str], caption: str) -> Table:
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    for name in columns:
        shown.add_column(name, justify="left" if name == "server" else "right", no_wrap=True)
    return shown


def _ms(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"
