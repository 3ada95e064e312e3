"""Device times, and what the device can do at most: a copy, a matrix product, and the pinned host link.

Many runs are queued and waited for together, several turns, and the median counts.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.suite.sizes import Sizes

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


WAYS = {"out": 1, "in": 1, "both": 2}
"""Transfers, and how many times its bytes each moves."""


def copy_rate(sizes: Sizes) -> float:
    """Bytes per second of a device-to-device copy, those read and those written together."""
    block = jax.random.bits(jax.random.key(0), (sizes.copy_bytes // 4,), "uint32")
    run = jax.jit(jnp.copy)
    return 2 * sizes.copy_bytes / timed(lambda: run(block), sizes.enough_s).seconds


def matmul_rate(sizes: Sizes) -> float:
    """Operations per second of a large square product in the suite's type."""
    size = sizes.matmul_size
    left, right = (jax.random.normal(key, (size, size), sizes.dtype) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / timed(lambda: product(left, right), sizes.enough_s).seconds


def link_rate(sizes: Sizes, way: str, num_bytes: int, arrays: int) -> float:
    """Bytes per second between the device and its pinned host memory, `arrays` in one call.

    Args:
        way: out, in, or both at once, whose bytes count together.
        num_bytes: of one array.
    """
    here, there = memories()
    blocks = random_blocks(num_bytes, arrays)
    hosted = jax.device_put(blocks, there)
    moves: dict[str, Callable[[], Any]] = {
        "out": lambda: jax.device_put(blocks, there),
        "in": lambda: jax.device_put(hosted, here),
        "both": lambda: (jax.device_put(blocks, there), jax.device_put(hosted, here)),
    }
    return WAYS[way] * arrays * num_bytes / timed(moves[way], sizes.enough_s).seconds


def memories() -> tuple[jax.sharding.Sharding, jax.sharding.Sharding]:
    """The device's memory and its pinned host memory."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    return here, here.with_memory_kind("pinned_host")


def random_blocks(num_bytes: int, arrays: int) -> list[jax.Array]:
    """So many arrays on the device."""
    here, _ = memories()
    keys = jax.random.split(jax.random.key(0), arrays)
    return [jax.device_put(jax.random.bits(key, (num_bytes // 4,), "uint32"), here) for key in keys]
