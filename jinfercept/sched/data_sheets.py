"""Data sheets of GPUs, and the share of them that programs reach: the input of rooflines. Nothing here is measured by us."""

from typing import NamedTuple


class Link(NamedTuple):
    """Bytes per second that a host link reaches in practice."""

    one_way_bytes_per_s: float
    both_ways_bytes_per_s: float


class GPU(NamedTuple):
    """One GPU.

    Attributes:
        bf16_flops: dense bfloat16 operations per second.
        memory_bytes_per_s, memory_bytes: bandwidth and size of its memory.
        link: to the host.
        peer_bytes_per_s: one way to the other GPUs of its machine: NVLink, or PCIe where there is none.
    """

    bf16_flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    link: Link
    peer_bytes_per_s: float


PCIE_4 = Link(26e9, 40e9)  # both ways: scaled from generation 5
PCIE_5 = Link(53e9, 83e9)

GPUS: dict[str, GPU] = {
    "A100-40GB": GPU(312e12, 1.555e12, 40e9, PCIE_4, 300e9),
    "A100-80GB": GPU(312e12, 2.039e12, 80e9, PCIE_4, 300e9),
    "H100": GPU(989e12, 3.35e12, 80e9, PCIE_5, 450e9),
    "H200": GPU(989e12, 4.8e12, 141e9, PCIE_5, 450e9),
    "B200": GPU(2250e12, 8.0e12, 180e9, PCIE_5, 900e9),
    "L40S": GPU(362e12, 0.864e12, 48e9, PCIE_4, 26e9),
}
"""By name, in the form with the most bandwidth (SXM where there is one)."""

REACHED_FLOPS = 0.8
"""Share of the sheet's operations that large products reach (790 of 989 TFLOP/s on an H100)."""
REACHED_BANDWIDTH = 0.9
"""Share of the sheet's bandwidth that copies reach (3.0 of 3.35 TB/s on an H100)."""
USABLE_MEMORY = 0.9
"""Share of the memory that weights and KV may fill."""
REACHED_PEER_BANDWIDTH = 0.8
"""Share of the bandwidth between GPUs that large collectives reach: an estimate."""
COLLECTIVE_S = 10e-6
"""Seconds of a collective between the GPUs of a machine however small its operand is: an estimate."""
