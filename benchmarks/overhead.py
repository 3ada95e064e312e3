"""`python -m benchmarks load MODEL --offline`: tokens per second through HTTP beside the offline engine on the same prompts.

Both are processes of their own with the same flags, started before anything is measured. Waves of prompts, all of a wave at
once, go to one and to the other, never to both at a time, so that what changes on the machine meanwhile meets both. The client
runs on the same machine: what it takes of the processor is reported.
"""

import sys
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.offline import OfflineEngine, offline_engine
from benchmarks.serve_load import ClientLoad, run_load
from benchmarks.serve_report import report
from jinfercept.bench.client_report import failures, number, percent
from jinfercept.bench.conversations import Style
from jinfercept.bench.servers import RunningServer, Servers
from jinfercept.bench.session_shape import SessionShape, bar, check, teller
from jinfercept.errors import ConfigError
from jinfercept.sim.plots import Bars, draw
from jinfercept.sim.reports import write_files, write_json
from jinfercept.sim.tables import check_least, show

WAVES = 4
"""That count; one before them does not."""
GPU_SHARE = 0.45
"""Of a GPU's memory for each of the two, unless `--gpu-memory-utilization` says another."""

OFFLINE, HTTP = "offline_tokens_per_s", "http_tokens_per_s"

Wave = dict[str, Any]


def overhead_command(
    servers: Servers,
    style: Style,
    shape: SessionShape,
    *,
    concurrency: int,
    seed: int,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """Run the command.

    Args:
        servers: one that is started here.
        style, shape: of the prompts, which have one turn.
        concurrency: clients, and prompts of a wave.
        seed: of the prompts.
        json_path, plot_path: files to write.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        ConfigError: an option makes no sense, or an engine does not start.
    """
    if servers.own is None or not style.ignore_eos:
        raise ConfigError(
            "--offline compares a server that is started here, which generates all tokens",
            got="--base-url" if servers.own is None else "--no-ignore-eos",
            fix="give MODEL, and leave --ignore-eos on",
        )
    check_least("--concurrency", concurrency, 1)
    check(servers, style, shape, json_path, plot_path)
    servers = servers._replace(flags={"gpu_memory_utilization": GPU_SHARE} | dict(servers.flags))
    console, played = Console(stderr=True), list[Wave]()
    try:
        with (
            console.status("starting the offline engine") as status,
            offline_engine(servers.own or "", servers.flags, shape.new_tokens) as engine,
        ):
            status.stop()
            with servers.running(console) as [server], bar(console) as progress:
                told = teller(progress, "waves", 1 + WAVES)
                for wave in range(1 + WAVES):
                    measured = _wave(engine, server, style, shape, concurrency, f"{seed}/{wave}", wave % 2 == 0)
                    played += [measured] if wave else []
                    told(wave + 1)
    finally:  # what there is, also if interrupted
        if played:
            show(table(played))
            print(*dict.fromkeys(line for wave in played for line in wave["failures"]), sep="\n", file=sys.stderr)
            write_files(
                {json_path: lambda path: write_json(path, summary(played)), plot_path: lambda path: _plot(path, played)}
            )
    return int(any(wave["failed"] for wave in played))


def summary(waves: Sequence[Wave]) -> dict[str, Any]:
    """All waves, and their means; `ratio`: of the mean rates, the server's over the offline engine's."""
    means = {name: fmean(wave[name] for wave in waves) for name in (OFFLINE, HTTP, "client_cpu_share")}
    return means | {"ratio": means[HTTP] / means[OFFLINE], "waves": waves}


def table(waves: Sequence[Wave]) -> Table:
    """A row for each wave, and one for all."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption="tokens/s; client CPU: share of a core")
    for name in ("wave", "offline", "HTTP", "ratio", "client CPU", "failed"):
        shown.add_column(name, justify="right")
    of_all = summary(waves)
    rows = [(str(number_of), wave) for number_of, wave in enumerate(waves, 1)]
    for name, values in (*rows, ("all", of_all | {"failed": sum(wave["failed"] for wave in waves)})):
        ratio = f"{values[HTTP] / values[OFFLINE]:.2f}"
        cells = (number(values[OFFLINE]), number(values[HTTP]), ratio, percent(values["client_cpu_share"]))
        shown.add_row(name, *cells, str(values["failed"]))
    return shown


def _wave(
    engine: OfflineEngine,
    server: RunningServer,
    style: Style,
    shape: SessionShape,
    concurrency: int,
    seed: str,
    http_first: bool,
) -> Wave:
    """One wave through both."""
    work, load = _work(style, shape, concurrency, seed), ClientLoad(None, concurrency)
    scripts = [shape.script(Random(seed))] * concurrency
    offline = {} if http_first else engine.ask(work)
    run = run_load(server.target, server.model, style, scripts, load, seed)
    offline = offline or engine.ask(work)
    through = report(server.target.name, server.model, load, 0, run)
    return {
        OFFLINE: offline["tokens"] / offline["seconds"],
        HTTP: through["output_tokens_per_s"] or 0.0,
        "client_cpu_share": through["client_cpu_share"],
        "failed": through["requests"] - through["requests_completed"],
        "failures": failures([through]),
    }


def _work(style: Style, shape: SessionShape, concurrency: int, seed: str) -> dict[str, Any]:
    """A wave as the offline engine takes it: what `run_load` says with the same seed."""
    bodies = [style.talk("", shape.prompt_tokens, f"{seed}/{number}").ask(1).body for number in range(concurrency)]
    kind, field = ("chats", "messages") if style.vocabulary is None else ("prompts", "prompt")
    return {kind: [body[field] for body in bodies]}


def _plot(path: str, waves: Sequence[Wave]) -> None:
    """Draw both rates of every wave."""
    rates = {f"wave {number}": {"offline": wave[OFFLINE], "HTTP": wave[HTTP]} for number, wave in enumerate(waves, 1)}
    busy = {f"wave {number}": {"client": wave["client_cpu_share"]} for number, wave in enumerate(waves, 1)}
    draw(path, [[Bars("generated", "tokens/s", rates, beside=True), Bars("client's CPU", "share of a core", busy)]])
