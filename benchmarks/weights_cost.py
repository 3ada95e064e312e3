"""`python -m benchmarks weights MODEL`: seconds and memory of an update of the weights, and whether memory grows.

Memory is what an update needs beside the weights that serve and the arrays of the caller: by `jax.live_arrays`, asked all the
time by another thread, and by the resident memory of the process.
"""

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from benchmarks.peers.peer_script import forget_peak_memory, memory_gib
from jinfercept.llm import LLM
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import locate
from jinfercept.models.model import untied
from jinfercept.models.protocol import Params
from jinfercept.serve.process import trim_heap
from jinfercept.sim.reports import TextTable

_WARM, _TIMED, _SHOWN = 3, 5, 5
GIB = 2**30


class Cost(NamedTuple):
    """Of updates from one source. Memory is in multiples of the weights, these included.

    Attributes:
        live: bytes of arrays at most; None where the arrays are the host's and come all at once.
        resident: memory of the process at most, without what it had before beside the weights.
    """

    source: str
    seconds: float
    live: float
    resident: float | None


class Growth(NamedTuple):
    """GiB after so many updates."""

    updates: int
    live: float
    resident: float | None
    trimmed: float | None


def measure(model: str, updates: int, options: Mapping[str, Any]) -> tuple[list[Cost], list[Growth]]:
    """The costs and the growth, printed as tables too."""
    flags = {"quantization": "none", "tool_lora": "", **options}
    with LLM(model, **flags) as llm:  # pyright: ignore[reportArgumentType]
        costs = list(_costs(llm, locate(model)))
        growth = list(_growth(llm, updates))
        weight_bytes = llm.memory_plan.weight_bytes
    rows = [
        (
            cost.source,
            f"{cost.seconds:.3f}",
            f"{cost.live:.3f}",
            "" if cost.resident is None else f"{cost.resident:.3f}",
        )
        for cost in costs
    ]
    title = f"{weight_bytes / GIB:.3f} GiB of weights; peaks are multiples of them"
    console = Console()
    console.print(TextTable(title, ("weights come as", "seconds", "arrays, peak", "process, peak"), rows).shown())
    columns = ("updates", "arrays, GiB", "process, GiB", "with its heap trimmed")
    later = [(str(step.updates), *(f"{value or 0:.3f}" for value in step[1:])) for step in growth]
    console.print(TextTable("after many, from arrays of the device", columns, later).shown())
    return costs, growth


def _given(llm: LLM) -> Params:
    whole = untied(llm.model.config, separate(llm.params))  # pyright: ignore[reportArgumentType]
    return Params(*jax.tree.map(np.array, whole))


def _costs(llm: LLM, source: Path) -> Iterator[Cost]:
    params = _given(llm)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    on_device = jax.device_put(params)
    sources: dict[str, Callable[[], object]] = {
        "arrays of the device": lambda: llm.update_weights(on_device, mode="keep"),
        "arrays of numpy": lambda: llm.update_weights(params, mode="keep"),
        "a layer of them": lambda: llm.update_weights(on_device, mode="keep", only="layers.0."),
        "a checkpoint": lambda: llm.update_weights(source, mode="keep"),
    }
    for name, update in sources.items():
        for _ in range(_WARM):
            update()
        seconds, lives, residents = list[float](), list[float](), list[float]()
        for _ in range(_TIMED):
            gc.collect()
            trim_heap()
            forget_peak_memory()
            rest, before = live_bytes(), memory_gib("VmRSS")
            began_s = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - began_s)
            if before is not None:
                peak = memory_gib("VmHWM") or before
                residents.append(1 + max(0.0, peak - before) * GIB / weight_bytes)
            with watched() as peaks:
                update()
            lives.append(1 + (max(peaks, default=rest) - rest) / weight_bytes)
        yield Cost(name, statistics.median(seconds), max(lives), min(residents, default=None))


def _growth(llm: LLM, updates: int) -> Iterator[Growth]:
    """What the process has after parts of all updates from arrays of the device."""
    params = jax.device_put(_given(llm))
    done = 0
    for part in range(1, _SHOWN + 1):
        while done < updates * part // _SHOWN:
            llm.update_weights(params, mode="keep")
            done += 1
        gc.collect()
        resident = memory_gib("VmRSS")
        trim_heap()
        yield Growth(done, live_bytes() / GIB, resident, memory_gib("VmRSS"))


def live_bytes() -> int:
    """Bytes of all arrays that exist, each memory once."""
    sizes = dict[int, int]()
    for array in jax.live_arrays():
        if not array.is_deleted():
            try:
                for shard in array.addressable_shards:
                    sizes[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
            except RuntimeError:  # deleted since
                continue
    return sum(sizes.values())


@contextmanager
def watched() -> Iterator[list[int]]:
    """The bytes of all arrays, time and again."""
    peaks, ended = list[int](), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peaks.append(live_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        ended.set()
        watcher.join()
