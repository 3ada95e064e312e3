"""What the device can do at most: copies, elementwise work, sums, a matrix product, and the pinned host link by size.

Rows: `what` (copy, elementwise, read, matmul, link), `seconds`, and `bytes_per_s` (read and written both count) or
`flops_per_s`; for the link also `way` (out, in, both), `bytes` of one array, and `arrays` that move at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_suite.sizes import Row, Sizes
from benchmarks.gpu_suite.timing import timed

MOST_AT_ONCE = 16
WAYS = {"out": 1, "in": 1, "both": 2}
"""Transfers, and how many times its bytes each moves."""


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all of them."""
    yield {"what": "copy", "bytes": sizes.copy_bytes, "bytes_per_s": copy_rate(sizes)}
    yield {"what": "elementwise", "bytes": sizes.copy_bytes, "bytes_per_s": _memory_rate(sizes, lambda x: x + 1, 2)}
    yield {"what": "read", "bytes": sizes.copy_bytes, "bytes_per_s": _memory_rate(sizes, jnp.max, 1)}
    yield {"what": "matmul", "size": sizes.matmul_size, "flops_per_s": matmul_rate(sizes)}
    for num_bytes in sizes.link_bytes:
        for arrays in (1, MOST_AT_ONCE):
            for way in WAYS:
                if num_bytes * arrays <= max(sizes.link_bytes):
                    rate = link_rate(sizes, way, num_bytes, arrays)
                    yield {"what": "link", "way": way, "bytes": num_bytes, "arrays": arrays, "bytes_per_s": rate}


def copy_rate(sizes: Sizes) -> float:
    """Bytes per second of a device-to-device copy, those read and those written together."""
    return _memory_rate(sizes, jnp.copy, 2)


def matmul_rate(sizes: Sizes) -> float:
    """Operations per second of a large square product in the suite's type."""
    size = sizes.matmul_size
    left, right = (jax.random.normal(key, (size, size), sizes.dtype) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / timed(lambda: product(left, right), sizes.enough_s).seconds


def link_rate(sizes: Sizes, way: str, num_bytes: int, arrays: int) -> float:
    """Bytes per second between the device and its pinned host memory, as pages move: `arrays` in one call.

    Args:
        way: out, in, or both at once, whose bytes count together.
        num_bytes: of one array.
    """
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    there = here.with_memory_kind("pinned_host")
    blocks = [
        jax.device_put(jax.random.bits(jax.random.key(index), (num_bytes // 4,), "uint32"), here)
        for index in range(arrays)
    ]
    hosted = jax.device_put(blocks, there)
    moves: dict[str, Callable[[], Any]] = {
        "out": lambda: jax.device_put(blocks, there),
        "in": lambda: jax.device_put(hosted, here),
        "both": lambda: (jax.device_put(blocks, there), jax.device_put(hosted, here)),
    }
    return WAYS[way] * arrays * num_bytes / timed(moves[way], sizes.enough_s).seconds


def _memory_rate(sizes: Sizes, function: Callable[[jax.Array], jax.Array], passes: int) -> float:
    block = jax.random.bits(jax.random.key(0), (sizes.copy_bytes // 4,), "uint32")
    run = jax.jit(function)
    return passes * sizes.copy_bytes / timed(lambda: run(block), sizes.enough_s).seconds
