"""`python -m studies regimes`: two policies under the same order of waiting requests, over kinds of workloads, seed by seed.

The regimes differ in what decides: contexts of coding agents where the device holds little, nearly enough or all of them, with
and without a host tier; sessions whose tools answer at once; and small contexts, as a first try on one's own machine has them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from statistics import fmean

from rich.console import Console

from jinfercept.cli.options import Maybe, Repeated, Switch
from jinfercept.errors import ConfigError, nearest
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.agent_sessions import ScriptedSession, ScriptedTurn, fitting, load_sessions
from jinfercept.sim.reports import TextTable, check_least, number_text
from jinfercept.sim.run_stats import Report
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from jinfercept.sim.workload import Script, Segment, arrivals, draw
from studies.agents.cells import MEAN_CONTEXT, MODELS, PAGE_SIZE, AgentCell
from studies.agents.report import ratio_text
from studies.answer import StudyAnswer, StudyEffort, output_folder

type Regime = Callable[[str, int, float], SweepRun]
"""The run of a policy with a seed for so many seconds."""


def _sessions(
    sessions: Sequence[ScriptedSession],
    profile: str,
    kv_tokens: int,
    host: float,
    live: int,
) -> Regime:
    """So many live sessions, and the host pool over the device pool."""

    def run(policy: str, seed: int, duration_s: float) -> SweepRun:
        pool = kv_tokens // PAGE_SIZE * PAGE_SIZE
        simulation = Simulation(
            PROFILES[profile],
            policy,
            "history",
            duration_s,
            drain_s=0.0,
            kv_tokens=pool,
            host_tokens=round(host * pool),
            page_size=PAGE_SIZE,
            max_model_len=pool,
            prefix_caching=True,
            order="missing_work",
            warm_up_s=duration_s / 10,
        )
        load = SessionLoad(fitting(sessions, pool), seed, live, duration_s=duration_s, named=True)
        return SweepRun(simulation, SimulatedLoad("agents", 0.0, seed, load))

    return run


def quick_tools() -> list[ScriptedSession]:
    """20 sessions of 40 to 120 calls whose tools answer within a tenth of a second mostly, with contexts of 30,000 tokens."""
    rng, sessions = Random(0), list[ScriptedSession]()
    for number in range(20):
        turns = [ScriptedTurn(1600, 120, 0, 0.0, calls=True)]
        for _ in range(rng.randint(40, 120)):
            kept, decode = turns[-1].prompt + turns[-1].decode, int(rng.lognormvariate(4.7, 0.8)) + 1
            pause_s = rng.lognormvariate(-2.8, 0.4) if rng.random() < 0.95 else rng.lognormvariate(1.5, 1.0)
            turns.append(ScriptedTurn(kept + int(rng.lognormvariate(5.2, 1.0)) + 1, decode, kept, pause_s, calls=True))
        sessions.append(ScriptedSession(f"quick {number}", 100, tuple(turns)))
    return sessions


def small_requests() -> list[Script]:
    """60 requests of 200 to 900 tokens with 1 to 4 calls of about 3 s."""
    rng = Random(0)

    def segment() -> Segment:
        return Segment(rng.randint(20, 120), rng.expovariate(1 / 3), rng.randint(10, 80))

    return [
        Script("own", rng.randint(200, 900), (*(segment() for _ in range(rng.randint(1, 4))), Segment(70, None, 0)))
        for _ in range(60)
    ]


def _requests(draw: Callable[[Random], Script], rate: float, kv_tokens: int, host: int, order: str) -> Regime:
    """GPT-J-6B on an A100, requests at a rate."""

    def run(policy: str, seed: int, duration_s: float) -> SweepRun:
        simulation = Simulation(
            PROFILES["paper-gptj-6b-a100"],
            policy,
            "elapsed" if order == "fcfs" else "history",
            duration_s / 3,
            kv_tokens=kv_tokens,
            host_tokens=host,
            order=order,
        )
        rng = Random(seed)
        load = arrivals(lambda: draw(rng), rate, duration_s / 3, rng)
        return SweepRun(simulation, SimulatedLoad("requests", rate, seed, load))

    return run


def regimes(trace: str = "agents", context: int = MEAN_CONTEXT) -> dict[str, Regime]:
    """The regimes by title. The order is `missing_work` but for requests that come first come, first served.

    Args:
        trace: sessions of agents; see `load_sessions`.
        context: tokens of one of their contexts. The pools are as large as so many contexts, whatever their size.
    """
    sessions, size, small = load_sessions(trace), context / MEAN_CONTEXT, small_requests()
    pools = [*product(MODELS, (0.15, 0.33), (0, 1, 4)), *product(MODELS, (1.0,), (1,))]
    cells = [AgentCell(*pool) for pool in pools]
    return {
        str(cell): _sessions(sessions, cell.model.profile, round(size * cell.model.kv_tokens), cell.host, cell.live)
        for cell in cells
    } | {
        "8B, 12 sessions, 200,000 and 800,000 tokens": _sessions(
            sessions, MODELS[0].profile, round(size * 200_000), 4, 12
        ),
        "8B, quick tools, device 0.33 ×, host 1 ×": _sessions(quick_tools(), MODELS[0].profile, 100_000, 1, 11),
        **{
            f"small contexts, {rate}/s, {pool:,} tokens, {order}": _requests(
                lambda rng: rng.choice(small), rate, pool, 8 * pool, order
            )
            for pool, rate, order in product((5_000, 8_000), (1.5, 2.5, 3.5), ("fcfs", "missing_work"))
        },
        **{
            f"mixed workload, {rate}/s, {order}": _requests(partial(draw, "mixed"), rate, 53_000, 300_000, order)
            for rate, order in product((2.0, 3.5, 5.0, 6.5, 8.0), ("fcfs", "missing_work"))
        },
    }


QUICK = (
    "8B, H100, device 0.33 ×, host 1 ×",
    "8B, H100, device 0.15 ×, host 1 ×",
    "small contexts, 2.5/s, 8,000 tokens, fcfs",
)
QUICK_SEEDS, QUICK_S = 1, 60.0
SEEDS, RUN_S = 3, 600.0


@dataclass(frozen=True)
class StudyRegimes:
    """The command."""

    policy: str = "copy_ahead"
    """compared with the baseline"""
    baseline: str = "lru_host"
    """under the same order"""
    regime: Repeated = ()
    """parts of the regimes' titles (default: all; with --quick three of them)"""
    quick: Switch = False
    """a first look in seconds, whose ratios say nothing yet; else all regimes, in an hour"""
    trace: str = "agents"
    """sessions of agents, a JSON line each (docs/studies.md); agents: those that ship with the package"""
    context: int = MEAN_CONTEXT
    """tokens of one of their contexts, by which the pools are sized"""
    seeds: Maybe[int] = None
    """of the workloads (default: 3; with --quick 1)"""
    duration: Maybe[float] = None
    """seconds of each run; of requests at a rate a third (default: 600; with --quick 60)"""
    jobs: int = os.cpu_count() or 1
    """processes at a time"""
    out: Maybe[str] = None
    """folder to write a page and a CSV file to; made if it does not exist"""

    def run(self) -> int:
        """Play the regimes, and print a table; returns 0, or 130 after Ctrl-C."""
        num_seeds = self.seeds if self.seeds is not None else QUICK_SEEDS if self.quick else SEEDS
        duration_s = self.duration or (QUICK_S if self.quick else RUN_S)
        check_least("--seeds", num_seeds, 1)
        check_least("--context", self.context, 1)
        by_title, parts = regimes(self.trace, self.context), list(self.regime or (QUICK if self.quick else ()))
        titles = [title for title in by_title if not parts or any(part in title for part in parts)]
        if not titles:
            got, fix = ", ".join(parts) + nearest(parts[0], tuple(by_title)), f"a part of one of {'; '.join(by_title)}"
            raise ConfigError("no such regime", got=got, fix=fix)
        folder = None if self.out is None else output_folder(self.out, ("regimes.md", "regimes.csv"))
        effort = StudyEffort(self.quick, self.jobs, 0, Console(stderr=True))
        trials = list(product(titles, (self.policy, self.baseline), range(num_seeds)))
        runs = [by_title[title](policy, seed, duration_s) for title, policy, seed in trials]
        try:
            reports = dict(zip(trials, effort.play(runs), strict=True))
        except KeyboardInterrupt:
            return 130
        study = answer(titles, (self.policy, self.baseline), num_seeds, reports)
        study.show()
        if folder is not None:
            print(f"\nwritten: {', '.join(map(str, study.write(folder, 'regimes')))}")
        return 0


