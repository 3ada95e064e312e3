"""The profiles that have a name: the constants of the paper's authors, and rooflines, derived from data sheets of accelerators
and drives and from the numbers of models. Nothing is measured here.

GPUs: NVIDIA's data sheets, dense operations. TPUs: Google Cloud's page of each generation (docs.cloud.google.com/tpu/docs/v4,
v5e, v5p, v6e and tpu7x). Disk: Samsung's data sheet of the PM9A3 (NVMe, PCIe 4, 3.84 TB).
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sched.profile import Profile


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


COLLECTIVES_PER_LAYER = 2
"""Sums over the devices that share a layer: of attention's results and of the feed-forward network's."""


class ProfiledExperts(NamedTuple):
    """The experts of a model."""

    params: float  # weights of all experts in all layers
    num_experts: int  # of a layer
    per_token: int  # experts of a layer that compute a token


class ProfiledModel(NamedTuple):
    """The numbers of a model that a roofline needs."""

    name: str
    params: float  # number of weights
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    bytes_per_number: int = 2  # of weights and KV alike; 2 is bfloat16
    experts: ProfiledExperts | None = None

    @property
    def active_params(self) -> float:
        return self.read_params(1)

    def read_params(self, num_tokens: int) -> float:
        """Weights that a step reads; of the experts those in use, see `experts_in_use`."""
        if (experts := self.experts) is None:
            return self.params
        used = experts_in_use(experts.num_experts, experts.per_token, num_tokens)
        return self.params - experts.params * (1 - used / experts.num_experts)

    def kv_bytes_per_token(self, num_devices: int = 1) -> int:
        """Keys and values of one token over all layers and devices. Each device has at least one KV head, if need be a copy."""
        num_heads = max(self.num_kv_heads, num_devices)
        return 2 * self.num_layers * num_heads * self.head_dim * self.bytes_per_number


LLAMA_13B = ProfiledModel("llama-13b", 13.016e9, num_layers=40, num_kv_heads=40, head_dim=128, hidden_size=5120)
LLAMA_2_7B = ProfiledModel("llama-2-7b", 6.738e9, num_layers=32, num_kv_heads=32, head_dim=128, hidden_size=4096)
LLAMA_3_8B = ProfiledModel("llama-3-8b", 8.03e9, num_layers=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
LLAMA_3_70B = ProfiledModel("llama-3-70b", 70.554e9, num_layers=80, num_kv_heads=8, head_dim=128, hidden_size=8192)
QWEN_32B = ProfiledModel("qwen2.5-32b", 32.76e9, num_layers=64, num_kv_heads=8, head_dim=128, hidden_size=5120)
QWEN_32B_FP8 = QWEN_32B._replace(name="qwen2.5-32b-fp8", bytes_per_number=1)


def experts_in_use(count: int, per_token: int, num_tokens: int) -> float:
    """The expected number of a layer's experts that compute a token of a step: `count · (1 − (1 − k / count)^n)`.

    By linearity of expectation, where every token chooses `k = per_token` different experts, all sets equally likely and
    independent of the other tokens': a token leaves an expert out with the probability `1 − k / count` (the classical
    occupancy problem; Feller, An Introduction to Probability Theory and Its Applications I, chapter IV). Uneven choices use
    fewer.
    """
    return count * (1 - (1 - per_token / count) ** num_tokens)


def roofline(model: ProfiledModel, accelerator: str, num_devices: int = 1, *, attention: bool = False) -> Profile:
    """A profile derived from a model's size and a data sheet, without a measurement.

    A step takes the time to read all weights (`flat_s`), or that of two operations per weight and query token, whichever is
    longer. It also reads the KV of its contexts. With `attention`, recomputing a context also takes four operations per pair
    of tokens, layer and number of the hidden size; without, its time is linear in the context's length.

    A model with experts reads those in use, and some of them compute a token: the price has buckets then, powers of two.
    Several accelerators hold equal shares of weights and KV, have a host link each, and add up the parts of every layer twice
    (arXiv 1909.08053), in rings, behind nothing.

    Raises:
        ConfigError: an unknown accelerator, or weights that do not fit.
    """
    if accelerator not in ACCELERATORS:
        fix = f"one of {', '.join(ACCELERATORS)}"
        raise ConfigError("no such accelerator in the table", got=accelerator, fix=fix)
    sheet, token_bytes = ACCELERATORS[accelerator], model.kv_bytes_per_token(num_devices)
    weight_bytes = model.params * model.bytes_per_number
    kv_bytes = sheet.memory_bytes * USABLE_MEMORY * num_devices - weight_bytes
    if kv_bytes < token_bytes:
        raise ConfigError(
            f"the weights of {model.name} do not fit",
            got=f"{weight_bytes / 1e9:.0f} GB on {num_devices} × {accelerator}",
            fix="take more accelerators or larger ones",
        )
    bandwidth = sheet.memory_bytes_per_s * REACHED_BANDWIDTH * num_devices
    flops = sheet.bf16_flops * REACHED_FLOPS * num_devices
    per_query_s = 2 * model.active_params / flops

    def read_s(num_tokens: int) -> float:
        return model.read_params(num_tokens) * model.bytes_per_number / bandwidth

    saturation = max(8, round(weight_bytes / bandwidth / per_query_s / 8) * 8)
    sizes = () if model.experts is None else tuple(1 << power for power in range((2 * saturation).bit_length()))
    collectives = COLLECTIVES_PER_LAYER * model.num_layers if num_devices > 1 else 0
    exchanged_bytes = collectives * 2 * (num_devices - 1) / num_devices * model.hidden_size * model.bytes_per_number
    one_way = sheet.link.one_way_bytes_per_s * num_devices / token_bytes
    return Profile(
        name=f"roofline-{model.name}-{f'{num_devices}x' if num_devices > 1 else ''}{accelerator.lower()}",
        source="roofline",
        fixed_s=collectives * COLLECTIVE_S,
        per_query_s=per_query_s,
        per_context_s=token_bytes / bandwidth,
        per_pair_s=4 * model.num_layers * model.hidden_size / flops if attention else 0.0,
        flat_s=read_s(1) + collectives * COLLECTIVE_S,
        collective_s=exchanged_bytes / (sheet.peer_bytes_per_s * REACHED_PEER_BANDWIDTH),
        saturation=saturation,
        link_out_tokens_per_s=one_way,
        link_in_tokens_per_s=one_way,
        link_both_tokens_per_s=sheet.link.both_ways_bytes_per_s * num_devices / token_bytes,
        kv_bytes_per_token=token_bytes,
        disk_read_tokens_per_s=NVME.read_bytes_per_s / token_bytes,
        disk_write_tokens_per_s=NVME.write_bytes_per_s / token_bytes,
        disk_latency_s=NVME.latency_s,
        bucket_tokens=sizes,
        bucket_s=tuple(max(read_s(size), per_query_s * size) + collectives * COLLECTIVE_S for size in sizes),
        tables={
            "derived": {
                "accelerator": accelerator,
                "num_devices": num_devices,
                "kv_tokens": int(kv_bytes // token_bytes),
            }
        },
    )


def _paper(name: str, per_query_s: float, fixed_s: float, budget: float, kv_bytes_per_token: int) -> Profile:
    # the constants of the InferCept authors' code, in which reading context is free, S is 384, and `budget` is the number of
    # tokens that the link moves in a saturated iteration, both directions together
    link = budget / (fixed_s + per_query_s * 384)
    return Profile(
        name=name,
        source="paper",
        fixed_s=fixed_s,
        per_query_s=per_query_s,
        per_context_s=0.0,
        saturation=384,
        link_out_tokens_per_s=link,
        link_in_tokens_per_s=link,
        link_both_tokens_per_s=link,
        kv_bytes_per_token=kv_bytes_per_token,
    )


def _with_attention(paper: Profile, *, num_layers: int, hidden_size: int, num_gpus: int) -> Profile:
    # the authors' constants lack the cost of reading contexts: it comes from the data sheet of their accelerator
    sheet = ACCELERATORS["A100-40GB"]
    return replace(
        paper,
        name=f"{paper.name}-attention",
        per_context_s=paper.kv_bytes_per_token / (sheet.memory_bytes_per_s * REACHED_BANDWIDTH * num_gpus),
        per_pair_s=4 * num_layers * hidden_size / (sheet.bf16_flops * REACHED_FLOPS * num_gpus),
    )


GPTJ_6B = _paper("paper-gptj-6b-a100", 0.0463e-3, 10.0e-3, 605.5, 448 * 1024)
VICUNA_13B = _paper("paper-vicuna-13b-2xa100", 0.0279e-3, 15.4e-3, 318.8, 800 * 1024)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        GPTJ_6B,
        VICUNA_13B,
        _with_attention(GPTJ_6B, num_layers=28, hidden_size=4096, num_gpus=1),
        _with_attention(VICUNA_13B, num_layers=40, hidden_size=5120, num_gpus=2),
        replace(roofline(LLAMA_13B, "A100-80GB"), name="roofline-llama-13b-a100"),
        replace(roofline(LLAMA_13B, "A100-80GB", 2), name="roofline-llama-13b-2xa100"),
        replace(roofline(LLAMA_3_70B, "A100-80GB", 4), name="roofline-llama-3-70b-4xa100"),
        replace(roofline(LLAMA_3_70B, "A100-80GB", 8), name="roofline-llama-3-70b-8xa100"),
        roofline(LLAMA_3_70B, "H100", 4),
        replace(roofline(LLAMA_3_8B, "H100", attention=True), name="roofline-llama-3-8b-h100-attention"),
        replace(roofline(LLAMA_3_8B, "H200", attention=True), name="roofline-llama-3-8b-h200-attention"),
        replace(roofline(LLAMA_3_70B, "A100-80GB", 8, attention=True), name="roofline-llama-3-70b-8xa100-attention"),
        replace(roofline(QWEN_32B_FP8, "H100", attention=True), name="roofline-qwen2.5-32b-fp8-h100-attention"),
        replace(roofline(LLAMA_2_7B, "A100-40GB", attention=True), name="roofline-yarn-llama-2-7b-64k-a100-40gb"),
    )
}
"""By name."""


def load_profile(name_or_path: str | Path) -> Profile:
    """A named profile (`PROFILES`), or one from a JSON file. Raises `ConfigError` if there is neither."""
    if isinstance(name_or_path, str) and name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):  # the name or the text is not Unicode
        raise ConfigError(
            "no such profile", got=name_or_path, fix=f"a JSON file, or one of {', '.join(PROFILES)}"
        ) from None
    return Profile.from_json(text, str(name_or_path))
