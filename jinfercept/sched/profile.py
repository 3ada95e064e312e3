"""Prices of steps and transfers for one machine and model: a `Profile`, from a file, by name, or from data sheets.

Profiles are JSON files with a version. The paper's constants and a few roofline estimates have names. `startup.profiler`
measures a profile.
"""

import json
import math
import reprlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

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
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.profile_fields import Source, check_field
from jinfercept.sched.tiled_price import TiledPrice

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A `CostModel`: `step_s = max(flat_s, fixed_s + per_query_s · query tokens) + collective_s · query tokens
    + per_context_s · context tokens`.

    With buckets, the price of a step without contexts is that of the executable that runs it, instead of the line.
    Raises `ConfigError` for numbers that no machine can have.

    Attributes:
        name: of the model and the machine.
        source: "paper" (the InferCept authors' constants), "roofline" (derived from data sheets) or "measured".
        fixed_s: seconds of a step without tokens; below 0 only as the intercept of a line that starts at `flat_s`.
        per_query_s: seconds per query token.
        per_context_s: seconds per context token that the step's rows read.
        flat_s: least seconds of a step (reading the weights); 0 if there is no such floor.
        saturation: S, query tokens after which a step takes longer.
        link_out_tokens_per_s: KV tokens per second from the device to the host, alone on the link.
        link_in_tokens_per_s: the same from the host to the device.
        link_both_tokens_per_s: both directions together when both are busy.
        kv_bytes_per_token: over all layers and devices.
        collective_s: seconds per query token in which devices exchange their sums; 0 on one device and in measurements, whose
            other numbers have them.
        dispatch_s: seconds of host work to dispatch a step; already part of a measured step's seconds.
        per_pair_s: seconds per pair of a query token and a token that it attends to, for `plan_s`: the pairs within a chunk are
            in the buckets of measured profiles and count in the others.
        copy_s: c0 of `T_swap = copies · (c0 + bytes / bandwidth)`: seconds of a copy over the link beside those of its bytes.
        copy_tokens: tokens of KV that a copy carries at most, below 1 where several copies carry a token; 0: one copy carries
            all that a step moves one way.
        disk_read_tokens_per_s, disk_write_tokens_per_s: KV tokens per second from the disk tier to the host and back; 0: there
            is no such tier.
        disk_latency_s: seconds until the first of them is read.
        bucket_tokens: query tokens of the executables, ascending; empty: the line gives the price of a step of any size.
        bucket_s: seconds of each executable, full, without its contexts.
        draft_share: seconds of a draft model's step, by those of a whole step for as many rows, which has one in it; 0:
            there is no draft model, or its steps take no time.
        tiled: price of plans where attention works in tiles, instead of the sum of contexts; None: it was not measured.
        tables: measurements and derivations behind the numbers: any JSON values.
    """

    name: str
    source: Source
    fixed_s: float
    per_query_s: float
    per_context_s: float
    saturation: int
    link_out_tokens_per_s: float
    link_in_tokens_per_s: float
    link_both_tokens_per_s: float
    kv_bytes_per_token: int
    flat_s: float = 0.0
    collective_s: float = 0.0
    dispatch_s: float = 0.0
    per_pair_s: float = 0.0
    copy_s: float = 0.0
    copy_tokens: float = 0.0
    disk_read_tokens_per_s: float = 0.0
    disk_write_tokens_per_s: float = 0.0
    disk_latency_s: float = 0.0
    bucket_tokens: tuple[int, ...] = ()
    bucket_s: tuple[float, ...] = ()
    draft_share: float = 0.0
    tiled: TiledPrice | None = None
    tables: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            check_field(f.name, f.type, getattr(self, f.name))
        if self.fixed_s < 0 and self.flat_s == 0:
            raise ConfigError(
                "a profile's fixed_s is negative and no flat_s holds it up",
                got=self.fixed_s,
                fix="give at least 0, or a flat_s",
            )
        if len(self.bucket_tokens) != len(self.bucket_s):
            raise ConfigError(
                "a profile's buckets and their times are not as many",
                got=f"{len(self.bucket_tokens)} and {len(self.bucket_s)}",
                fix="give one time for each bucket",
            )

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        """Seconds of a step with so many query tokens whose rows read so many context tokens.

        With buckets: the price of the one that runs so many query tokens. More than the largest holds take several steps.
        """
        sizes = self.bucket_tokens
        if not sizes:
            seconds = max(self.flat_s, self.fixed_s + self.per_query_s * query_tokens)
        elif query_tokens <= sizes[-1]:
            seconds = self.bucket_s[bisect_left(sizes, query_tokens)]
        else:
            seconds = self.bucket_s[-1] * query_tokens / sizes[-1]
        return seconds + self.collective_s * query_tokens + self.per_context_s * context_tokens

    def plan_s(self, plan: StepPlan) -> float:
        """Seconds of a plan's compute: `step_s`, and the attention of chunks; or the tiled price. A draft model's steps too."""
        drafting_s = self._drafting_s(plan) if self.draft_share else 0.0
        if self.tiled is not None:
            return self.tiled.plan_s(plan) + drafting_s
        context_tokens, pairs = 0, 0.0
        for chunk in plan.chunks:
            num_tokens = len(chunk.tokens)
            context_tokens += chunk.start + num_tokens
            if num_tokens > 1:
                pairs += self._chunk_pairs(chunk.start, num_tokens)
        return self.step_s(plan.num_tokens, context_tokens) + self.per_pair_s * pairs + drafting_s

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """T_recompute: seconds of the steps that recompute a context and nothing else: `a · N + b · N² + k · chunks`.

        Args:
            num_tokens: N, recomputed from the first token on.
            chunk_tokens: most of them in one step, at least 1.
        """
        if self.tiled is not None:
            return self.tiled.recompute_s(num_tokens, chunk_tokens)
        full, rest = divmod(num_tokens, chunk_tokens)
        seconds = full * self.step_s(chunk_tokens, 0) + (self.step_s(rest, 0) if rest else 0.0)
        read = chunk_tokens * full * (full + 1) // 2 + (num_tokens if rest else 0)
        before = chunk_tokens**2 * full * (full - 1) // 2 + chunk_tokens * full * rest
        within = full * self._chunk_pairs(0, chunk_tokens) + self._chunk_pairs(0, rest)
        return seconds + self.per_context_s * read + self.per_pair_s * (before + within)

    def link_tokens(self, seconds: float) -> int:
        """Tokens that the link moves in so many seconds, whichever way they go: its rate in the worse direction."""
        rate = min(self.link_out_tokens_per_s, self.link_in_tokens_per_s, self.link_both_tokens_per_s)
        if not self.copy_s:
            return int(rate * seconds)
        if not self.copy_tokens:
            return max(0, int(rate * (seconds - self.copy_s)))
        return int(rate * seconds / (1.0 + self.copy_s * rate / self.copy_tokens))

    def swap_s(self, num_tokens: int) -> float:
        """T_swap: seconds to move the KV of so many tokens one way, behind nothing, in copies as large as they get."""
        if not num_tokens:
            return 0.0
        rate = min(self.link_out_tokens_per_s, self.link_in_tokens_per_s, self.link_both_tokens_per_s)
        return num_tokens / rate + self.copies_s(num_tokens) if rate else math.inf

    def disk_s(self, num_tokens: int) -> float:
        """T_disk: seconds to read the KV of so many tokens from the disk tier into the host's memory, behind nothing."""
        if not self.disk_read_tokens_per_s:
            return math.inf
        return self.disk_latency_s + num_tokens / self.disk_read_tokens_per_s

    def copies_s(self, num_tokens: int) -> float:
        """The part of `swap_s` that grows with the number of copies and not with their bytes: `copies · c0`."""
        if not num_tokens or not self.copy_s:
            return 0.0
        return self.copy_s * (math.ceil(num_tokens / self.copy_tokens) if self.copy_tokens else 1)

    def _drafting_s(self, plan: StepPlan) -> float:
        """Seconds of the draft model's steps after the first, which is part of every step: one for each draft of a chunk."""
        rows = Counter(number for chunk in plan.chunks if chunk.awaits_drafts for number in range(chunk.num_drafts))
        return self.draft_share * sum(self.step_s(count, 0) for count in rows.values())

    def _chunk_pairs(self, start: int, num_tokens: int) -> float:
        """Pairs of a chunk's query tokens and the tokens that they attend to, as far as the step's price lacks them."""
        within = 0.0 if self.source == "measured" else num_tokens / 2
        return (start + within) * num_tokens

    def save(self, path: str | Path) -> None:
        """Write the profile where `load_profile` can read it."""
        text = json.dumps({"version": VERSION} | asdict(self), indent=2, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, text: str, origin: str) -> Self:
        """A profile from a file's text. Raises `ConfigError`, naming `origin`, if it is none of this version."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:  # too many digits or brackets are no JSONDecodeError
            raise ConfigError(
                f"{origin} is not JSON", got=error, fix="give a file that `jinfercept profile` wrote"
            ) from None
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise ConfigError(
                f"{origin} is not a profile of version {VERSION}",
                got=f"version {reprlib.repr(version)}",
                fix="measure again with `jinfercept profile`",
            )
        values = {key: value for key, value in document.items() if key != "version"}
        by_name = {f.name: f for f in fields(cls)}
        unknown = sorted(values.keys() - by_name.keys())
        if unknown:
            raise ConfigError(
                f"{origin} has keys that no profile has",
                got=", ".join(unknown),
                fix=f"the keys are {', '.join(by_name)}",
            )
        required = [f.name for f in by_name.values() if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise ConfigError(
                f"{origin} lacks values", got=", ".join(values) or "none", fix=f"add {', '.join(missing)}"
            )
        for name in ("bucket_tokens", "bucket_s"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        try:
            if values.get("tiled") is not None:
                values["tiled"] = TiledPrice.from_json(values["tiled"])
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.what}", got=error.got, fix=error.fix) from None


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


# -- from data sheets --------------------------------------------------------------------------------------------------


COLLECTIVES_PER_LAYER = 2
"""Sums over the devices that share a layer: of attention's results and of the feed-forward network's."""


class ProfiledModel(NamedTuple):
    """The numbers of a model that a roofline needs.

    Attributes:
        name: part of the profile's name.
        params: weights.
        num_layers, num_kv_heads, head_dim: shape of the KV.
        hidden_size: numbers of a token between layers.
        bytes_per_number: of weights and KV alike; 2 is bfloat16.
        quantized_kv: KV has a byte for a number and a scale of four for each key and value, as `kv_cache_dtype` int8 and fp8.
    """

    name: str
    params: float
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    bytes_per_number: int = 2
    quantized_kv: bool = False

    def kv_bytes_per_token(self, num_devices: int = 1) -> int:
        """Keys and values of one token over all layers and devices: each has a KV head at least, if need be another's."""
        num_heads = max(self.num_kv_heads, num_devices)
        row_bytes = self.head_dim + 4 if self.quantized_kv else self.head_dim * self.bytes_per_number
        return 2 * self.num_layers * num_heads * row_bytes


def roofline(model: ProfiledModel, accelerator: str, num_devices: int = 1, *, attention: bool = False) -> Profile:
    """A profile derived from a model's size and a data sheet, without a measurement.

    A step reads all weights (`flat_s`) or computes two operations per weight and query token, whichever takes longer, and
    reads the KV of its contexts. With several accelerators, each holds a share of weights and KV and has a host link of its
    own, and every layer adds up their parts twice (arXiv 1909.08053), in rings, behind nothing.

    Args:
        model: the model's numbers.
        accelerator: a name in `ACCELERATORS`.
        num_devices: accelerators that share every layer.
        attention: count the operations of attention, four per pair of tokens, layer and number of the hidden size, without
            which recomputing a context is linear in its length.

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
    read_s = weight_bytes / bandwidth
    flops = sheet.bf16_flops * REACHED_FLOPS * num_devices
    per_query_s = 2 * model.params / flops
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
        flat_s=read_s + collectives * COLLECTIVE_S,
        collective_s=exchanged_bytes / (sheet.peer_bytes_per_s * REACHED_PEER_BANDWIDTH),
        saturation=max(8, round(read_s / per_query_s / 8) * 8),
        link_out_tokens_per_s=one_way,
        link_in_tokens_per_s=one_way,
        link_both_tokens_per_s=sheet.link.both_ways_bytes_per_s * num_devices / token_bytes,
        kv_bytes_per_token=token_bytes,
        disk_read_tokens_per_s=NVME.read_bytes_per_s / token_bytes,
        disk_write_tokens_per_s=NVME.write_bytes_per_s / token_bytes,
        disk_latency_s=NVME.latency_s,
        tables={
            "derived": {
                "accelerator": accelerator,
                "num_devices": num_devices,
                "kv_tokens": int(kv_bytes // token_bytes),
            }
        },
    )


# -- by name -----------------------------------------------------------------------------------------------------------


def _paper(name: str, per_query_s: float, fixed_s: float, budget: float, kv_bytes_per_token: int) -> Profile:
    """Constants of the InferCept authors' code, where reading context is free and S is 384.

    Args:
        budget: tokens that the link moves, both directions together, during a saturated iteration.
    """
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


LLAMA_13B = ProfiledModel("llama-13b", 13.016e9, num_layers=40, num_kv_heads=40, head_dim=128, hidden_size=5120)


def _with_attention(paper: Profile, *, num_layers: int, hidden_size: int, num_gpus: int) -> Profile:
    """The authors' constants, and the cost of reading contexts that these lack, from the data sheet of their 40 GB A100."""
    sheet = ACCELERATORS["A100-40GB"]
    return replace(
        paper,
        name=f"{paper.name}-attention",
        per_context_s=paper.kv_bytes_per_token / (sheet.memory_bytes_per_s * REACHED_BANDWIDTH * num_gpus),
        per_pair_s=4 * num_layers * hidden_size / (sheet.bf16_flops * REACHED_FLOPS * num_gpus),
    )


LLAMA_2_7B = ProfiledModel("llama-2-7b", 6.738e9, num_layers=32, num_kv_heads=32, head_dim=128, hidden_size=4096)
LLAMA_3_8B = ProfiledModel("llama-3-8b", 8.03e9, num_layers=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
LLAMA_3_70B = ProfiledModel("llama-3-70b", 70.554e9, num_layers=80, num_kv_heads=8, head_dim=128, hidden_size=8192)
QWEN_32B = ProfiledModel("qwen2.5-32b", 32.76e9, num_layers=64, num_kv_heads=8, head_dim=128, hidden_size=5120)
QWEN_32B_FP8 = QWEN_32B._replace(name="qwen2.5-32b-fp8", bytes_per_number=1)

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
        replace(roofline(LLAMA_3_70B, "A100-80GB", 8, attention=True), name="roofline-llama-3-70b-8xa100-attention"),
        replace(roofline(QWEN_32B_FP8, "H100", attention=True), name="roofline-qwen2.5-32b-fp8-h100-attention"),
        replace(roofline(LLAMA_2_7B, "A100-40GB", attention=True), name="roofline-yarn-llama-2-7b-64k-a100-40gb"),
    )
}
"""The profiles that have a name."""
