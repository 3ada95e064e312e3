"""What a step costs host 0 and the other hosts beside its execution: bytes, and median µs to encode, send and decode it.

Every sequence decodes with a context of 4,000 tokens; `options` have a temperature, top_p and penalties; of `masks` each allows
eight tokens, or forbids eight, of a vocabulary of 128,256; `prefill` is one chunk beside them. Sent over TCP to a thread of the
same process, once for each of the other hosts.

    python benchmarks/plan_wire.py [--batch 256] [--hosts 2] [--steps 500]
"""

import argparse
import gc
import json
import socket
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jinfercept.runner.hosts.group import meet
from jinfercept.runner.hosts.link import HostLink, Kind
from jinfercept.runner.hosts.placement import PLANS_PORT, Placement
from jinfercept.runner.hosts.wire import decode_masks, decode_plan, encode_masks, encode_plan
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import FROM_DEVICE, Chunk, Masks, NewPages, Sample, StepPlan, draw_options

CONTEXT, PREFILL, VOCAB, EXCEPTIONS = 4000, 2048, 128_256, 8
SAMPLED = SamplingParams(temperature=0.7, top_p=0.95, presence_penalty=0.5, logprobs=2)


class Step(NamedTuple):
    """What host 0 sends for one step."""

    plan: StepPlan
    masks: Masks


def decoding(batch: int, params: SamplingParams) -> tuple[Chunk, ...]:
    """Chunks of one token; one in sixteen enters a new page, as with pages of 16 tokens."""
    options, rng = draw_options(params, frozenset({2})), np.random.default_rng(0)
    seeds = rng.integers(0, 1 << 32, batch).tolist()
    return tuple(
        Chunk(
            slot,
            CONTEXT + slot,
            (FROM_DEVICE,),
            () if slot % 16 else NewPages(CONTEXT // 16, array("i", [70_000 + slot])),
            Sample(params.temperature, seed, options),
        )
        for slot, seed in enumerate(seeds)
    )


def masks(batch: int, fill: int) -> Masks:
    """A mask for every row, with a few words that are not `fill`."""
    rng = np.random.default_rng(1)
    made = {}
    for row in range(batch):
        made[row] = np.full(-(-VOCAB // 32), fill, np.uint32)
        made[row][rng.integers(0, VOCAB // 32, EXCEPTIONS)] ^= np.uint32(1 << 7)
    return made


def steps(batch: int) -> Mapping[str, Step]:
    """The steps to time, by name."""
    greedy = decoding(batch, SamplingParams(temperature=0))
    prompt = tuple(np.random.default_rng(2).integers(0, VOCAB, PREFILL).tolist())
    pages = NewPages(0, array("i", range(80_000, 80_000 + PREFILL // 16)))
    chunk = Chunk(batch, 0, prompt, pages, Sample(0.0, 1))
    return {
        "greedy": Step(StepPlan(1, batch, greedy), {}),
        "options": Step(StepPlan(1, batch, decoding(batch, SAMPLED)), {}),
        "masks, few allowed": Step(StepPlan(1, batch, greedy), masks(batch, 0)),
        "masks, few forbidden": Step(StepPlan(1, batch, greedy), masks(batch, 0xFFFFFFFF)),
        "prefill": Step(StepPlan(1, batch + PREFILL, (*greedy, chunk)), {}),
    }


def timed(work: Callable[[], object], count: int) -> float:
    """Median µs of a function."""
    taken = []
    for _ in range(count):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return 1e6 * median(taken)


def links(num_hosts: int) -> tuple[HostLink, list[bytes]]:
    """Host 0's link, and its connections to other hosts that read all that comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1] - PLANS_PORT
    with ThreadPoolExecutor(num_hosts) as pool:
        met = [*pool.map(lambda i: meet(Placement("127.0.0.1", port, num_hosts, i), {}, "", 60.0), range(num_hosts))]
    for link, _ in met[1:]:
        threading.Thread(target=drain, args=(link,), daemon=True).start()
    return met[0][0], [*met[0][1].values()]


def drain(link: HostLink) -> None:
    """Read frames until the connection ends."""
    while not link.is_lost(b""):
        link.wait()
        link.receive()


def measure(step: Step, link: HostLink, peers: list[bytes], count: int) -> dict[str, float]:
    """Bytes, and µs of the parts."""
    plan, words = encode_plan(step.plan), encode_masks(step.masks)

    def send() -> None:
        for peer in peers:
            link.send(Kind.FORWARD, plan, peer)
            link.send(Kind.SAMPLE, words, peer)

    return {
        "bytes": len(plan) + len(words),
        "encode_us": timed(lambda: (encode_plan(step.plan), encode_masks(step.masks)), count),
        "send_us": timed(send, count),
        "decode_us": timed(lambda: (decode_plan(plan), decode_masks(words)), count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="sequences (default: 256)")
    parser.add_argument("--hosts", type=int, default=2, help="of which host 0 sends to the others (default: 2)")
    parser.add_argument("--steps", type=int, default=500, help="repetitions (default: 500)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    link, peers = links(options.hosts)
    rows = []
    gc.freeze()
    for name, step in steps(options.batch).items():
        parts = measure(step, link, peers, options.steps)
        rows.append({"step": name, "batch": options.batch, "hosts": options.hosts} | parts)
    table = Table(box=None, pad_edge=False)
    for name in ("step", "bytes", "encode µs", "send µs", "decode µs"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for row in rows:
        table.add_row(row["step"], *(f"{row[part]:,.0f}" for part in ("bytes", "encode_us", "send_us", "decode_us")))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
