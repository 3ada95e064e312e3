"""`jinfercept simulate`: one run, or all combinations of rates, policies, orders and seeds side by side. Imports no JAX.

Wrong options are refused before anything runs. A run ends with one table and, if requested, JSON and the decisions of one run.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

from rich.console import Console
from tyro import conf

from jinfercept.cli.options import Maybe, Several, option_flags
from jinfercept.cli.simulation_table import (
    LEGEND,
    SESSION_LEGEND,
    delay_rankings,
    exit_status,
    table,
)
from jinfercept.config import CacheOptions, EngineOptions, SchedulingOptions
from jinfercept.cpu_kernels.machine import num_processors
from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.engine.meter.request_log import RequestLog
from jinfercept.errors import ConfigError
from jinfercept.kv.manager import KVManager
from jinfercept.sched.door import Overload
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.orders import ORDERS, check_order_choice
from jinfercept.sched.plugins import check_name, is_place
from jinfercept.sched.policies import SETTINGS, PolicyInputs, check_choice
from jinfercept.sim.agent_sessions import ScriptedSession, fitting, load_sessions, trace_form
from jinfercept.sim.reports import check_least, check_outputs, listed, numbers, show, write_files, write_json
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.simulation import BOUNDS, SIMULATED_ESTIMATORS, Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun, sweep
from jinfercept.sim.workload import Arrival, OwnWorkload, Script, arrivals, from_trace, load_trace
from jinfercept.sim.workload import draw as draw_script

KV_TOKENS = 53_000
"""Tokens of the device pool, unless the user says otherwise."""

_SERVED = SchedulingOptions()
POLICY_NAMES = ", ".join((*SETTINGS, *BOUNDS))
ORDER_NAMES = ", ".join(ORDERS)
SOURCE = conf.create_mutex_group(required=False, title="requests")
LOAD = conf.create_mutex_group(required=False, title="load")


@dataclass(frozen=True, kw_only=True)
class Simulate:
    trace: Annotated[Maybe[str], SOURCE] = None
    """scripts or sessions of agents to draw from (docs/studies.md), or one that is here: paper, the mixed trace of InferCept's
    authors, or agents, sessions of Claude Code"""
    workload: Annotated[str, SOURCE] = "mixed"
    """mixed, math, qa, ve, chat, image or tts; or your own as path.py:Class"""
    live: Annotated[Several, LOAD] = ()
    """sessions of agents at a time: one that ends is replaced by the next"""
    profile: str = "paper-gptj-6b-a100"
    """a named profile, or a JSON file"""
    policy: Annotated[
        Several, conf.arg(help=f"{POLICY_NAMES}; or your own as path.py:Class (default: copy_ahead)")
    ] = ()
    rate: Annotated[Several, LOAD] = ()
    """requests per second (default: 3.5), or sessions of agents per second"""
    seed: Several = ()
    """of the arrivals (default: 0)"""
    estimator: Annotated[
        Maybe[str],
        conf.arg(
            help=f"of durations: {', '.join(SIMULATED_ESTIMATORS)}; or your own as path.py:Class (default: elapsed; for "
            f"sessions {_SERVED.estimator}, as served)"
        ),
    ] = None
    order: Annotated[
        Several,
        conf.arg(
            help=f"of waiting requests: {ORDER_NAMES}; or your own as path.py:Class (default: fcfs; for sessions under "
            f"{_SERVED.policy} {_SERVED.order}, as served)"
        ),
    ] = ()
    overload: Overload = "serve"
    """new sessions for which there is no room: they wait at the door (docs/serving.md), are refused and come again, or are
    served like all others"""
    duration: float = 1200.0
    """seconds of arrivals, and as many after them to finish; with --live the run's"""
    warm_up: float = 0.0
    """what arrives in these first seconds is in no latency"""
    kv_tokens: Maybe[int] = None
    """device pool (default: 53000, or the longest request if that is longer)"""
    host_tokens: int = 300_000
    """host pool"""
    max_num_seqs: int = 1024
    """sequences that run at once"""
    max_model_len: Maybe[int] = None
    """tokens of the longest request, and of a step where prompts are whole (default: 2560; of sessions what --kv-tokens holds).
    Sessions with longer ones are left out"""
    jobs: int = num_processors()
    """processes at a time"""
    json: Maybe[str] = None
    """write the reports to this file"""
    decisions: Maybe[str] = None
    """write every decision to this file, a JSON line each; of one run"""
    options: Annotated[EngineOptions, option_flags("page_size", "chunked_prefill", "preemption")]

    def run(self) -> int:
        """Simulate, and print a table.

        Raises `ConfigError` if the options contradict each other, or a value is out of range.

        Returns:
            The exit status: 0, 1 if a run failed, 130 if Ctrl-C ended a run.
        """
        self._check()
        simulations = [self._simulation(policy, order) for policy in self._policies for order in self._orders(policy)]
        runs = [SweepRun(simulation, load) for load in self._loads() for simulation in simulations]
        if len(runs) > 1 and self.decisions is not None:
            raise ConfigError(
                "--decisions is of one run", got=f"{len(runs)} runs", fix="give one policy, rate and seed"
            )
        stats = list[EngineStats]()

        def watch(log: RequestLog, kv: KVManager, inputs: PolicyInputs, synchronous: bool) -> None:
            stats.append(EngineStats(log, kv, inputs, synchronous=synchronous, num_decisions=None))

        reports = sweep(runs, self.jobs, Console(stderr=True), watch=watch if self.decisions is not None else None)
        show(table(reports))
        for line in delay_rankings(reports):
            print(line)
        print(SESSION_LEGEND if self._plays_sessions else LEGEND, file=sys.stderr)
        write_files(
            {
                self.json: lambda path: write_json(path, reports),
                self.decisions: lambda path: _write_decisions(path, stats),
            }
        )
        return exit_status(reports)

    @property
    def _policies(self) -> list[str]:
        return listed(self.policy or (_SERVED.policy,))

    def _orders(self, policy: str) -> list[str]:
        # policies other than the default stand for other engines, which serve first come, first served
        served = self._plays_sessions and policy == _SERVED.policy
        return listed(self.order or (_SERVED.order if served else "fcfs",))

    @property
    def _name(self) -> str:
        return self.workload if self.trace is None else Path(self.trace).name

    def _check(self) -> None:
        for flag, value, least in (
            ("--kv-tokens", self._kv_tokens, self._page_size),
            ("--max-num-seqs", self.max_num_seqs, 1),
            ("--max-model-len", self._longest, 1),
            ("--page-size", self._page_size, 1),
            ("--jobs", self.jobs, 1),
            ("--host-tokens", self.host_tokens, 0),
            ("--duration", self.duration, 0),
            ("--warm-up", self.warm_up, 0),
        ):
            check_least(flag, value, least)
        check_policies(self._policies)
        for order in listed(self.order):
            check_order_choice(order)
        check_outputs((("--json", self.json), ("--decisions", self.decisions)))
        of_sessions = {
            "--live": self.live,
            "--overload queue": self.overload == "queue",
        }
        if (flags := [flag for flag, value in of_sessions.items() if value]) and not self._plays_sessions:
            got, fix = self.trace or f"--workload {self.workload}", "--trace agents, or a file of sessions"
            raise ConfigError(f"{flags[0]} needs a trace of sessions", got=got, fix=fix)
        if 0 < self.duration <= self.warm_up:
            got = f"--warm-up {self.warm_up:g}, --duration {self.duration:g}"
            raise ConfigError("nothing that arrives would count", got=got, fix="a --warm-up below --duration")

    def _loads(self) -> Sequence[SimulatedLoad[Sequence[Arrival] | SessionLoad]]:
        rates = numbers("--rate", self.rate or ("3.5",), float)
        if not self._plays_sessions:
            source = drawer(self.trace, self.workload, self._longest)
            return [load(self._name, source, rate, self.duration, seed) for rate in rates for seed in self._seeds]
        assert self.trace is not None
        sessions = self._fitting(self.trace)
        steady = [(live, 0.0) for live in numbers("--live", self.live, int)]
        loads = [
            SessionLoad(sessions, seed, live, rate, self.duration)
            for live, rate in steady or [(0, rate) for rate in rates]
            for seed in self._seeds
        ]
        return [SimulatedLoad(self._name, load.rate, load.seed, load) for load in loads]

    @property
    def _seeds(self) -> list[int]:
        return numbers("--seed", self.seed or ("0",), int)

    def _fitting(self, trace: str) -> list[ScriptedSession]:
        sessions = load_sessions(trace)
        fit = fitting(sessions, self._longest)
        if len(fit) < len(sessions):
            note = f"note: {len(sessions) - len(fit)} of {len(sessions)} sessions do not fit in {self._longest} tokens"
            print(note, file=sys.stderr)
        return fit

    @property
    def _plays_sessions(self) -> bool:
        return self.trace is not None and trace_form(self.trace) != "scripts"

    @property
    def _longest(self) -> int:
        if self.max_model_len is not None:
            return self.max_model_len
        page_size = max(1, self._page_size)
        held_tokens = self._kv_tokens // page_size * page_size
        return held_tokens if self._plays_sessions else 2560

    @property
    def _page_size(self) -> int:
        return self.options.get("page_size", CacheOptions.page_size)

    @property
    def _kv_tokens(self) -> int:
        if self.kv_tokens is not None:
            return self.kv_tokens
        return max(KV_TOKENS, (self.max_model_len or 0) + self._page_size)

    def _simulation(self, policy: str, order: str) -> Simulation:
        return Simulation(
            load_profile(self.profile),
            policy,
            self.estimator or (_SERVED.estimator if self._plays_sessions else "elapsed"),
            self.duration,
            kv_tokens=self._kv_tokens,
            host_tokens=self.host_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self._longest,
            prefix_caching=self._plays_sessions,
            drain_s=0.0 if self.live else None,
            warm_up_s=self.warm_up,
            page_size=self._page_size,
            chunked_prefill=self.options.get("chunked_prefill"),
            preemption=self.options.get("preemption", "policy"),
            order=order,
            overload=self.overload,
        )


