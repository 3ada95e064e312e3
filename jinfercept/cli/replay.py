"""`jinfercept bench replay`: policies on the real engine in real time, beside their simulations."""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tyro import conf

from jinfercept.bench.client_report import number
from jinfercept.cli.options import HOSTS, Maybe, ModelName, Several, Switch, engine_flags
from jinfercept.cli.simulate import SOURCE
from jinfercept.cli.simulated_loads import drawer, load
from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.sched.policies import SETTINGS, check_choice
from jinfercept.sim.agent_sessions import fitting, scaled_sessions
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.recording import name_files, run_path
from jinfercept.sim.reports import check_outputs, latency_ms, write_json
from jinfercept.sim.run_stats import Report
from jinfercept.sim.scripted import check_scales, make_request, random_tokens, scaled
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.tables import check_least, listed, plain_table, show
from jinfercept.sim.trace_files import load_sessions, trace_form
from jinfercept.startup.progress import StartDisplay

if TYPE_CHECKING:
    from jinfercept.bench.replay import Replayed
    from jinfercept.startup.start import EngineSetup

COMPARED: Mapping[str, Callable[[Report], float | None]] = {
    "ms/token": latency_ms,
    "ttft s": lambda report: report["ttft_s"]["mean"],
    "turn s": lambda report: report["turn_delay_s"]["mean"],
    "recomputed": lambda report: report["recomputed_tokens"],
    "copied out": lambda report: report["copied_out_tokens"],
    "copied in": lambda report: report["copied_in_tokens"],
    "preempted": lambda report: report["preemptions"],
    "left": lambda report: report["unfinished"],
    "steps": lambda report: report["iterations"],
    "busy s": lambda report: report["step_s"]["measured"],
    "priced s": lambda report: report["step_s"]["priced"],
}
"""Columns of the table, for a run and its simulations; `busy s` are the seconds of all steps, `priced s` those that the profile
predicts for the same steps."""

MOST_LEFT = 0.1
"""Share of unfinished requests above which the command warns that the load is too high."""

SIMULATED = "simulated"
AT_ITS_SPEED = "at its speed"
"""Simulations beside a real run: with the profile's step times, and with the step times of the run."""


