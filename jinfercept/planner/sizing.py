"""How many replicas of which kind a load needs: the fewest with which a share of the requests stays within limits, simulated.

A search doubles and halves the number of replicas with the coarse model, then corrects it with engines that step until the
number meets the limits and one fewer does not. The same router and the same sessions serve every number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Literal, NamedTuple

from jinfercept.config import KVDTypeChoice
from jinfercept.errors import ConfigError, nearest
from jinfercept.meter.turns import LatencyLimits
from jinfercept.planner.cluster import ClusterReport, by_price, mean_report, play_cluster
from jinfercept.planner.sessions import draw_sessions
from jinfercept.planner.simulated_replicas import CoarseReplica, SteppedReplica
from jinfercept.sched.data_sheets import ACCELERATORS
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.profile import Profile
from jinfercept.sched.roofline import (
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    LLAMA_13B,
    QWEN3_30B_A3B,
    QWEN_32B,
    ProfiledModel,
    roofline,
)
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import Script

HOST_TOKENS_PER_KV_TOKEN = 4
WARM_UP = 1 / 3
"""Share of the seconds whose turns fill the fleet and are not counted."""
DRAIN = 0.5
"""Seconds that turns have after the last session begins, over those in which sessions begin."""

Detail = Literal["stepped", "coarse"]
LLAMA_3_1B = ProfiledModel("llama-3.2-1b", 1.236e9, num_layers=16, num_kv_heads=8, head_dim=64, hidden_size=2048)

MODELS: Mapping[str, ProfiledModel] = {
    model.name: model for model in (LLAMA_3_1B, LLAMA_2_7B, LLAMA_3_8B, LLAMA_13B, QWEN_32B, QWEN3_30B_A3B, LLAMA_3_70B)
}
"""By name; another model needs a measured profile."""
PAPER_KV_TOKENS: Mapping[str, int] = {"paper-gptj-6b-a100": 53_000, "paper-vicuna-13b-2xa100": 56_000}
"""Device pools of the paper's machines, which the paper does not give: what 90 % of 40 GB cards leaves beside the weights."""


class ReplicaKind(NamedTuple):
    """A replica that could be bought.

    Attributes:
        simulation: its machine, pools and policy.
        device: what one is; "" where only a profile is known.
        price_per_h: of one accelerator; kinds are ordered by the price of the fleet.
        kv_cache_dtype: of its pages, as the engine's option; "auto" is the model's, or that of the profile's measurement.
    """

    label: str
    simulation: Simulation
    num_devices: int = 1
    device: str = ""
    price_per_h: float = 1.0
    kv_cache_dtype: KVDTypeChoice = "auto"

    def cost(self, replicas: int) -> float:
        """The price of so many replicas for an hour."""
        return replicas * self.num_devices * self.price_per_h


class FleetLoad(NamedTuple):
    """A load and the limits that it has to keep.

    Attributes:
        source: makes a draw of sessions' scripts from a random state.
        rate: sessions per second.
        duration_s: seconds in which sessions begin.
        shared_tokens: of the system prompt before every session.
        share: of the requests that must stay within the limits.
        seeds: of the sessions; each is a run, and the runs are counted together.
    """

    source: Callable[[Random], Callable[[], Script]]
    rate: float
    duration_s: float
    shared_tokens: int
    limits: LatencyLimits
    share: float
    seeds: tuple[int, ...] = (0,)


class Sizing(NamedTuple):
    """How many replicas of a kind a load needs.

    Attributes:
        replicas: the fewest that meet the limits; 0 if the most that were tried do not.
        report: of that many; of the most, if none meets the limits.
        fewer: report of one replica fewer; None for one.
        tried: share within the limits by number of replicas.
    """

    kind: ReplicaKind
    replicas: int
    report: ClusterReport
    fewer: ClusterReport | None
    tried: Mapping[int, float]

    @property
    def cost(self) -> float:
        """The price of the fleet for an hour; infinite if no number meets the limits."""
        return self.kind.cost(self.replicas) if self.replicas else float("inf")


