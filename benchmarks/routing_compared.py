"""Ways of routing side by side: interleaved agent sessions that share a system prompt, on simulated engines.

    python benchmarks/routing_compared.py [--sessions 64] [--replicas 4] [--rates 2,4] [--coarse]

The scheduler of every replica is the real one, and so is the router; the clients send no name of a session. `found` is the
share of the prompt tokens that were not recomputed, `of known` the same over tokens that some replica had computed before,
`at home` the share of follow-ups that reached the replica of the turn before.
"""

import argparse
from collections.abc import Callable
from random import Random

from benchmarks.fleet_sessions import SYSTEM_TOKENS, draw_sessions
from benchmarks.routing_policies import ROUTING_POLICIES
from benchmarks.simulated_fleet import play_cluster
from benchmarks.simulated_replicas import CoarseReplica, SteppedReplica
from jinfercept.meter.turns import LIMITS
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.tables import TextTable, show
from jinfercept.sim.workload import Script, Segment

TURNS = 10
COLUMNS = ("", "found", "of known", "at home", "busiest", "first token s", "p99", "turn s", "good", "goodput/s")


def agents(rng: Random) -> Callable[[], Script]:
    """Scripts of agents of ten turns: short answers, calls of a few seconds."""

    def draw() -> Script:
        turns = [Segment(rng.randint(30, 120), rng.expovariate(1 / 3), rng.randint(50, 300)) for _ in range(TURNS - 1)]
        return Script("agent", rng.randint(100, 400), (*turns, Segment(50, None, 0)))

    return draw


def main() -> None:
    """Print a table for each rate."""
    parser = argparse.ArgumentParser(description="ways of routing side by side")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rates", default="2,4")
    parser.add_argument("--coarse", action="store_true", help="coarse replicas instead of engines")
    options = parser.parse_args()
    profile = load_profile("paper-gptj-6b-a100-attention")
    simulation = Simulation(
        profile, "copy_ahead", kv_tokens=80_000, host_tokens=300_000, max_model_len=16_384, prefix_caching=True
    )
    for rate in map(float, options.rates.split(",")):
        rows = list[tuple[str, ...]]()
        for name, make in ROUTING_POLICIES.items():
            drawn = draw_sessions(agents, rate, 2 * options.sessions / rate, 1, SYSTEM_TOKENS)
            sessions = [session for session, _ in zip(drawn, range(options.sessions), strict=False)]
            replica = CoarseReplica if options.coarse else SteppedReplica
            replicas = [replica(simulation) for _ in range(options.replicas)]
            report = play_cluster(replicas, make(profile, 0), sessions, LIMITS)
            shares = (report.found_share, report.known_share, report.home_share, report.busiest_share)
            first_s, _, first_p99_s = report.first_token_s
            times = (f"{value:.3f}" for value in (first_s, first_p99_s, report.turn_s[0]))
            good = (f"{report.good_share:.0%}", f"{report.goodput_per_s:.1f}")
            rows.append((name, *(f"{share:.1%}" for share in shares), *times, *good))
        show(
            TextTable(f"{options.sessions} sessions at {rate:g}/s, {options.replicas} replicas", COLUMNS, rows).shown()
        )


if __name__ == "__main__":
    main()
