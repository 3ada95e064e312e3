"""What it costs the host to move arrays, and what waits behind a large copy.

Rows: `what`, and

* put: `way` (upload: from numpy; out, in: to and from pinned host memory), `arrays` in one call, `bytes` of each, `call_s` and
  `ready_s` of the call, and `array_us`, the host's time per array;
* behind: `before` (what was dispatched first: nothing, or a fetch of `bytes`), and of an upload of a step's numbers right after
  it `upload_s` and `kernel_s`, until it has arrived, and until a kernel that reads it has ended;
* link: `way`, `bytes` of one array and `bytes_per_s`.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks.suite.ceilings import WAYS, link_rate, memories, random_blocks
from benchmarks.suite.sizes import Row, Sizes

TURNS = 9
NUMBERS = 4096
"""Of a step's upload."""


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure puts, what is behind a fetch, and the link."""
    here, there = memories()
    for arrays in sizes.upload_arrays:
        blocks = random_blocks(sizes.upload_bytes, arrays)
        hosted, read = jax.device_put(blocks, there), list(map(np.asarray, blocks))
        moves: dict[str, Callable[[], Any]] = {
            "upload": lambda read=read: jax.device_put(read, here),
            "out": lambda blocks=blocks: jax.device_put(blocks, there),
            "in": lambda hosted=hosted: jax.device_put(hosted, here),
        }
        for way, move in moves.items():
            call_s, ready_s = _put(move)
            common = {"what": "put", "way": way, "arrays": arrays, "bytes": sizes.upload_bytes}
            yield common | {"call_s": call_s, "ready_s": ready_s, "array_us": 1e6 * call_s / arrays}
    yield from _behind(sizes)
    for way in WAYS:
        rate = link_rate(sizes, way, sizes.link_bytes, 1)
        yield {"what": "link", "way": way, "bytes": sizes.link_bytes, "bytes_per_s": rate}


def _put(move: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of a call, and until all of it has arrived."""
    jax.block_until_ready(move())
    calls, readies = list[float](), list[float]()
    for _ in range(TURNS):
        began_s = time.perf_counter()
        moving = move()
        calls.append(time.perf_counter() - began_s)
        jax.block_until_ready(moving)
        readies.append(time.perf_counter() - began_s)
    return median(calls), median(readies)


def _behind(sizes: Sizes) -> Iterator[Row]:
    here, there = memories()
    [hosted] = jax.device_put(random_blocks(sizes.behind_bytes, 1), there)
    read = jax.jit(lambda numbers: numbers + 1)
    jax.block_until_ready(read(jax.device_put(np.zeros(NUMBERS, np.int32), here)))
    for before in ("nothing", "fetch"):
        uploads, kernels = list[float](), list[float]()
        for turn in range(TURNS):
            moving = jax.device_put(hosted, here) if before == "fetch" else ()
            began_s = time.perf_counter()
            numbers = jax.device_put(np.full(NUMBERS, turn, np.int32), here)
            result = read(numbers)
            jax.block_until_ready(numbers)
            uploads.append(time.perf_counter() - began_s)
            jax.block_until_ready(result)
            kernels.append(time.perf_counter() - began_s)
            jax.block_until_ready(moving)
        row = {"what": "behind", "before": before, "bytes": sizes.behind_bytes if before == "fetch" else 0}
        yield row | {"upload_s": median(uploads), "kernel_s": median(kernels)}