def profile_kind(
    name: str, kv_tokens: int | None, host_tokens: int | None, price: float, **options: Any
) -> ReplicaKind:
    """A kind from a named profile or a file.

    Args:
        name: of the profile, or a path.
        kv_tokens, host_tokens: of its pools; None: those that belong to the profile, four times as many on the host.
        price: of one for an hour.
        options: of `Simulation`; sequences that run at once are at most the tokens of a step.

    Raises:
        ConfigError: no such profile, or one that does not say how much memory there is.
    """
    profile = load_profile(name)
    derived = profile.tables.get("derived")
    measured_tokens = derived.get("kv_tokens") if isinstance(derived, Mapping) else None
    tokens = kv_tokens or measured_tokens or PAPER_KV_TOKENS.get(profile.name.removesuffix("-attention"))
    if not isinstance(tokens, int):
        raise ConfigError("the profile does not say how many tokens of KV fit", got=name, fix="give --kv-tokens")
    return _kind(profile.name, profile, tokens, host_tokens, price=price, options=options)


def accelerator_kind(
    model: str,
    devices: str,
    kv_tokens: int | None,
    host_tokens: int | None,
    price: float,
    kv_cache_dtype: KVDTypeChoice = "auto",
    **options: Any,
) -> ReplicaKind:
    """A kind from data sheets.

    Args:
        model: a name of `MODELS`.
        devices: an accelerator of the data sheets, as `H100`, or several that share the model, as `4xH100`.
        kv_tokens, host_tokens: of its pools; None: what the weights leave, four times as many on the host.
        price: of one accelerator for an hour.
        kv_cache_dtype: format of the pages, as the engine's option.
        options: of `Simulation`.

    Raises:
        ConfigError: an unknown model or accelerator, or weights that do not fit.
    """
    if model not in MODELS:
        fix = f"one of {', '.join(MODELS)}; or measure a profile with `jinfercept profile` and give it as --profile"
        raise ConfigError(f"the planner does not know this model{nearest(model, list(MODELS))}", got=model, fix=fix)
    count, _, name = devices.rpartition("x")
    if count and not (count.isdecimal() and 1 <= int(count) <= 64):
        raise ConfigError("accelerators must be written as a number and a name", got=devices, fix="as 4xH100")
    if name not in ACCELERATORS:
        fix = f"one of {', '.join(ACCELERATORS)}, or several, as 4xH100"
        raise ConfigError(f"no such accelerator{nearest(name, list(ACCELERATORS))}", got=devices, fix=fix)
    sized = MODELS[model]._replace(quantized_kv=kv_cache_dtype != "auto")
    profile = roofline(sized, name, int(count or 1), attention=True)
    tokens = kv_tokens or profile.tables["derived"]["kv_tokens"]
    kind = _kind(devices, profile, tokens, host_tokens, price=price, options=options)
    return kind._replace(num_devices=int(count or 1), device=name, kv_cache_dtype=kv_cache_dtype)


def _kind(
    label: str, profile: Profile, kv_tokens: int, host_tokens: int | None, *, price: float, options: Mapping[str, Any]
) -> ReplicaKind:
    step_tokens = _step_tokens(profile)
    options = {**options, "max_num_seqs": min(options.get("max_num_seqs", step_tokens), step_tokens)}
    simulation = Simulation(
        profile,
        kv_tokens=kv_tokens,
        host_tokens=HOST_TOKENS_PER_KV_TOKEN * kv_tokens if host_tokens is None else host_tokens,
        chunked_prefill=True,
        overlaps=True,
        prefix_caching=True,
        **options,
    )
    return ReplicaKind(label, simulation, price_per_h=price)


def _step_tokens(profile: Profile) -> int:
    """Query tokens of the largest step: what was measured, else those after which steps take longer."""
    return profile.bucket_tokens[-1] if profile.bucket_tokens else profile.saturation


