"""What the scripts that measure other engines share. They run where jinfercept need not be installed, and import nothing of it.

The work comes as JSON on standard input, the cells go as one line of JSON to standard output; see
`throughput_peers.measure_peer`.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROUNDS = 3
"""Measurements of a cell, of which the best counts."""
TIMEOUT_S = 10.0
"""Seconds after which no further round of a cell begins."""

Times = list[list[float]]
Generate = Callable[[list[list[int]], int], Times]
"""Generates so many tokens for each prompt, greedy and without an early end; seconds from the call to each request's tokens."""


def decode_rate(times_s: Sequence[Sequence[float]]) -> float:
    """Tokens per second of all requests while all of them decode.

    Args:
        times_s: when each request's tokens came; at least two of them overlap.

    The span reaches from the moment at which the last request has its first token to the one at which the first request has
    its last; tokens count that came after its beginning.
    """
    start, end = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    return sum(start < at <= end for times in times_s for at in times) / (end - start)


def measure_cell(generate: Generate, batch: int, context: int, new_tokens: int, vocab_size: int) -> tuple[float, float]:
    """Decode and prefill rates, tokens per second: the best of some rounds, each with random prompts of its own."""
    began_s, rounds = time.perf_counter(), list[tuple[float, float]]()
    while not rounds or (len(rounds) < ROUNDS and time.perf_counter() - began_s < TIMEOUT_S):
        rng = random.Random(len(rounds))
        prompts = [[rng.randrange(vocab_size) for _ in range(context)] for _ in range(batch)]
        prefill_s = max(times[-1] for times in generate(prompts, 1))
        rounds.append((decode_rate(generate(prompts, new_tokens)), batch * context / prefill_s))
    return max(decode for decode, _ in rounds), max(prefill for _, prefill in rounds)


def memory_gib(field: str) -> float | None:
    """This process' resident memory: `VmRSS` is what it has, `VmHWM` the most that it had. None where Linux does not say it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith(f"{field}:")), None)


def forget_peak_memory() -> None:
    """`VmHWM` is what this process needs from now on, where Linux allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def answer(open_engine: Callable[[dict[str, Any]], tuple[str, Generate]]) -> None:
    """Read the work, measure its cells, print them, and end the process.

    Args:
        open_engine: its version, and how it generates, for the work.
    """
    work = json.load(sys.stdin)
    version, generate = open_engine(work)
    generate([[1] * 8], 2)  # what is only done once
    cells = []
    for context in work["contexts"]:
        for batch in work["batches"]:
            decode, prefill = measure_cell(generate, batch, context, work["new_tokens"], work["vocab_size"])
            cell = {"batch": batch, "context": context}
            cells.append(cell | {"decode_tokens_per_s": decode, "prefill_tokens_per_s": prefill})
    print(json.dumps({"version": version, "cells": cells}), flush=True)
    os._exit(0)  # an engine's own lines at its end would come behind
