"""What the copies of a step cost the host: tiny pages, all out and then all in, by the pages of an array, in turns.

A full link of 50 GB/s moves 240 pages of Llama-3-8B in 10 ms. Seconds are those of the dispatching thread; what a CPU spends on
the copies themselves is next to nothing.

    python benchmarks/copy_cost.py [--pages 16 --pages 240] [--json FILE]
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import batched, product
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from jinfercept.kv.page import PageCopy
from jinfercept.models.mesh import place
from jinfercept.runner import host_memory
from jinfercept.runner.executables import Executables
from jinfercept.runner.packing_samples import NUM_FIELDS
from jinfercept.runner.page_arrays import KVArrays
from jinfercept.runner.step_upload import MOST_TRANSFERS

STAGING = (1, 16, 32)
BLANK = np.zeros((NUM_FIELDS, 0), np.int32)


def time_copies(pages: int, rounds: int = 40) -> dict[str, dict[str, float]]:
    """By the way to hold host copies: executables and arrays that move all pages out and in, and the median microseconds."""
    home = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    sizes: dict[str, Any] = {"parts": [(0, 2)], "num_kv_heads": 1, "head_dim": 2, "dtype": "float32", "home": home}
    ways = {f"arrays of {staging}": KVArrays(pages, 1, staging_pages=staging, **sizes) for staging in STAGING}
    for kv in ways.values():
        executables = Executables()
        kv.add_executables(executables)
        executables.compile()
        kv.reset()
    there = [PageCopy(1 + page, page) for page in range(pages)]
    plans = {"out_us": ((), (), there), "in_us": (there, range(pages), ())}
    taken: dict[str, dict[str, list[float]]] = {name: {way: [] for way in plans} for name in ways}
    counts: dict[str, Counter[str]] = {}
    for _, (name, kv) in product(range(rounds), ways.items()):
        with counted_calls() as counts[name]:
            for way, plan in plans.items():
                began_s = time.thread_time()
                groups = [*batched(kv.begin(*plan), MOST_TRANSFERS)]
                kv.slots.commons = place([kv.common_shape.pack(BLANK, group) for group in groups], home)
                kv.fetch(0)
                kv.offload(0)
                kv.scatter(0)
                taken[name][way].append(1e6 * (time.thread_time() - began_s))
                kv.wait()
    return {name: counts[name] | {way: median(us) for way, us in ways.items()} for name, ways in taken.items()}


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the executables that are called and the arrays that are moved."""
    counts = Counter(executables=0, arrays=0)
    look_up, put = Executables.__getitem__, host_memory.move

    def noting_look_up(self: Executables, key: Hashable) -> Any:
        counts["executables"] += 1
        return look_up(self, key)

    def noting_move(arrays: Any, sharding: Any) -> Any:
        counts["arrays"] += len(arrays)
        return put(arrays, sharding)

    Executables.__getitem__, host_memory.move = noting_look_up, noting_move
    try:
        yield counts
    finally:
        Executables.__getitem__, host_memory.move = look_up, put


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, action="append", help="may be repeated (default: 16, 240)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table, rows = Table(box=None, pad_edge=False, title="of the host, per step"), []
    for name in ("pages", "way", "executables", "arrays", "out, µs", "in, µs", "of arrays of 1"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for pages in options.pages or [16, 240]:
        ways = time_copies(pages)
        whole = [row["out_us"] + row["in_us"] for row in ways.values()]
        for (name, row), us in zip(ways.items(), whole, strict=True):
            rows.append({"pages": pages, "way": name} | row)
            numbers = [f"{row[part]:.0f}" for part in ("executables", "arrays", "out_us", "in_us")]
            table.add_row(str(pages), name, *numbers, f"{us / whole[0]:.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
