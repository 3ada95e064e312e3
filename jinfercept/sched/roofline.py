"""Profiles derived from data sheets, without a measurement, and the numbers of models that this takes."""

from typing import NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sched.data_sheets import (
    ACCELERATORS,
    COLLECTIVE_S,
    NVME,
    REACHED_BANDWIDTH,
    REACHED_FLOPS,
    REACHED_PEER_BANDWIDTH,
    USABLE_MEMORY,
)
from jinfercept.sched.profile import Profile

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
