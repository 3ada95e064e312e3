"""Prices of steps and transfers for one machine and model: a `Profile`, which is a JSON file with a version.

`start.profiler` measures one; `sched.named_profiles` has those with a name, most of which are derived from data sheets.
`CostModel` is the part of a profile that the scheduler plans with, and `StepBudget` the link budget of a step.
"""

import json
import math
import reprlib
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

from jinfercept.errors import ConfigError
from jinfercept.sched.plan import StepPlan


class CostModel(Protocol):
    """Prices a step before it runs."""

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        """Seconds of a step whose rows read `context_tokens` tokens of KV."""
        ...

    def link_tokens(self, seconds: float) -> int:
        """Tokens of KV that the host link moves one way in this time."""
        ...

    def plan_s(self, plan: StepPlan) -> float:
        """Seconds of a plan's compute."""
        ...

    def swap_s(self, num_tokens: int) -> float:
        """T_swap: seconds to move the KV of these tokens one way over an idle link, in the largest copies possible."""
        ...

    def copies_s(self, num_tokens: int) -> float:
        """The part of `swap_s` that grows with the number of copies, not with their bytes."""
        ...

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """T_recompute: seconds of the steps that recompute a context, in chunks of at most `chunk_tokens`."""
        ...

    def disk_s(self, num_tokens: int) -> float:
        """T_disk: seconds to read the KV of these tokens from the disk tier into host memory; infinite without a disk tier."""
        ...


IDLE_STEP_S = 0.010
"""Seconds of a step that only transfers: short, so that an arrival interrupts it."""

_UNLIMITED = 1 << 60


class StepBudget(NamedTuple):
    """Sizes of steps, and of the transfers that their compute hides."""

    cost: CostModel
    buckets: tuple[int, ...]  # query tokens of the executables, ascending
    page_size: int  # tokens of the smallest transfer
    waits_for_link: bool  # the step waits for its transfers, which then have no budget

    def bucket(self, query_tokens: int) -> int:
        """Query tokens of the smallest executable that holds these; 0 for none."""
        return self.buckets[bisect_left(self.buckets, query_tokens)] if query_tokens else 0

    def link_tokens(self, query_tokens: int, context_tokens: int) -> int:
        """Tokens that the link moves while these query tokens compute (InferCept §4.1), or in `IDLE_STEP_S` without any."""
        if self.waits_for_link:
            return _UNLIMITED
        seconds = IDLE_STEP_S
        if query_tokens:
            seconds = self.cost.step_s(self.bucket(query_tokens), context_tokens)
        return max(self.cost.link_tokens(seconds), self.page_size)


MOST_SATURATION = 1_000_000

Source = Literal["paper", "roofline", "measured"]


def _ascends(values: Any) -> bool:
    are_numbers = isinstance(values, tuple) and all(
        isinstance(value, int | float) and 0 < value <= sys.float_info.max for value in values
    )
    return are_numbers and all(earlier <= later for earlier, later in pairwise(values))


