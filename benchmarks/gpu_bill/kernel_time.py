"""Predicts the seconds of a launch from what was compiled: its bytes, its parallel loads, its products and its atomics.

A launch takes as long as the slowest of these: its bytes at a part of the rate of copies, which for a product depends on its
shape; its bytes at the rate that the loads in flight of its threads allow (few blocks or narrow loads cannot fill the memory's
latency); its products; its compare-and-swap loops. How many blocks run at once on a multiprocessor follows from the GPU's
description (CUDA's occupancy rules).
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.gpu_bill.assumptions import Assumptions
from benchmarks.gpu_bill.machine_code import Kernel
from benchmarks.gpu_bill.program import COLLECTIVES, MATRIX_LIBRARIES
from benchmarks.gpu_bill.reading import Launch
from jinfercept.pallas.work_schedule import WorkCut, split_contexts

TARGETS = Path(__file__).parents[1] / "ahead_of_time" / "targets"
WARP = 32
MOST_BLOCKS = 32
REGISTER_GRAIN = 256
"""Registers are given to a warp in multiples of these."""
SYSTEM_SHARED_BYTES = 1024
"""Shared memory that every block has for the system."""


@dataclass(frozen=True)
class Multiprocessor:
    """The limits of a GPU's multiprocessors, and how many there are."""

    count: int
    threads: int
    registers: int
    shared_bytes: int

    def blocks(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Blocks of a kernel that run at once.

        Args:
            threads: of a block.
            registers: of a thread.
            shared_bytes: of a block.
        """
        warps = -(-threads // WARP)
        grains = -(-registers * WARP // REGISTER_GRAIN) * REGISTER_GRAIN
        return min(
            MOST_BLOCKS,
            self.threads // (warps * WARP),
            self.registers // (grains * warps) if registers else MOST_BLOCKS,
            self.shared_bytes // (shared_bytes + SYSTEM_SHARED_BYTES),
        )


@cache
def multiprocessor(gpu: str) -> Multiprocessor:
    """Those of a GPU with a description in `ahead_of_time/targets`."""
    text = (TARGETS / f"{gpu}.txtpb").read_text()
    fields = {name: int(value) for name, value in re.findall(r"(\w+): (\d+)$", text, re.MULTILINE)}
    return Multiprocessor(
        fields["core_count"],
        fields["threads_per_core_limit"],
        fields["registers_per_core_limit"],
        fields["shared_memory_per_core"],
    )


NUMBER_BYTES = 2
"""Of weights and KV."""


class AttentionWork(NamedTuple):
    """The attention of a step in one layer.

    Attributes:
        rows: sequences that decode.
        context: tokens of each.
        chunk: tokens of a chunk beside them, before which there are none.
        kv_heads: of the model.
        kv_bytes: keys and values of all these rows.
        tile_tokens: context tokens per turn of the decode kernel.
        pair_flops: operations for a query token and a token of its context.
    """

    rows: int
    context: int
    chunk: int
    kv_heads: int
    kv_bytes: int
    tile_tokens: int
    pair_flops: int

    def blocks(self, slots: int) -> int:
        """Blocks with work, as the kernel's own schedule cuts the contexts for so many that run at once."""
        cut = WorkCut(self.kv_heads, slots, self.tile_tokens, chunk_queries=1)
        return self.kv_heads * int(split_contexts(np.full(self.rows, self.context), cut).row_units[-1])


class Device(NamedTuple):
    """A GPU: its multiprocessors, what is assumed of it, and how many of them share a model."""

    processors: Multiprocessor
    assumed: Assumptions
    num_gpus: int = 1

    def blocks(self, launch: Launch, kernel: Kernel) -> int:
        """Blocks of a kernel that run at once on one multiprocessor."""
        shared = launch.thunk.shared_bytes + kernel.shared_bytes
        return self.processors.blocks(launch.thunk.threads, kernel.registers, shared)

    def seconds(self, launch: Launch, kernel: Kernel | None, rows: int) -> float:
        """The time of a launch that is no attention, without the gap before it; `rows` of its products."""
        assumed, traffic = self.assumed, launch.traffic
        if launch.thunk.kind in COLLECTIVES:  # in a ring every GPU sends each part once, and the sums once more
            rounds = 2 if launch.thunk.kind == "kAllReduce" else 1
            sent = rounds * traffic.made * (self.num_gpus - 1) / self.num_gpus
            return assumed.collective_latency + sent / assumed.peer_rate
        moved = traffic.read + traffic.made
        bounds = [assumed.shortest_kernel, moved / (assumed.copy_rate * self.reach(launch, rows))]
        flops = traffic.weight * rows * traffic.row_share * 2 / NUMBER_BYTES
        if launch.thunk.kind in MATRIX_LIBRARIES or (kernel is not None and kernel.has_products):
            bounds.append(flops / (assumed.tensor_rate * assumed.tensor_reach))
        else:
            bounds.append(flops / assumed.plain_rate)
        if kernel is not None:
            bounds.append(self._latency_bound_s(launch, kernel))
            if kernel.sass and kernel.sass["compare_and_swaps"]:
                numbers = traffic.made / NUMBER_BYTES
                bounds.append(assumed.shortest_kernel + numbers * assumed.cas_attempts / assumed.cas_rate)
        return max(bounds)

    def reach(self, launch: Launch, rows: int) -> float:
        """The part of the rate of copies that a launch reaches at most: products by their shape."""
        weight = launch.traffic.weight
        return self.assumed.product_reach(weight, rows) if weight else self.assumed.others_reach

    def empty_blocks_s(self, launch: Launch, kernel: Kernel, work: AttentionWork) -> float:
        """The time that blocks of a decode kernel take which find no work."""
        slots = self._slots(launch, kernel)
        empty = max(0, launch.thunk.blocks - work.blocks(slots))
        return empty / slots * self.assumed.empty_block

    def attention_s(self, launch: Launch, kernel: Kernel, work: AttentionWork) -> float:
        """The time of a layer's decode attention, without the gap before it."""
        assumed = self.assumed
        slots = self._slots(launch, kernel)
        blocks = min(launch.thunk.blocks, work.blocks(slots))
        reach, sass = assumed.attention_reach, kernel.sass or {}
        if not (sass.get("tensor_instructions") and sass.get("wide_loads")):
            reach *= assumed.attention_without_wide_loads
        shared = launch.thunk.shared_bytes + kernel.shared_bytes
        filling = (shared * assumed.asynchronous_share / assumed.memory_latency) or math.inf  # of one block
        waves, tail = divmod(blocks, slots)
        rounds = [slots] * waves + [tail] * bool(tail)
        rates = [min(assumed.copy_rate * reach, at_once * filling) for at_once in rounds]
        took = sum(at_once / blocks / rate for at_once, rate in zip(rounds, rates, strict=True))
        return max(assumed.shortest_kernel, work.kv_bytes * took)

    def chunk_attention_s(self, work: AttentionWork) -> float:
        """The time of a layer's attention for the chunk: its tiles of queries run at once, so that the last tile, whose context
        is the whole chunk, decides."""
        assumed = self.assumed
        flops = work.chunk * work.chunk * work.pair_flops
        return max(assumed.shortest_kernel, flops / (assumed.tensor_rate * assumed.chunk_reach))

    def _slots(self, launch: Launch, kernel: Kernel) -> int:
        """Blocks of a kernel that run at once on the GPU."""
        return max(1, self.blocks(launch, kernel)) * self.processors.count

    def _latency_bound_s(self, launch: Launch, kernel: Kernel) -> float:
        """Arguments come from memory, and what the executable has made before from the cache."""
        assumed = self.assumed
        if not kernel.loads:
            return 0.0
        at_once = min(launch.thunk.blocks, self._slots(launch, kernel))
        in_flight = at_once * launch.thunk.threads * kernel.load_bytes * min(kernel.loads, assumed.loads_in_flight)
        arguments = min(launch.traffic.read, sum(size for _, size in launch.traffic.arguments))
        cached = launch.traffic.read - arguments
        return (arguments * assumed.memory_latency + cached * assumed.cache_latency) / in_flight
