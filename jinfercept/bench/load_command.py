"""`jinfercept bench serve`: load on servers by one client, their latencies, cached tokens and errors side by side."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jinfercept.bench.conversations import Style
from jinfercept.bench.plots import check_drawing
from jinfercept.bench.reports import check_outputs, write_all, write_json
from jinfercept.bench.serve_load import Load, run_load
from jinfercept.bench.serve_report import Report, plot, remarks, report, table
from jinfercept.bench.servers import Servers
from jinfercept.bench.simulate_command import check_least, drawer, numbers, show
from jinfercept.bench.tool_times import DrawSeconds
from jinfercept.bench.workload import Script, Segment
from jinfercept.errors import ConfigError


class Shape(NamedTuple):
    """Sessions that are all alike but for what is said and how long tools take.

    Attributes:
        turns: answers of a session; between them its tools run.
        prompt_tokens: of its first message, the system prompt not counted.
        tool_tokens: of a tool's result.
        new_tokens: of an answer.
        tool_seconds: how long a tool takes.
    """

    turns: int
    prompt_tokens: int
    tool_tokens: int
    new_tokens: int
    tool_seconds: DrawSeconds

    def check(self) -> None:
        """Raise `ConfigError` if it is out of range."""
        check_least("--turns", self.turns, 1)
        check_least("--prompt-tokens", self.prompt_tokens, 1)
        check_least("--tool-tokens", self.tool_tokens, 1)
        check_least("--new-tokens", self.new_tokens, 1)

    def script(self, rng: Random) -> Script:
        """A session."""
        calls = [Segment(self.new_tokens, self.tool_seconds(rng), self.tool_tokens) for _ in range(self.turns - 1)]
        return Script("agent", self.prompt_tokens, (*calls, Segment(self.new_tokens, None, 0)))


def load_command(
    servers: Servers,
    style: Style,
    shape: Shape,
    *,
    trace: str | None,
    workload: str | None,
    sessions: int,
    request_rates: Sequence[str],
    concurrencies: Sequence[str],
    seeds: Sequence[str],
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """Run the command.

    Args:
        servers, style, shape: see there.
        trace, workload: where sessions are drawn from, instead of `shape`.
        sessions: of every run.
        request_rates, concurrencies, seeds: texts that may hold several, with commas; a run for each load, seed and server.
        json_path, plot_path: files to write.

    Returns:
        The exit status: 1 if a run had no request that succeeded.

    Raises:
        ConfigError: an option makes no sense, or a server does not answer.
    """
    loads = make_loads(request_rates, concurrencies)
    check_least("--sessions", sessions, 1)
    check(servers, style, shape, json_path, plot_path)
    draw = _source(trace, workload, shape)
    console, reports = Console(stderr=True), list[Report]()
    try:
        with servers.running(console) as running, bar(console) as progress:
            for load in loads:
                for seed in numbers("--seed", seeds, int):
                    next_script = draw(Random(f"scripts {seed}"))
                    scripts = [next_script() for _ in range(sessions)]
                    for target, model in running:
                        told = teller(progress, f"{target.name}, {load}", sessions)
                        run = run_load(target, model, style, scripts, load, f"{seed}/{load}", told)
                        reports.append(report(target.name, model, load, seed, run))
                        if run.interrupted:
                            raise KeyboardInterrupt
    finally:  # what there is, also if interrupted
        if reports:
            show(table(reports))
            print(*remarks(reports), sep="\n", file=sys.stderr)
            write_files(
                {json_path: lambda path: write_json(path, reports), plot_path: lambda path: plot(path, reports)}
            )
    return int(any(not one["requests_completed"] for one in reports))


def make_loads(request_rates: Sequence[str], concurrencies: Sequence[str]) -> list[Load]:
    """A load for each number. Raises `ConfigError` for what is none."""
    loads = [Load(rate, None) for rate in numbers("--request-rate", request_rates, float)] if request_rates else []
    loads += [Load(None, clients) for clients in numbers("--concurrency", concurrencies, int)] if concurrencies else []
    for rate, clients in loads:
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError("--request-rate is out of range", got=rate, fix="sessions per second, above 0")
        if clients is not None:
            check_least("--concurrency", clients, 1)
    return loads


def check(servers: Servers, style: Style, shape: Shape, json_path: str | None, plot_path: str | None) -> None:
    """Raise `ConfigError` for what cannot work, before anything is started."""
    servers.check()
    shape.check()
    check_least("--system-tokens", style.system_tokens, 0)
    if style.vocabulary is not None:
        check_least("--token-ids", style.vocabulary, 1)
    check_outputs((("--json", json_path), ("--plot", plot_path)))
    if plot_path is not None:
        check_drawing(plot_path)


def write_files(writers: Mapping[str | None, Callable[[str], object]]) -> None:
    """Write those files that have a path. Raises `ConfigError` for those that cannot be written."""
    write_all({path: partial(write, path) for path, write in writers.items() if path is not None})


def bar(console: Console) -> Progress:
    """A display of work that is counted."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def teller(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """A line of that display; call it with how much is done."""
    task = progress.add_task(what, total=total)
    return lambda done: progress.update(task, completed=done)


def _source(trace: str | None, workload: str | None, shape: Shape) -> Callable[[Random], Callable[[], Script]]:
    if trace is None and workload is None:
        return lambda rng: lambda: shape.script(rng)
    return drawer(trace, workload or "mixed", "trace", sys.maxsize)