def _check_field(name: str, kind: object, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is float:
        is_right, fix = is_number and (value >= 0 or name == "fixed_s"), "a finite number, at least 0"
    elif kind is int:
        most = MOST_SATURATION if name == "saturation" else 1 << 62
        is_right, fix = is_number and isinstance(value, int) and 1 <= value <= most, f"a whole number, 1 to {most:,}"
    elif kind is Source:
        is_right, fix = value in get_args(Source), f"one of {', '.join(get_args(Source))}"
    elif name == "tables":
        is_right, fix = isinstance(value, Mapping), "a mapping"
    elif kind is str:
        is_right, fix = isinstance(value, str) and bool(value), "name the model and the machine"
    else:
        is_right, fix = _ascends(value), "numbers that ascend from above 0"
    if not is_right:
        raise ConfigError(f"a profile's {name} is wrong", got=reprlib.repr(value), fix=fix)


VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A `CostModel`: `step_s = max(flat_s, fixed_s + per_query_s · query tokens) + collective_s · query tokens +
    per_context_s · context tokens`.

    With buckets, the price of a step without contexts is that of the executable that runs it, instead of the line. Raises
    `ConfigError` for numbers that no machine can have.
    """

    name: str  # of the model and the machine
    source: Source  # the InferCept authors' constants, derived from data sheets, or measured
    # seconds of a step without tokens; below 0 only as the intercept of a line that starts at `flat_s`
    fixed_s: float
    per_query_s: float
    per_context_s: float  # seconds for each context token that the step's rows read
    saturation: int  # S, query tokens after which a step takes longer
    link_out_tokens_per_s: float  # tokens of KV from the device to the host, alone on the link
    link_in_tokens_per_s: float
    link_both_tokens_per_s: float  # both directions together when both are busy
    kv_bytes_per_token: int  # bytes over all layers and devices
    flat_s: float = 0.0  # least seconds of a step (reading the weights); 0: there is no such floor
    # seconds for each query token, to exchange the devices' sums; 0 on one device and in measurements, whose other numbers
    # have them
    collective_s: float = 0.0
    # seconds of host work to dispatch a step: on a CPU part of a step's measured seconds, elsewhere hidden behind the step
    # before
    dispatch_s: float = 0.0
    # seconds for each pair of a query token and a token that it attends to, in `plan_s`; the buckets of measured profiles
    # have the pairs within a chunk
    per_pair_s: float = 0.0
    # c0 of `T_swap = copies · (c0 + bytes / bandwidth)`: seconds of a copy over the link beside those of its bytes
    copy_s: float = 0.0
    # most tokens of KV in a copy, below 1 where several copies carry a token; 0: one copy carries all that a step moves one
    # way
    copy_tokens: float = 0.0
    disk_read_tokens_per_s: float = 0.0  # from the disk tier to the host; 0: there is no such tier
    disk_write_tokens_per_s: float = 0.0
    disk_latency_s: float = 0.0  # seconds until the first token is read
    # query tokens of the executables, ascending; empty: the line gives the price of a step of any size
    bucket_tokens: tuple[int, ...] = ()
    bucket_s: tuple[float, ...] = ()  # seconds of each executable, full, without its contexts
    # seconds of a draft model's step over those of a whole step for as many rows, which has one in it; 0: there is no draft
    # model, or its steps take no time
    draft_share: float = 0.0
    # the measurements and derivations behind the numbers: any JSON values
    tables: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_field(f.name, f.type, getattr(self, f.name))
        if self.fixed_s < 0 and self.flat_s == 0:
            raise ConfigError(
                "a profile's fixed_s is negative and no flat_s holds it up",
                got=self.fixed_s,
                fix="give at least 0, or a flat_s",
            )
        if len(self.bucket_tokens) != len(self.bucket_s):
            raise ConfigError(
                "a profile must have one time for each bucket",
                got=f"{len(self.bucket_tokens)} and {len(self.bucket_s)}",
                fix="give one time for each bucket",
            )

    def step_s(self, query_tokens: int, context_tokens: int) -> float:
        sizes = self.bucket_tokens
        if not sizes:
            seconds = max(self.flat_s, self.fixed_s + self.per_query_s * query_tokens)
        elif query_tokens <= sizes[-1]:
            seconds = self.bucket_s[bisect_left(sizes, query_tokens)]
        else:
            # more than the largest executable holds take several steps
            seconds = self.bucket_s[-1] * query_tokens / sizes[-1]
        return seconds + self.collective_s * query_tokens + self.per_context_s * context_tokens

    def plan_s(self, plan: StepPlan) -> float:
        """Seconds of a plan's compute: `step_s`, the attention of chunks, and the steps of a draft model."""
        drafting_s = self._drafting_s(plan) if self.draft_share else 0.0
        context_tokens, pairs = 0, 0.0
        for chunk in plan.chunks:
            num_tokens = len(chunk.tokens)
            context_tokens += chunk.start + num_tokens
            if num_tokens > 1:
                pairs += self._chunk_pairs(chunk.start, num_tokens)
        return self.step_s(plan.num_tokens, context_tokens) + self.per_pair_s * pairs + drafting_s

    def recompute_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """T_recompute: seconds to recompute N tokens from the first one on, and nothing else: `a · N + b · N² + k · chunks`."""
        full, rest = divmod(num_tokens, chunk_tokens)
        seconds = full * self.step_s(chunk_tokens, 0) + (self.step_s(rest, 0) if rest else 0.0)
        context_tokens = chunk_tokens * full * (full + 1) // 2 + (num_tokens if rest else 0)
        before = chunk_tokens**2 * full * (full - 1) // 2 + chunk_tokens * full * rest
        within = full * self._chunk_pairs(0, chunk_tokens) + self._chunk_pairs(0, rest)
        return seconds + self.per_context_s * context_tokens + self.per_pair_s * (before + within)

    def link_tokens(self, seconds: float) -> int:
        # in the worse direction, whichever way the tokens go
        rate = min(self.link_out_tokens_per_s, self.link_in_tokens_per_s, self.link_both_tokens_per_s)
        if not self.copy_s:
            return int(rate * seconds)
        if not self.copy_tokens:
            return max(0, int(rate * (seconds - self.copy_s)))
        return int(rate * seconds / (1.0 + self.copy_s * rate / self.copy_tokens))

    def swap_s(self, num_tokens: int) -> float:
        if not num_tokens:
            return 0.0
        rate = min(self.link_out_tokens_per_s, self.link_in_tokens_per_s, self.link_both_tokens_per_s)
        return num_tokens / rate + self.copies_s(num_tokens) if rate else math.inf

    def disk_s(self, num_tokens: int) -> float:
        if not self.disk_read_tokens_per_s:
            return math.inf
        return self.disk_latency_s + num_tokens / self.disk_read_tokens_per_s

    def without_disk(self) -> "Profile":
        return replace(self, disk_read_tokens_per_s=0.0, disk_write_tokens_per_s=0.0, disk_latency_s=0.0)

    def copies_s(self, num_tokens: int) -> float:
        if not num_tokens or not self.copy_s:
            return 0.0
        return self.copy_s * (math.ceil(num_tokens / self.copy_tokens) if self.copy_tokens else 1)

    def _drafting_s(self, plan: StepPlan) -> float:
        # the draft model's steps after the first, which is part of every step: one for each draft of a chunk
        rows = Counter(number for chunk in plan.chunks if chunk.awaits_drafts for number in range(chunk.num_drafts))
        return self.draft_share * sum(self.step_s(count, 0) for count in rows.values())

    def _chunk_pairs(self, start: int, num_tokens: int) -> float:
        # the measured price of a step has the pairs within a chunk
        within = 0.0 if self.source == "measured" else num_tokens / 2
        return (start + within) * num_tokens

    def save(self, path: str | Path) -> None:
        """Write the profile where `load_profile` can read it."""
        text = json.dumps({"version": VERSION} | asdict(self), indent=2, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, text: str, origin: str) -> Self:
        """A profile from a file's text. Raises `ConfigError`, which names `origin`, if it is none of this version."""
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
        values: dict[str, Any] = {key: value for key, value in document.items() if key != "version"}
        for name in ("bucket_tokens", "bucket_s"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        try:
            return cls(**values)
        except TypeError as error:  # unknown keys, or missing ones
            raise ConfigError(
                f"{origin} is no profile", got=error, fix="measure again with `jinfercept profile`"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.what}", got=error.got, fix=error.fix) from None