def play_fleet(kind: ReplicaKind, replicas: int, load: FleetLoad, detail: Detail) -> ClusterReport:
    """The report of a fleet under a load, of the turns that are sent behind the first third of its seconds.

    Raises:
        ConfigError: there are no such turns.
    """
    profile = kind.simulation.profile
    simulation = replace(kind.simulation, limits=load.limits)
    model = SteppedReplica if detail == "stepped" else CoarseReplica
    reports = list[ClusterReport]()
    for seed in load.seeds:
        sessions = draw_sessions(load.source, load.rate, load.duration_s, seed, load.shared_tokens)
        policy = by_price(profile, seed)
        members = [model(simulation) for _ in range(replicas)]
        counted = load.duration_s * WARM_UP, load.duration_s
        reports.append(play_cluster(members, policy, sessions, load.limits, (1 + DRAIN) * load.duration_s, counted))
    report = mean_report(reports)
    if report.turns == 0:
        got = f"{load.rate:g} sessions/s for {load.duration_s:g} s, of which the first third is not counted"
        raise ConfigError("no request would arrive", got=got, fix="give a longer --duration or a higher --rate")
    return report


def size_fleet(
    kind: ReplicaKind,
    load: FleetLoad,
    most_replicas: int,
    detail: Detail = "stepped",
    progress: Callable[[str], None] = lambda text: None,
) -> Sizing:
    """The fewest replicas of a kind that meet a load's limits.

    Args:
        detail: of the last word; the search begins with the coarse model.
        progress: called with what is tried next.
    """
    number = _search(lambda count: _share(kind, count, load, "coarse", progress), load.share, most_replicas)
    reports = dict[int, ClusterReport]()

    def meets(count: int) -> bool:
        if count not in reports:
            progress(f"{kind.label}: {count} replicas, {detail}")
            reports[count] = play_fleet(kind, count, load, detail)
        return reports[count].good_share >= load.share

    number = min(number, most_replicas)
    while number < most_replicas and not meets(number):
        number += max(1, number // 8)
    number = min(number, most_replicas)
    enough = meets(number)
    while enough and number > 1 and meets(number - 1):
        number -= 1
    tried = {count: report.good_share for count, report in sorted(reports.items())}
    return Sizing(kind, number if enough else 0, reports[number], reports.get(number - 1), tried)


def _share(kind: ReplicaKind, count: int, load: FleetLoad, detail: Detail, progress: Callable[[str], None]) -> float:
    progress(f"{kind.label}: {count} replicas, {detail}")
    return play_fleet(kind, count, load, detail).good_share


def _search(share: Callable[[int], float], least: float, most: int) -> int:
    """The smallest number whose share is at least so much, by doubling and bisection; `most` if none is."""
    low, high = 0, 1
    while high < most and share(high) < least:
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if share(middle) >= least:
            high = middle
        else:
            low = middle
    return high


def ranked(sizings: Sequence[Sizing]) -> list[Sizing]:
    """Sizings by the cost of the fleet, the least first; those that meet no limits last, the best of them first."""
    return sorted(sizings, key=lambda sizing: (sizing.cost, -sizing.report.good_share))


def deployment(sizing: Sizing, model: str, name: str = "jinfercept") -> dict[str, Any]:
    """The contents of the file of `jinfercept deploy` for a fleet."""
    simulation = sizing.kind.simulation
    engine: dict[str, Any] = {
        "kv_tokens": simulation.kv_tokens,
        "max_model_len": simulation.max_model_len,
        "max_num_seqs": simulation.max_num_seqs,
        "max_num_batched_tokens": _step_tokens(simulation.profile),
        "page_size": simulation.page_size,
        "policy": simulation.policy_name,
        "swap_space": round(simulation.host_tokens * simulation.profile.kv_bytes_per_token / 2**30, 1),
    }
    if sizing.kind.num_devices > 1:
        engine["tensor_parallel_size"] = sizing.kind.num_devices
    if sizing.kind.kv_cache_dtype != "auto":
        engine["kv_cache_dtype"] = sizing.kind.kv_cache_dtype
    return {"name": name, "model": model, "replicas": sizing.replicas, "engine": engine}