class Played(NamedTuple):
    """Replays by policy, and their simulations by policy and kind."""

    runs: "dict[str, Replayed]"
    simulated: dict[str, dict[str, Report]]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The command."""

    model: ModelName
    trace: Annotated[Maybe[str], SOURCE] = None
    """scripts or sessions of agents to draw from (docs/studies.md), or one that is here: paper, the mixed trace of InferCept's
    authors, or agents, sessions of Claude Code"""
    live: Maybe[int] = None
    """sessions of agents at a time: one that ends is replaced by the next; instead of --rate"""
    workload: Annotated[str, SOURCE] = "mixed"
    """mixed, math, qa, ve, chat, image or tts"""
    policy: Annotated[Several, conf.arg(help=f"{', '.join(SETTINGS)} (default: copy_ahead)")] = ()
    rate: float = 1.0
    """requests per second, before scaling"""
    duration: float = 60.0
    """seconds of arrivals, before scaling"""
    seed: int = 0
    """of the arrivals, tokens and random weights"""
    scale_tokens: float = 1.0
    """multiplies every number of tokens"""
    scale_time: float = 1.0
    """multiplies arrivals and calls"""
    host_tokens: Maybe[int] = None
    """host pool (default: what --swap-space holds)"""
    simulate: Switch = False
    """play the same in the simulator, at the speed of its profile and at the speed of the run, and compare"""
    json: Maybe[str] = None
    """write the reports to this file"""
    decisions: Maybe[str] = None
    """write every decision to this file"""
    engine: Annotated[EngineOptions, engine_flags("policy", "seed", *HOSTS)]

    def run(self) -> int:
        """Replay, and print a table.

        Returns:
            The exit status: 1 if two policies gave different tokens.

        Raises:
            ConfigError: the options make no sense.
        """
        from jinfercept.bench.replay import resize_host
        from jinfercept.startup.start import set_up

        files = self._record_files()
        arrivals = self._arrivals()
        console, played = Console(stderr=True), Played({}, {})
        options: EngineOptions = {**self.engine, "policy": next(iter(files)), "seed": self.seed}
        with StartDisplay(notes=True) as display:
            setup = set_up(self.model, progress=display, **options)
        with closing(setup):
            arrivals = _fitting(arrivals, setup)
            if self.host_tokens is not None:
                setup = resize_host(setup, self.host_tokens)
            try:
                self._play(setup, files, arrivals, console, played)
            finally:  # what there is, also if interrupted
                if played.runs:
                    self._report(played, files, console)
        return int(_show_differences(played.runs, console))

    def _record_files(self) -> dict[str, str | None]:
        """Files of decisions by policy; of several policies, with their names in the files'.

        Raises:
            ConfigError: a policy is unknown, a number too small, or a file cannot be written.
        """
        names = listed(self.policy or ("copy_ahead",))
        for name in names:
            check_choice(name)
        if self.host_tokens is not None:
            check_least("--host-tokens", self.host_tokens, 0)
        files = {name: run_path(self.decisions, name) if len(names) > 1 else self.decisions for name in names}
        check_outputs((("--json", self.json), *(("--decisions", path) for path in files.values())))
        return files

    def _arrivals(self) -> list[Arrival] | SessionLoad:
        """Scaled. Raises `ConfigError` if there are none."""
        if self.trace is not None and trace_form(self.trace) != "scripts":
            duration_s = self.duration * self.scale_time
            rate = self.rate / self.scale_time
            check_scales(self.scale_tokens, self.scale_time)
            sessions = scaled_sessions(load_sessions(self.trace), self.scale_tokens, self.scale_time)
            return SessionLoad(sessions, self.seed, self.live or 0, 0.0 if self.live else rate, duration_s)
        if self.live is not None:
            raise ConfigError("--live needs a trace of sessions", got="no such trace", fix="name one with --trace")
        source = drawer(self.trace, self.workload, "trace", sys.maxsize)
        drawn = load(self.trace or self.workload, source, self.rate, self.duration, self.seed)
        assert not isinstance(drawn.arrivals, SessionLoad)
        arrivals = scaled(drawn.arrivals, self.scale_tokens, self.scale_time)
        if not arrivals:
            got = f"{self.rate:g} requests/s for {self.duration:g} s"
            raise ConfigError("no request arrives", got=got, fix="raise one of them")
        return arrivals

    def _play(
        self,
        setup: "EngineSetup",
        files: Mapping[str, str | None],
        arrivals: list[Arrival] | SessionLoad,
        console: Console,
        played: Played,
    ) -> None:
        """Replay policies one after another into `played`, and simulate each after its run."""
        from jinfercept.bench.replay import at_speed_of, most_s, replay, simulation

        duration_s = self.duration * self.scale_time
        write = random_tokens(setup.model.config.vocab_size, self.seed)
        requests = arrivals
        if not isinstance(requests, SessionLoad):
            requests = [(at_s, make_request(number, script, write)) for number, (at_s, script) in enumerate(requests)]
        with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as progress:
            for name, decisions in files.items():
                run = replay(setup, name, requests, write, duration_s, _shown(progress, name), decisions)
                played.runs[name] = run
                if self.simulate:
                    simulated = simulation(setup, name, duration_s, run.report["host_s"])
                    simulated = replace(simulated, drain_s=most_s(arrivals, duration_s) - duration_s)
                    played.simulated[name] = {
                        kind: played_again.run(arrivals, _shown(progress, f"{name}, {kind}"))
                        for kind, played_again in (
                            (SIMULATED, simulated),
                            (AT_ITS_SPEED, at_speed_of(run.report, simulated)),
                        )
                    }

    def _report(self, played: Played, files: Mapping[str, str | None], console: Console) -> None:
        """Print the table and warnings, and write the files."""
        _show(played)
        for name, run in played.runs.items():
            num_unfinished, num_all = run.report["unfinished"], run.report["requests"]
            if num_unfinished > MOST_LEFT * num_all:  # latencies say little
                console.print(f"{name}: {num_unfinished} of {num_all} requests were not served in time: lower --rate")
        if len(files) > 1:
            name_files(files[name] for name in played.runs)
        if self.json is not None:
            compared = [run.report | {"compared": played.simulated.get(name, {})} for name, run in played.runs.items()]
            write_json(self.json, compared)


def _shown(progress: Progress, kind: str) -> Callable[[float, float], None]:
    """A new bar, which the result moves: to (now, end)."""
    task = progress.add_task(kind)
    return lambda now, end: progress.update(task, completed=now, total=end)


def _show(played: Played) -> None:
    """A row for each policy; below it those of its simulations, and how many times their numbers the real ones are."""
    table = plain_table(("policy", *COMPARED), left=("policy",))
    for policy, run in played.runs.items():
        table.add_row(policy, *(number(value(run.report)) for value in COMPARED.values()))
        for kind, report in played.simulated.get(policy, {}).items():
            pairs = [(value(report), value(run.report)) for value in COMPARED.values()]
            table.add_row(f"  {kind}", *(number(expected) for expected, _ in pairs))
            table.add_row("  real is", *(_ratio(real, expected) for expected, real in pairs))
    show(table)
    orders = {"real": {name: run.report for name, run in played.runs.items()}}
    for kind in (SIMULATED, AT_ITS_SPEED):
        orders[kind] = {name: reports[kind] for name, reports in played.simulated.items()}
    for kind, reports in orders.items():
        ranked = sorted(
            (latency, name) for name, report in reports.items() if (latency := latency_ms(report)) is not None
        )
        if len(ranked) > 1:
            print(f"by latency, {kind}: {' < '.join(name for _, name in ranked)}")


def _ratio(real: float | None, expected: float | None) -> str:
    return f"×{real / expected:.2f}" if real is not None and expected else "-"


def _show_differences(runs: "Mapping[str, Replayed]", console: Console) -> bool:
    """Compare every policy's tokens with the first one's; True if any differ."""
    from jinfercept.bench.replay import different

    reference, *rest = runs.items()
    other_tokens = {name: different(run.streams, reference[1].streams) for name, run in rest}
    for name, requests in other_tokens.items():
        if requests:
            console.print(
                f"{name}: other tokens than {reference[0]} in {len(requests)} requests: {', '.join(requests)}"
            )
    if rest and not any(other_tokens.values()):
        console.print(f"all {len(runs)} policies gave the same tokens")
    return any(other_tokens.values())


def _fitting(arrivals: list[Arrival] | SessionLoad, setup: "EngineSetup") -> list[Arrival] | SessionLoad:
    """The requests, or the sessions that fit. Raises `ConfigError` if a request does not, or no session."""
    most = setup.memory_plan.max_model_len
    if isinstance(arrivals, SessionLoad):
        return replace(arrivals, sessions=fitting(arrivals.sessions, most))
    longest = max(arrival.script.context for arrival in arrivals)
    if longest >= most:
        raise ConfigError(
            "a request is too long for this engine",
            got=f"{longest} tokens",
            fix=f"below {most}: a smaller --scale-tokens, or more --kv-tokens",
        )
    return arrivals
