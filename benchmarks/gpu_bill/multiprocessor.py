"""How many blocks of a kernel run at once on a multiprocessor, from the GPU's description (CUDA's occupancy rules)."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
