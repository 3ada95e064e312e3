"""What `Scheduler.plan()` costs the host: median µs per plan, per running sequence, and the slope per intercepted one.

Every sequence runs or is paused with 2,000 tokens on pages of 32; at every plan some pause and as many return, so that the
policy has copies to make and victims to find in a pool that does not hold all.

    python benchmarks/plan_cost.py [--policy copy_ahead] [--running 256] [--intercepted 1000] [--plans 400]
"""

import argparse
import gc
import json
import random
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from jinfercept.kv.manager import KVManager
from jinfercept.sched.estimator import HistoryEstimator
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policies import SETTINGS, PolicyInputs
from jinfercept.sched.scheduler import Scheduler, SchedulerLimits
from jinfercept.sched.sequence import CallDuration, PendingCall, Sequence

PAGE_SIZE = 32
CONTEXT_TOKENS = 2000
MAX_MODEL_LEN = 8192
TOOLS = ("calculator", "search", "person", "image")


class Desk:
    """A scheduler whose plans are executed by nobody: every sampled token is a 0."""

    def __init__(self, policy: str, running: int, intercepted: int, share: float) -> None:
        self.rng = random.Random(0)
        self.now = 0.0
        profile, estimator = PROFILES["paper-gptj-6b-a100"], HistoryEstimator()
        made = PolicyInputs(profile, profile.saturation, PAGE_SIZE, estimator).make(policy)
        total = (running + intercepted) * CONTEXT_TOKENS
        if made.protects_paused:  # no sequence would run in a pool that paused contexts fill
            share = 1.0
        device = int((running * 1.2 + intercepted * share) * CONTEXT_TOKENS)
        self.kv = KVManager(device // PAGE_SIZE, 2 * total // PAGE_SIZE, PAGE_SIZE)
        self.scheduler = Scheduler(
            self.kv,
            made,
            profile,
            estimator,
            SchedulerLimits((1, 8, 32, 128, 512, 2048), running + 8, CONTEXT_TOKENS + MAX_MODEL_LEN),
        )
        for number in range(running + intercepted):
            tokens = [number] * CONTEXT_TOKENS
            sequence = Sequence(str(number), tokens, self.kv.open(), max_tokens=1 << 30)
            self.scheduler.add(sequence)
            while not sequence.generated:
                self.step()
            if number < intercepted:
                self.pause(sequence)

    def step(self) -> float:
        """Plan an iteration and apply it; returns the processor seconds that planning took."""
        started = time.thread_time()
        planned: PlannedStep = self.scheduler.plan(self.now)
        took = time.thread_time() - started
        self.now += 0.025
        for row in planned.sampled:
            self.scheduler.accept(row.sequence, 0)
        return took

    def pause(self, sequence: Sequence) -> None:
        key = (sequence.id, sequence.generated)
        self.scheduler.intercept(sequence, self.now, (PendingCall(self.rng.choice(TOOLS), key),))

    def turn_over(self, count: int) -> None:
        """Some running sequences pause and as many paused ones return."""
        pausing = self.rng.sample(self.scheduler.running, count)
        returning = self.rng.sample(list(self.scheduler.intercepted.values()), count)
        for sequence in pausing:
            self.pause(sequence)
        for sequence in returning:
            self.scheduler.resume(sequence, [0] * 8, (CallDuration(self.now - sequence.paused_s),))


def measure(policy: str, running: int, intercepted: int, plans: int, share: float) -> dict[str, float]:
    """Median and 99th percentile of µs per plan."""
    desk = Desk(policy, running, intercepted, share)
    gc.collect()
    gc.freeze()
    times = []
    for number in range(plans):
        if intercepted and number % 4 == 0:
            desk.turn_over(1)
        times.append(1e6 * desk.step())
    times.sort()
    return {
        "running": running,
        "intercepted": intercepted,
        "median_us": median(times),
        "p99_us": times[len(times) * 99 // 100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=list(SETTINGS))
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--intercepted", type=int, default=1000)
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--share", type=float, default=0.25, help="of the paused contexts that the device pool holds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(box=None, pad_edge=False)
    for name in ("policy", "running", "intercepted", "median µs", "p99 µs", "µs per running", "µs per intercepted"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    rows = []
    for policy in options.policy or ["copy_ahead"]:
        alone = measure(policy, options.running, 0, options.plans, options.share)
        for count in (options.intercepted // 4, options.intercepted):
            row = measure(policy, options.running, count, options.plans, options.share)
            per_running = alone["median_us"] / options.running
            slope = (row["median_us"] - alone["median_us"]) / max(1, count)
            rows.append({"policy": policy} | row | {"us_per_running": per_running, "us_per_intercepted": slope})
            table.add_row(
                policy,
                str(options.running),
                str(count),
                f"{row['median_us']:.0f}",
                f"{row['p99_us']:.0f}",
                f"{per_running:.2f}",
                f"{slope:.3f}",
            )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
