"""`python -m benchmarks load`: load on servers by one client, their latencies, cached tokens and errors side by side."""

import math
import sys
from collections.abc import Callable, Sequence
from random import Random

from rich.console import Console

from benchmarks.serve_load import ClientLoad, run_load
from benchmarks.serve_report import plot, remarks, report, table
from jinfercept.bench.client_report import Report
from jinfercept.bench.conversations import Style
from jinfercept.bench.servers import Servers
from jinfercept.bench.session_shape import SessionShape, bar, check, teller
from jinfercept.cli.simulated_loads import drawer
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import write_files, write_json
from jinfercept.sim.tables import check_least, numbers, show
from jinfercept.sim.workload import Script


def load_command(
    servers: Servers,
    style: Style,
    shape: SessionShape,
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
    return int(any(not run_report["requests_completed"] for run_report in reports))


def make_loads(request_rates: Sequence[str], concurrencies: Sequence[str]) -> list[ClientLoad]:
    """A load for each number. Raises `ConfigError` for what is none."""
    loads = (
        [ClientLoad(rate, None) for rate in numbers("--request-rate", request_rates, float)] if request_rates else []
    )
    loads += (
        [ClientLoad(None, clients) for clients in numbers("--concurrency", concurrencies, int)] if concurrencies else []
    )
    for rate, clients in loads:
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError("--request-rate is out of range", got=rate, fix="sessions per second, above 0")
        if clients is not None:
            check_least("--concurrency", clients, 1)
    return loads


def _source(trace: str | None, workload: str | None, shape: SessionShape) -> Callable[[Random], Callable[[], Script]]:
    if trace is None and workload is None:
        return lambda rng: lambda: shape.script(rng)
    return drawer(trace, workload or "mixed", "trace", sys.maxsize)
