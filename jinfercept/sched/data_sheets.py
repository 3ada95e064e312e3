"""Data sheets of accelerators and drives, and the share of them that programs reach: the input of rooflines. Nothing is
measured here.

GPUs: NVIDIA's data sheets, dense operations. TPUs: Google Cloud's page of each generation (docs.cloud.google.com/tpu/docs/v4,
v5e, v5p, v6e and tpu7x). Disk: Samsung's data sheet of the PM9A3 (NVMe, PCIe 4, 3.84 TB).
"""

from typing import NamedTuple


class Link(NamedTuple):
    """Bytes per second that a host link reaches in practice."""

    one_way_bytes_per_s: float
    both_ways_bytes_per_s: float


class Accelerator(NamedTuple):
    """One GPU, or one chip of a TPU."""

    bf16_flops: float  # dense operations per second; of float16 on a T4, which has no bfloat16
    memory_bytes_per_s: float
    memory_bytes: float
    link: Link  # to the host
    # one way to the other accelerators of its machine: NVLink, a TPU's interconnect, or PCIe where there is neither
    peer_bytes_per_s: float


PCIE_3 = Link(13e9, 20e9)  # scaled from generation 4
PCIE_4 = Link(26e9, 40e9)  # both ways: scaled from generation 5
PCIE_5 = Link(53e9, 83e9)
PCIE_5_X8 = Link(26.5e9, 41.5e9)


class Drive(NamedTuple):
    """A disk of the host. Rates are those of large transfers, and the latency is the time until a read begins."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float


NVME = Drive(6.9e9, 4.1e9, 100e-6)
"""The drive of every roofline."""

ACCELERATORS: dict[str, Accelerator] = {
    "A100-40GB": Accelerator(312e12, 1.555e12, 40e9, PCIE_4, 300e9),
    "A100-80GB": Accelerator(312e12, 2.039e12, 80e9, PCIE_4, 300e9),
    "H100": Accelerator(989e12, 3.35e12, 80e9, PCIE_5, 450e9),
    "H200": Accelerator(989e12, 4.8e12, 141e9, PCIE_5, 450e9),
    "B200": Accelerator(2250e12, 8.0e12, 180e9, PCIE_5, 900e9),
    "L40S": Accelerator(362e12, 0.864e12, 48e9, PCIE_4, 26e9),
    "A40": Accelerator(149.7e12, 0.696e12, 48e9, PCIE_4, 56.25e9),
    "T4": Accelerator(65e12, 0.320e12, 16e9, PCIE_3, 13e9),
    "TPU-v4": Accelerator(
        275e12, 1.228e12, 32e9, PCIE_3, 300e9
    ),  # the host links of v4, v5p and 7x are assumptions too
    "TPU-v5p": Accelerator(459e12, 2.765e12, 95e9, PCIE_4, 600e9),
    "TPU7x": Accelerator(2307e12, 7.38e12, 192e9, PCIE_5, 600e9),
    "TPU-v5e": Accelerator(
        197e12, 0.819e12, 16e9, PCIE_3, 200e9
    ),  # its page says nothing of the host link: an assumption
    "TPU-v6e": Accelerator(
        918e12, 1.638e12, 32e9, PCIE_5_X8, 400e9
    ),  # the page says PCIe 5; eight lanes are an assumption
}
"""By name, in the form with the most bandwidth (SXM where there is one)."""

REACHED_FLOPS = 0.8
"""Share of the sheet's operations that large products reach (790 of 989 TFLOP/s on an H100)."""
REACHED_BANDWIDTH = 0.9
"""Share of the sheet's bandwidth that copies reach (3.0 of 3.35 TB/s on an H100)."""
USABLE_MEMORY = 0.9
"""Share of the memory that weights and KV may fill."""
REACHED_PEER_BANDWIDTH = 0.8
"""Share of the bandwidth between accelerators that large collectives reach: an estimate."""
COLLECTIVE_S = 10e-6
"""Seconds of a collective between the accelerators of a machine however small its operand is: an estimate."""
