"""`python -m benchmarks COMMAND`: load on servers, and reports of the GPU suite. Each imports what it needs when it runs."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jinfercept.cli.bench_flags import SEVERAL, add_outputs, add_servers, add_shape, taken
from jinfercept.cli.flags import Commands, Parser, add_flags
from jinfercept.cli.main import run_command_line
from jinfercept.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, as `jinfercept` does."""
    return run_command_line(build_parser(), argv)


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = Parser(prog="python -m benchmarks", description="What only the makers of jinfercept measure.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(commands)
    _add_gpu_report(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser("load", help="load on OpenAI-compatible servers: latencies, cached tokens, errors")
    add_servers(serve)
    load = serve.add_argument_group("load")
    load.add_argument("--request-rate", action="append", help=f"sessions that begin in a second, Poisson{SEVERAL}")
    load.add_argument(
        "--concurrency",
        action="append",
        help=f"sessions that run at a time, instead of a rate (default: 8; with --offline 32){SEVERAL}",
    )
    load.add_argument("--sessions", type=int, help="of every run (default: 32)")
    load.add_argument("--seed", action="append", help=f"of arrivals, texts and tools (default: 0){SEVERAL}")
    load.add_argument(
        "--offline",
        action="store_true",
        help="compare MODEL's server with the offline engine on the same prompts, of one turn, all at once",
    )
    source = load.add_mutually_exclusive_group()
    source.add_argument("--trace", help="scripts to draw sessions from, a JSON line each; instead of the shape below")
    source.add_argument("--workload", help="mixed, math, qa, ve, chat, image or tts, generated; instead of the shape")
    add_shape(serve, turns=4, system=256, prompt=256, tool=64, new=64, seconds="exp:1")
    add_outputs(serve)
    add_flags(serve, without=("seed",))
    serve.set_defaults(command_function=_serve)


def _serve(
    request_rate: list[str] | None,
    concurrency: list[str] | None,
    sessions: int | None,
    seed: list[str] | None,
    offline: bool,
    json: str | None,
    plot: str | None,
    **rest: Any,
) -> int:
    from benchmarks.load import load_command

    if offline:
        more = (("--request-rate", request_rate), ("--sessions", sessions), *_sources(rest))
        if given := [flag for flag, value in more if value is not None]:
            raise ConfigError("--offline has prompts of its own", got=", ".join(given), fix="leave them out")
        return _offline(concurrency or ["32"], seed or ["0"], json, plot, **rest)
    sources = {name.removeprefix("--"): value for name, value in _sources(rest)}
    return load_command(
        *taken(rest),
        **sources,
        sessions=32 if sessions is None else sessions,
        request_rates=request_rate or [],
        concurrencies=concurrency or ([] if request_rate else ["8"]),
        seeds=seed or ["0"],
        json_path=json,
        plot_path=plot,
    )


def _offline(concurrency: list[str], seed: list[str], json: str | None, plot: str | None, **rest: Any) -> int:
    from benchmarks.overhead import overhead_command
    from jinfercept.sim.tables import numbers

    single = {}
    for flag, texts in (("--concurrency", concurrency), ("--seed", seed)):
        values = numbers(flag, texts, int)
        if len(values) > 1:
            raise ConfigError(f"--offline takes one {flag}", got=", ".join(texts), fix="give one")
        single[flag.removeprefix("--")] = values[0]
    servers, style, shape = taken(rest)
    return overhead_command(servers, style, shape._replace(turns=1), **single, json_path=json, plot_path=plot)


def _sources(rest: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Take out where sessions are drawn from."""
    return [(flag, rest.pop(flag.removeprefix("--"))) for flag in ("--trace", "--workload")]


def _add_gpu_report(commands: Commands) -> None:
    report = commands.add_parser("gpu-report", help="files of tools/gpu_suite as one table against the aims")
    report.add_argument("files", nargs="+", metavar="FILE", help="what tools/gpu_suite has written")
    report.add_argument("--out", help="write the table and all details to this Markdown file")
    report.add_argument("--plot", help="draw link, transfers, kernels and steps into this file")
    report.set_defaults(command_function=_gpu_report)


def _gpu_report(files: list[str], out: str | None, plot: str | None) -> int:
    from benchmarks.gpu_report import gpu_report

    return gpu_report(files, out=out, plot=plot)


if __name__ == "__main__":
    sys.exit(main())