def _write_decisions(path: str, stats: Sequence[EngineStats]) -> None:
    lines = [json.dumps(asdict(decision)) for of_run in stats for decision in of_run.decisions]
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def check_policies(names: Sequence[str]) -> None:
    """Check that every name is a policy, by name or place, or a bound. Raises `ConfigError` otherwise."""
    for name in names:
        if is_place(name):
            check_choice(name)
        else:
            check_name("policy", name, SETTINGS | BOUNDS)


def drawer(trace: str | None, workload: str, max_model_len: int) -> Callable[[Random], Callable[[], Script]]:
    """Make a function that draws requests from a trace or, without a trace, generates them.

    Raises `ConfigError` if there is no such trace or workload (`OwnWorkload`), or a request is longer than `max_model_len`
    tokens.
    """
    if trace is None and is_place(workload):
        return OwnWorkload(workload, max_model_len).drawer
    if trace is None:
        draw_script(workload, Random(0))
        return lambda rng: lambda: draw_script(workload, rng)
    scripts = load_trace(trace)
    longest = max(script.context for script in scripts)
    if longest >= max_model_len:
        raise ConfigError("the trace has a request that is too long", got=longest, fix=f"below {max_model_len} tokens")
    return lambda rng: from_trace(scripts, rng)


def load(
    workload: str,
    source: Callable[[Random], Callable[[], Script]],
    rate: float,
    duration: float,
    seed: int,
) -> SimulatedLoad[Sequence[Arrival]]:
    """Draw arrivals from a source. Raises `ConfigError` if rate or duration is out of range."""
    rng = Random(seed)
    return SimulatedLoad(workload, rate, seed, arrivals(source(rng), rate, duration, rng))