def answer(
    titles: Sequence[str], policies: tuple[str, str], seeds: int, reports: Mapping[tuple[str, str, int], Report]
) -> StudyAnswer:
    """The table: ratios of the means over seeds, and the 95 % interval of the ratios of paired seeds."""
    policy, baseline = policies
    rows = list[list[str]]()
    for title in titles:
        pairs = [(reports[title, policy, seed], reports[title, baseline, seed]) for seed in range(seeds)]
        delays = [(own["turn_delay_s"]["mean"], other["turn_delay_s"]["mean"]) for own, other in pairs]
        goods = [(own["goodput_per_s"], other["goodput_per_s"]) for own, other in pairs]
        recomputed = (fmean(report["recomputed_tokens"] for report in column) for column in zip(*pairs, strict=True))
        rows.append(
            [
                title,
                *(f"{fmean(column):.3g}" for column in zip(*delays, strict=True)),
                *map(ratio_text, (delays, goods)),
                *map(number_text, recomputed),
            ]
        )
    columns = ["", f"delay s, {policy}", baseline, "ratio", "in limits, ratio", f"recomputed, {policy}", baseline]
    table = TextTable(f"Mean turn delay, and requests within limits; same order, {seeds} seeds.", columns, rows)
    return StudyAnswer(f"{policy} and {baseline} under the same order", [table], [], rows=list(reports.values()))
