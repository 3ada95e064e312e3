"""`jinfercept bench replay`: policies against the real engine in real time, and the simulator's answer beside it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from jinfercept.bench.replay import Replayed, at_speed_of, different, replay, resize_host, simulation
from jinfercept.cli.simulate import drawer, load
from jinfercept.cli.start_log import start_log
from jinfercept.errors import ConfigError
from jinfercept.sched.policies import check_name
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.recording import NO_RECORDS, RecordFiles, name_files
from jinfercept.sim.reports import check_outputs, latency_ms, write_json
from jinfercept.sim.run_stats import Report
from jinfercept.sim.scripted import make_request, random_tokens, scaled
from jinfercept.sim.tables import check_least, listed, number_text, show
from jinfercept.startup.progress import StartDisplay
from jinfercept.startup.start import EngineSetup, set_up

COMPARED: Mapping[str, Callable[[Report], float | None]] = {
    "ms/token": latency_ms,
    "ttft s": lambda report: report["ttft_s"]["mean"],
    "recomputed": lambda report: report["recomputed_tokens"],
    "copied out": lambda report: report["copied_out_tokens"],
    "copied in": lambda report: report["copied_in_tokens"],
    "preempted": lambda report: report["preemptions"],
    "left": lambda report: report["unfinished"],
    "steps": lambda report: report["iterations"],
    "busy s": lambda report: report["step_s"]["measured"],
    "priced s": lambda report: report["step_s"]["priced"],
}
"""What is shown of a run, and beside its simulation; `busy s` are the seconds of all steps, `priced s` what the profile says
of the same steps."""

MOST_LEFT = 0.1
"""Share of the requests that may be left before the command says that the load is too much."""

SIMULATED = "simulated"
AT_ITS_SPEED = "at its speed"
"""What a real run is compared with: the simulation, and the same with steps as slow as they were in the run."""


def replay_command(
    model: str,
    *,
    trace: str | None,
    workload: str,
    policies: Sequence[str],
    rate: float,
    duration: float,
    seed: int,
    scale_tokens: float,
    scale_time: float,
    host_tokens: int | None,
    simulate: bool,
    json_path: str | None,
    records: RecordFiles = NO_RECORDS,
    **flags: Any,
) -> int:
    """Run the command.

    Args:
        model: as for `LLM`.
        trace, workload: where requests are drawn from.
        policies: each text may hold several, with commas.
        rate, duration, seed: of the arrivals, before they are scaled.
        scale_tokens, scale_time: see `scaled`.
        host_tokens: host pool, instead of the engine's `swap_space`.
        simulate: play the same in the simulator too, with the engine's profile and at the speed that the run really had.
        json_path: file to write.
        records: more of them; with several policies, their names go into the files'.
        flags: options of `LLM`.

    Returns:
        The exit status: 1 if two policies gave different tokens.

    Raises:
        ConfigError: the options make no sense.
    """
    names = listed(policies)
    for name in names:
        check_name(name)
    if host_tokens is not None:
        check_least("--host-tokens", host_tokens, 0)
    plays = {name: records.of(name) if len(names) > 1 else records for name in names}
    flags_of = ("--decisions", "--chrome-trace")
    check_outputs(
        (("--json", json_path), *(one for play in plays.values() for one in zip(flags_of, play, strict=True)))
    )
    drawn = load(trace or workload, drawer(trace, workload, "trace", sys.maxsize), rate, duration, seed)
    arrivals = scaled(drawn.arrivals, scale_tokens, scale_time)
    if not arrivals:
        raise ConfigError("nobody arrives", got=f"{rate:g} requests/s for {duration:g} s", fix="raise one of them")
    console = Console(stderr=True)
    with start_log(), StartDisplay() as display:
        setup = set_up(model, progress=display, policy=names[0], seed=seed, **flags)
    with closing(setup):
        _check_lengths(arrivals, setup)
        if host_tokens is not None:
            setup = resize_host(setup, host_tokens)
        runs: dict[str, Replayed] = {}
        simulated: dict[str, dict[str, Report]] = {}
        try:
            _play(setup, plays, arrivals, duration * scale_time, seed, simulate, console, runs, simulated)
        finally:  # what there is, also if interrupted
            if runs:
                _show(runs, simulated)
                _warn(runs, console)
                if len(plays) > 1:
                    name_files(plays[name] for name in runs)
                if json_path is not None:
                    parts = [run.report | {"compared": simulated.get(name, {})} for name, run in runs.items()]
                    write_json(json_path, parts)
    return int(_tell_differences(runs, console))


def _check_lengths(arrivals: Sequence[Arrival], setup: EngineSetup) -> None:
    longest, most = max(arrival.script.context for arrival in arrivals), setup.memory_plan.max_model_len
    if longest >= most:
        raise ConfigError(
            "a request is too long for this engine",
            got=f"{longest} tokens",
            fix=f"below {most}: a smaller --scale-tokens, or more --kv-tokens",
        )


def _play(
    setup: EngineSetup,
    plays: Mapping[str, RecordFiles],
    arrivals: Sequence[Arrival],
    duration_s: float,
    seed: int,
    simulate: bool,
    console: Console,
    runs: dict[str, Replayed],
    simulated: dict[str, dict[str, Report]],
) -> None:
    """Replay policies one after another into `runs`, and simulate each after its run into `simulated`."""
    write = random_tokens(setup.model.config.vocab_size, seed)
    requests = [(at_s, make_request(number, script, write)) for number, (at_s, script) in enumerate(arrivals)]
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as progress:
        for name, records in plays.items():
            run = replay(setup, name, requests, write, duration_s, _teller(progress, name), records)
            runs[name] = run
            if simulate:
                asked = simulation(setup, name, duration_s, run.report["host_s"])
                simulated[name] = {
                    what: one.run(arrivals, _teller(progress, f"{name}, {what}"))
                    for what, one in ((SIMULATED, asked), (AT_ITS_SPEED, at_speed_of(run.report, asked)))
                }


def _teller(progress: Progress, what: str) -> Callable[[float, float], None]:
    task = progress.add_task(what)
    return lambda now, end: progress.update(task, completed=now, total=end)


def _show(runs: Mapping[str, Replayed], simulated: Mapping[str, Mapping[str, Report]]) -> None:
    """A row for each policy; below it those of its simulations, and how many times their numbers the real ones are."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("policy", *COMPARED):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for policy, run in runs.items():
        table.add_row(policy, *(_cell(value(run.report)) for value in COMPARED.values()))
        for what, report in simulated.get(policy, {}).items():
            pairs = [(value(report), value(run.report)) for value in COMPARED.values()]
            table.add_row(f"  {what}", *(_cell(expected) for expected, _ in pairs))
            table.add_row("  real is", *(_ratio(found, expected) for expected, found in pairs))
    show(table)
    orders = {"real": {name: run.report for name, run in runs.items()}}
    for what in (SIMULATED, AT_ITS_SPEED):
        orders[what] = {name: reports[what] for name, reports in simulated.items()}
    for what, reports in orders.items():
        ranked = sorted(
            (latency, name) for name, report in reports.items() if (latency := latency_ms(report)) is not None
        )
        if len(ranked) > 1:
            print(f"by latency, {what}: {' < '.join(name for _, name in ranked)}")


def _warn(runs: Mapping[str, Replayed], console: Console) -> None:
    """Name the policies under which so many were left that latencies say little."""
    for name, run in runs.items():
        left, num_all = run.report["unfinished"], run.report["requests"]
        if left > MOST_LEFT * num_all:
            console.print(f"{name}: {left} of {num_all} requests were not served in time: lower --rate")


def _cell(value: float | None) -> str:
    return "-" if value is None else number_text(value)


def _ratio(found: float | None, expected: float | None) -> str:
    return f"×{found / expected:.2f}" if found is not None and expected else "-"


def _tell_differences(runs: Mapping[str, Replayed], console: Console) -> bool:
    """Compare every policy's tokens with the first one's; True if any differ."""
    reference, *others = runs.items()
    found = {name: different(run.streams, reference[1].streams) for name, run in others}
    for name, requests in found.items():
        if requests:
            console.print(
                f"{name}: other tokens than {reference[0]} in {len(requests)} requests: {', '.join(requests)}"
            )
    if others and not any(found.values()):
        console.print(f"all {len(runs)} policies gave the same tokens")
    return any(found.values())
