"""A large simulated fleet: the real router before coarse replicas, and how far these are from engines that step.

    python benchmarks/fleet_scale.py [--replicas 1000] [--sessions 1000000] [--jobs 2]

Sessions are agents of five turns under a system prompt of 2,000 tokens. The first table compares the coarse replica with the
real scheduler on four replicas, at four loads. The second plays the large fleet; with several jobs, each plays a cell of the
fleet behind a router of its own, as fleets of that size are built.
"""

import argparse
import gc
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random

from benchmarks.fleet_sessions import SYSTEM_TOKENS, draw_sessions
from benchmarks.simulated_fleet import ClusterReport, by_price, play_cluster
from benchmarks.simulated_replicas import CoarseReplica, SteppedReplica
from jinfercept.meter.turns import LIMITS
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.tables import TextTable, show
from jinfercept.sim.workload import Script, Segment

PROFILE = "paper-gptj-6b-a100-attention"
TURNS = 5
COMPARED = ("sessions/s", "first token, mean s", "coarse", "turn, mean s", "coarse", "within limits", "coarse")
CELLS = ("turns", "within limits", "first token p99 s", "known tokens found", "busiest", "µs/turn", "processor s")
RATE = 0.8
"""Sessions per second and replica of the large fleet."""


def agents(rng: Random) -> Callable[[], Script]:
    """Scripts of agents: short answers, calls of a few seconds."""

    def turn() -> Segment:
        return Segment(rng.randint(30, 120), rng.expovariate(1 / 3), rng.randint(50, 300))

    pool = [
        Script("agent", rng.randint(100, 400), (*(turn() for _ in range(TURNS - 1)), Segment(50, None, 0)))
        for _ in range(2000)
    ]
    return lambda: rng.choice(pool)


def simulation() -> Simulation:
    """The machine of a replica."""
    return Simulation(
        load_profile(PROFILE),
        "copy_ahead",
        kv_tokens=80_000,
        host_tokens=300_000,
        max_model_len=16_384,
        prefix_caching=True,
    )


def play_cell(
    replicas: int, rate: float, duration_s: float, seed: int, coarse: bool = True
) -> tuple[ClusterReport, float]:
    """The report of a fleet, and the processor's seconds."""
    machine = simulation()
    sessions = draw_sessions(agents, rate, duration_s, seed, SYSTEM_TOKENS)
    members = [CoarseReplica(machine) if coarse else SteppedReplica(machine) for _ in range(replicas)]
    policy = by_price(machine.profile, seed)
    gc.collect()
    gc.freeze()
    began = time.process_time()
    report = play_cluster(members, policy, sessions, LIMITS)
    return report, time.process_time() - began


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="a large simulated fleet")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rows = list[tuple[str, ...]]()
    for rate in (2.0, 4.0, 6.0, 9.0):
        (fine, _), (rough, _) = (play_cell(4, rate, 40.0, 1, coarse) for coarse in (False, True))
        cells = [fine.first_token_s[0], rough.first_token_s[0], fine.turn_s[0], rough.turn_s[0]]
        shares = [f"{report.good_share:.1%}" for report in (fine, rough)]
        rows.append((f"{rate:g}", *(f"{value:.3f}" for value in cells), *shares))
    show(TextTable("4 replicas: engines that step, and coarse ones", COMPARED, rows).shown())
    jobs = options.jobs
    cell = options.replicas // jobs, RATE * options.replicas / jobs, options.sessions / (RATE * options.replicas)
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        played = list(pool.map(play_cell, *zip(*((*cell, seed) for seed in range(jobs)), strict=True)))
    wall_s = time.monotonic() - began
    rows = [
        (
            f"{report.turns:,}",
            f"{report.good_share:.1%}",
            f"{report.first_token_s[2]:.3f}",
            f"{report.known_share:.1%}",
            f"{report.busiest_share * options.replicas / jobs:.2f} × mean",
            f"{cpu_s / report.turns * 1e6:.0f}",
            f"{cpu_s:.0f}",
        )
        for report, cpu_s in played
    ]
    show(TextTable(f"{options.replicas} replicas in {jobs} cells", CELLS, rows).shown())
    print(f"wall: {wall_s:.0f} s; with a core for each job: {max(cpu_s for _, cpu_s in played):.0f} s")


if __name__ == "__main__":
    main()
