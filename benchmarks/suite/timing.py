"""Device times: many runs are queued and waited for together, several turns, and the median counts."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax

TURNS = 5
MOST_RUNS = 1000


class RunTiming(NamedTuple):
    """Seconds of one run: the median turn, which counts, and the extremes; how many runs a turn had."""

    seconds: float
    fastest_s: float
    slowest_s: float
    runs: int


def timed(run: Callable[[], Any], enough_s: float) -> RunTiming:
    """Time what a function dispatches; it returns what has to be waited for.

    Its inputs lie on the device already: an upload that it does not ask for by `device_put` raises an error.

    Args:
        run: dispatches and does not wait; each call may use other inputs.
        enough_s: seconds that a turn should take.
    """
    jax.block_until_ready(run())  # compiles
    with jax.transfer_guard_host_to_device("disallow"):
        once_s = _turn(run, 1)
        count = max(1, min(MOST_RUNS, round(enough_s / once_s)))
        turns = [_turn(run, count) for _ in range(TURNS)]
    return RunTiming(median(turns), min(turns), max(turns), count)


def _turn(run: Callable[[], Any], count: int) -> float:
    started_s = time.perf_counter()
    for _ in range(count - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - started_s) / count
