"""What the device can do at most: a copy, a matrix product, and the pinned host link."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.suite.sizes import Sizes
from benchmarks.suite.timing import timed

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
