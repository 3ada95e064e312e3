"""Machines with shared prefixes, fewer KV heads and quantised KV: what they carry on paper, and their simulations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jinfercept.sched.roofline import LLAMA_2_7B, LLAMA_13B, ProfiledModel
from jinfercept.sim.sweep import SweepRun
from studies.questions.machines import Deployment, deployment, mixed_demand, mixed_load
from studies.questions.steady_state import Demand, PaperRates, paper_rates, with_kv_bytes

KV_BYTES: Mapping[str, float] = {"MHA": 1.0, "GQA": 1 / 4, "GQA, int8": 1 / 8}
"""Bytes of KV per token over those of the model with a KV head for each query head and 16 bits a number."""
SHARED = (0.0, 0.9)
"""Shares of every prompt that all requests of a kind have in common."""
SIMULATED = (
    (deployment(LLAMA_2_7B, "A100-80GB"), ("MHA", "GQA")),
    (deployment(LLAMA_13B, "H100"), tuple(KV_BYTES)),
)
"""Machines, and the names of `KV_BYTES` that are simulated on them."""
LLAMA_8B_MHA = ProfiledModel("8b", 8.03e9, num_layers=32, num_kv_heads=32, head_dim=128, hidden_size=4096)
ON_PAPER = tuple(
    (deployment(LLAMA_8B_MHA, accelerator, num_devices), tuple(KV_BYTES))
    for accelerator, num_devices in (
        ("T4", 4),
        ("A40", 1),
        ("L40S", 1),
        ("A100-80GB", 1),
        ("H100", 1),
        ("H200", 1),
        ("B200", 1),
        ("TPU-v5e", 4),
        ("TPU-v6e", 2),
    )
)
"""The same for bounds on paper."""
POLICIES = ("discard", "improved_discard", "lru", "copy_ahead")
"""vLLM's of 2024, with whole prompts; the same with chunks and places in the queue kept; engines with a prefix cache; ours."""
DROPPING = ("discard", "improved_discard")
"""Those of them that drop every paused context."""
LOADS = (0.6, 0.9, 1.2)
"""Simulated loads, over what is carried on paper if pauses cost nothing."""
DROPPING_LOADS = (0.4, 0.7, 1.0)
"""Simulated loads of `DROPPING`, over what is carried on paper if every pause loses its context."""
LONG = len(LOADS)
"""The number of the load of the longer simulations."""
LONG_LOAD, LONG_S = 0.9, 240.0
"""Of the longer simulations: load over what is carried on paper if pauses cost nothing, and seconds of arrivals."""
SHORT_S = 100.0
"""Seconds of arrivals that are fewer than many conversations take."""
NOTHING_LEFT = 1.05
"""A ratio of loads or latencies up to which nothing is left to win."""
SLOWER = 3.0
"""A policy carries the load at which its mean latency is so many times that of `copy_ahead` at the least of `LOADS`."""


class Combination(NamedTuple):
    """A machine with shared prefixes and a number of KV bytes.

    Attributes:
        label: of the machine and its model.
        shared: share of every prompt.
        kv: a name in `KV_BYTES`.
    """

    label: str
    shared: float
    kv: str

    @property
    def name(self) -> str:
        """Without the machine."""
        return f"{self.shared:.0%} shared, {self.kv}"


class Combined(NamedTuple):
    """What a combination makes of a machine.

    Attributes:
        machine: with its pool and prices.
        need: of the mean request.
        paper: the loads that it carries on paper.
    """

    machine: Deployment
    need: Demand
    paper: PaperRates

    def paper_rate(self, policy: str) -> float:
        """What a policy carries on paper, in requests per second: `lru` at least the better of keeping all and dropping all."""
        if policy in DROPPING:
            return self.paper.dropped
        return self.paper.free if policy == "copy_ahead" else max(self.paper.kept, self.paper.dropped)

    @property
    def is_played_longer(self) -> bool:
        """Whether paper leaves something to win over `lru`, but arrivals of `arrivals_s` are over before conversations end."""
        gain = self.paper.free / self.paper_rate("lru")
        return gain > NOTHING_LEFT and arrivals_s(LONG_LOAD * self.paper.free) < SHORT_S

    def offered(self, policy: str) -> list[float]:
        """The simulated loads of a policy, in requests per second."""
        if policy in DROPPING:
            return [load * self.paper.dropped for load in DROPPING_LOADS]
        return [load * self.paper.free for load in LOADS]


def combined(machines: Iterable[tuple[Deployment, Sequence[str]]]) -> dict[Combination, Combined]:
    """All combinations of machines with names of `KV_BYTES`, and of shares."""
    needs = {shared: mixed_demand(shared) for shared in SHARED}
    made = dict[Combination, Combined]()
    for placed, names in machines:
        for shared, need in needs.items():
            for kv in names:
                machine = placed._replace(profile=with_kv_bytes(placed.profile, KV_BYTES[kv]))
                paper = paper_rates(machine.profile, need, machine.kv_tokens, machine.profile.saturation)
                made[Combination(placed.label, shared, kv)] = Combined(machine, need, paper)
    return made


class CombinationTrial(NamedTuple):
    """A simulation of a combination: under a policy, at the load of this number in `Combined.offered`."""

    combination: Combination
    policy: str
    load: int


def runs(combinations: Mapping[Combination, Combined], seed: int, *, quick: bool) -> dict[CombinationTrial, SweepRun]:
    """The simulations of four policies, each at loads around the one that it carries on paper; quick: some, of few requests."""
    made = dict[CombinationTrial, SweepRun]()
    for key, combined in combinations.items():
        if quick and key.kv != "MHA":
            continue
        for policy in POLICIES[2:] if quick else POLICIES:
            for load, rate in enumerate(combined.offered(policy)[: 1 if quick else None]):
                duration_s = 10.0 / rate if quick else arrivals_s(rate)
                made[CombinationTrial(key, policy, load)] = _run(key, combined, policy, rate, duration_s, seed)
        if combined.is_played_longer and not quick:
            rate = LONG_LOAD * combined.paper.free
            for policy in POLICIES[2:]:
                made[CombinationTrial(key, policy, LONG)] = _run(key, combined, policy, rate, LONG_S, seed)
    return made


def arrivals_s(rate: float) -> float:
    """Seconds of arrivals of a simulation, at a load in requests per second."""
    return min(150.0, max(60.0, 300.0 / rate))


def _run(key: Combination, combined: Combined, policy: str, rate: float, duration_s: float, seed: int) -> SweepRun:
    simulation = replace(
        combined.machine.simulation(policy, duration_s, combined.need),
        prefix_caching=True,
        shared_prefix=key.shared,
        chunked_prefill=None if policy == "discard" else True,
    )
    return SweepRun(simulation, mixed_load(rate, duration_s, seed))
