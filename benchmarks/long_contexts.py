"""What contexts of agents cost the host: a pause and a return, plans beside many paused contexts, and memory per page.

    python -m benchmarks.long_contexts [--policy copy_ahead] [--tokens 200000] [--json FILE]

Nothing is computed: every sampled token is a 0. `pause + return` is the median of what the pages cost: release, refresh, hold
and the first chunk's start. `plan` is `Scheduler.plan()` with 64 running and 400 paused contexts of 100,000 tokens, while some
pause and as many return: processor time of the thread. `bytes per page` are Python's for the pages of one context, its token
ids not counted.
"""

import argparse
import gc
import json
import time
import tracemalloc
from array import array
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.plan_cost import Desk
from jinfercept.kv.context import Context
from jinfercept.kv.manager import KVManager
from jinfercept.sched.policies import SETTINGS

PAGE_SIZE = 16
RUNNING, PAUSED, TOKENS, PLANS = 64, 400, 100_000, 200
SHOWN = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def computed(kv: KVManager, tokens: array[int]) -> Context:
    """A running context whose tokens are all computed, in chunks."""
    context = kv.open()
    kv.hold(context)
    for start in range(0, len(tokens), 2048):
        kv.begin_plan()
        end = min(len(tokens), start + 2048)
        kv.place(context, start, end)
        kv.computed(context, start, end)
        kv.commit(context, tokens)
    return context


def pause_and_return_us(num_tokens: int) -> float:
    """Median µs of a pause and a return of one context beside another one with the same first half."""
    kv = KVManager(3 * num_tokens // PAGE_SIZE, 0, PAGE_SIZE)
    tokens = array("i", range(num_tokens))
    other = tokens[: num_tokens // 2]
    contexts = [computed(kv, other + other), computed(kv, tokens)]
    times = []
    for _ in range(100):
        kv.begin_plan()
        started = time.perf_counter()
        kv.release(contexts[1])
        contexts[1].residency(num_tokens)
        kv.refresh(contexts[1], tokens)
        kv.hold(contexts[1])
        kv.gap_end(contexts[1], num_tokens)
        times.append(1e6 * (time.perf_counter() - started))
    return median(times)


def bytes_per_page(num_tokens: int) -> float:
    """Bytes of Python's memory per page of one context."""
    kv, tokens = KVManager(num_tokens // PAGE_SIZE, 0, PAGE_SIZE), array("i", range(num_tokens))
    tracemalloc.start()
    context = computed(kv, tokens)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / context.num_pages


def plan_us(policy: str, share: float = 0.25) -> list[float]:
    """Sorted µs of plans."""
    desk = Desk(policy, RUNNING, PAUSED, share, context_tokens=TOKENS, page_size=PAGE_SIZE)
    gc.collect()
    gc.freeze()
    times = []
    for number in range(PLANS):
        if number % 4 == 0:
            desk.turn_over(1)
        times.append(1e6 * desk.step())
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", help="a name, or your own as path.py:Class (default: every name)")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, float] = {
        f"pause + return of {options.tokens:,} tokens, µs": pause_and_return_us(options.tokens),
        "bytes per page": bytes_per_page(options.tokens),
    }
    console = Console()
    for name, value in figures.items():
        console.print(f"{name}: {value:.0f}")
    table = Table("plan, µs", *SHOWN, box=None, pad_edge=False)
    for policy in options.policy or SETTINGS:
        times = plan_us(policy)
        shown = [times[int(len(times) * share)] for share in SHOWN.values()]
        figures |= {f"plan, {policy}, {name} µs": value for name, value in zip(SHOWN, shown, strict=True)}
        table.add_row(policy, *(f"{value:.0f}" for value in shown))
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
