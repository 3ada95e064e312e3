"""Beside other optimisations: what is left to win at pauses where prefixes are shared, KV heads are few, or KV is quantised."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jinfercept.sched.roofline import LLAMA_2_7B, LLAMA_13B, ProfiledModel
from jinfercept.sim.run_stats import Report
from jinfercept.sim.sweep import SweepRun
from jinfercept.sim.tables import TextTable
from studies.answer import StudyAnswer, StudyEffort
from studies.capacity import Capacity, capacity, capacity_ratio
from studies.plots import Bars, HeatMap
from studies.questions.latency import LATENCY_CELL, latency_text, mean_token_ms
from studies.questions.steady_state import (
    Demand,
    Deployment,
    PaperRates,
    deployed,
    mixed_demand,
    mixed_load,
    most_over_dropping,
    paper_rates,
    with_kv_bytes,
)

KV_BYTES: Mapping[str, float] = {"MHA": 1.0, "GQA": 1 / 4, "GQA, int8": 1 / 8}
"""Bytes of KV per token over those of the model with a KV head for each query head and 16 bits a number."""
SHARED = (0.0, 0.9)
"""Shares of every prompt that all requests of a kind have in common."""
SIMULATED = (
    (deployed(LLAMA_2_7B, "A100-80GB"), ("MHA", "GQA")),
    (deployed(LLAMA_13B, "H100"), tuple(KV_BYTES)),
)
"""Machines, and the names of `KV_BYTES` that are simulated on them."""
LLAMA_8B_MHA = ProfiledModel("8b", 8.03e9, num_layers=32, num_kv_heads=32, head_dim=128, hidden_size=4096)
ON_PAPER = tuple(
    (deployed(LLAMA_8B_MHA, accelerator, num_devices), tuple(KV_BYTES))
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


Reports = Mapping[CombinationTrial, Report]
Combinations = Mapping[Combination, Combined]
Carried = Mapping[Combination, Mapping[str, Capacity]]


def ask(effort: StudyEffort) -> StudyAnswer:
    """Bounds on paper for all machines, and simulated loads of four policies for two of them."""
    combinations = combined(SIMULATED)
    trials = runs(combinations, effort.seed, quick=effort.quick)
    reports = dict(zip(trials, effort.play(list(trials.values())), strict=True))
    carried = {key: loads for key, pair in combinations.items() if (loads := _carried(key, pair, reports))}
    bounds = combined(ON_PAPER)
    return StudyAnswer(
        "What is left to win at pauses beside prefix sharing, grouped-query attention and quantised KV?",
        [_bounds_table(bounds), _loads_table(combinations, carried), _latency_table(combinations, reports)],
        [*_about_bounds(bounds), *_about_loads(combinations, carried), *_about_latencies(carried, reports)],
        [[_bounds_map(bounds)], [_gains(combinations, carried), _latencies(carried, reports)]],
        [report | _labels(key) for key, report in reports.items()],
    )


def _labels(key: CombinationTrial) -> Report:
    return {"deployment": key.combination.label, "combination": key.combination.name, "load": key.load}


def _carried(key: Combination, pair: Combined, reports: Reports) -> dict[str, Capacity]:
    """The load of each policy in requests per second: where its mean latency reaches a limit that all policies share."""
    capacities = dict[str, Capacity]()
    unloaded = reports.get(CombinationTrial(key, "copy_ahead", 0))
    for policy in POLICIES if unloaded else ():
        played = [
            (rate, reports.get(CombinationTrial(key, policy, load))) for load, rate in enumerate(pair.offered(policy))
        ]
        points = [(rate, mean_token_ms(report)) for rate, report in played if report]
        if unloaded and (most := capacity(points, SLOWER * mean_token_ms(unloaded))):
            capacities[policy] = most
    return capacities


# -- on paper ----------------------------------------------------------------------------------------------------------


def _by_machine(bounds: Combinations) -> dict[str, dict[str, Combined]]:
    rows = dict[str, dict[str, Combined]]()
    for key, pair in bounds.items():
        rows.setdefault(key.label, {})[key.name] = pair
    return rows


def _bounds_table(bounds: Combinations) -> TextTable:
    rows = _by_machine(bounds)
    names = list(next(iter(rows.values())))
    cells = [
        [
            label,
            *(f"{pair.paper.most_gain:.2f} / {pair.paper.free / pair.paper.dropped:.2f}" for pair in row.values()),
        ]
        for label, row in rows.items()
    ]
    title = (
        "Upper bound on the gain in load over the better of keeping all and dropping all / over dropping all, on paper."
    )
    return TextTable(title, ["machine", *names], cells)


def _bounds_map(bounds: Combinations) -> HeatMap:
    rows = _by_machine(bounds)
    values = [[pair.paper.most_gain for pair in row.values()] for row in list(rows.values())[::-1]]
    names = [f"{shared:.0%} shared\n{kv}" for shared in SHARED for kv in KV_BYTES]
    title = "Most gain in load over keeping all or dropping all, on paper"
    return HeatMap(title, ("machine", "combination"), list(rows)[::-1], names, values, 4.0, (0.0, NOTHING_LEFT))


def _about_bounds(bounds: Combinations) -> list[str]:
    most = {key.shared: most_over_dropping(pair.need) for key, pair in bounds.items()}
    told = " and ".join(
        f"{gain:.2f} times its load with {shared:.0%} of prompts shared" for shared, gain in most.items()
    )
    sentences = [
        f"On paper, whatever the machine and the bytes of a token, dropping every context leaves at most {told} to gain."
    ]
    for shared in SHARED:
        for kv in KV_BYTES:
            gains = {
                key.label: pair.paper.most_gain for key, pair in bounds.items() if (key.shared, key.kv) == (shared, kv)
            }
            best = max(gains, key=gains.__getitem__)
            few = sum(gain < NOTHING_LEFT for gain in gains.values())
            sentences.append(
                f"On paper, {shared:.0%} of prompts shared, {kv}: at most {gains[best]:.2f} times the load ({best});"
                f" less than {NOTHING_LEFT} times on {few} of {len(gains)} machines."
            )
    return sentences


# -- simulated ---------------------------------------------------------------------------------------------------------


def _loads_table(combinations: Combinations, carried: Carried) -> TextTable:
    policies = [policy for policy in POLICIES if any(policy in loads for loads in carried.values())]
    rows = []
    for key, loads in carried.items():
        pair = combinations[key]
        gains = [
            f"{capacity_ratio(loads['copy_ahead'], loads[policy])} ({_paper_gain(pair, policy):.2f})"
            for policy in policies[:-1]
        ]
        cells = [f"{loads[policy]} ({pair.paper_rate(policy):.2f})" for policy in policies]
        rows.append([key.label, key.name, f"{pair.machine.profile.kv_bytes_per_token / 1024:g} KiB", *cells, *gains])
    columns = [
        "machine",
        "combination",
        "KV per token",
        *policies,
        *(f"gain over {policy}" for policy in policies[:-1]),
    ]
    title = (
        f"Requests/s at which mean latency is {SLOWER:g} × that of copy_ahead at {LOADS[0]:g} of its load on paper,"
        " and gains of copy_ahead; in brackets: on paper."
    )
    return TextTable(title, columns, rows)


def _latency_table(combinations: Combinations, reports: Reports) -> TextTable:
    """At the second of the loads, where queues are still short; at the first if no other was simulated."""
    load = 1 if any(key.load == 1 for key in reports) else 0
    shown = {(key.combination, key.policy): report for key, report in reports.items() if key.load == load}
    policies = [policy for policy in POLICIES if any(policy == simulated for _, simulated in shown)]
    rows = [
        [key.label, key.name]
        + [f"{pair.offered(policy)[load]:.2f}/s: {latency_text(shown[key, policy])}" for policy in policies]
        for key, pair in combinations.items()
        if (key, policies[-1]) in shown
    ]
    title = (
        f"At {DROPPING_LOADS[load]:g} ({', '.join(DROPPING)}) and {LOADS[load]:g} (the others) of the load on paper,"
        f" requests/s: {LATENCY_CELL}."
    )
    return TextTable(title, ["machine", "combination", *policies], rows)


def _paper_gain(pair: Combined, policy: str) -> float:
    return pair.paper.free / pair.paper_rate(policy)


def gain(loads: Mapping[str, Capacity], policy: str) -> float | None:
    """The load of `copy_ahead` over that of a policy, at least; None where that is not known."""
    ours, other = loads.get("copy_ahead"), loads.get(policy)
    return ours.rate / other.rate if ours and other and ours.side != "<" and other.side != ">" else None


def _slower(key: Combination, load: int, reports: Reports) -> float | None:
    """The mean latency of `lru` over that of `copy_ahead` at the same load; None if it was not simulated."""
    theirs, ours = (reports.get(CombinationTrial(key, policy, load)) for policy in ("lru", "copy_ahead"))
    return mean_token_ms(theirs) / mean_token_ms(ours) if theirs and ours else None


def _gains(combinations: Combinations, carried: Carried) -> Bars:
    """Gains over an engine that drops, simulated beside paper; none where the load of that engine was not found."""
    bars = dict[str, dict[str, float]]()
    for key, loads in carried.items():
        if more := gain(loads, "improved_discard"):
            on_paper = _paper_gain(combinations[key], "improved_discard")
            bars[f"{key.label}: {key.name}"] = {"on paper": on_paper, "simulated, at least": more}
    return Bars("Load of copy_ahead over that of improved_discard", "ratio", bars, beside=True)


def _latencies(carried: Carried, reports: Reports) -> Bars:
    """How much slower an engine is that keeps and evicts, without a host tier."""
    bars = {
        f"{key.label}: {key.name}": {
            f"at {share:g} of the load on paper": ratio
            for load, share in enumerate(LOADS)
            if (ratio := _slower(key, load, reports)) is not None
        }
        for key in carried
    }
    return Bars("Mean latency of lru over that of copy_ahead", "ratio", bars, beside=True)


def _about_loads(combinations: Combinations, carried: Carried) -> list[str]:
    sentences = []
    for policy in POLICIES[:-1]:
        gains = {key: more for key, loads in carried.items() if (more := gain(loads, policy))}
        if gains:
            ends = (min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__))
            least, most = (
                f"{gains[key]:.2f} ({key.label}, {key.name}; on paper {_paper_gain(combinations[key], policy):.2f})"
                for key in ends
            )
            sentences.append(f"Simulated, copy_ahead carries {least} to {most} times the load of {policy}, at least.")
    for policy in POLICIES:
        shares = [
            loads[policy].rate / combinations[key].paper_rate(policy)
            for key, loads in carried.items()
            if policy in loads and not loads[policy].side
        ]
        if shares:
            sentences.append(f"{policy} carries {min(shares):.2f} to {max(shares):.2f} of its load on paper.")
    return sentences


def _about_latencies(carried: Carried, reports: Reports) -> list[str]:
    sentences = []
    for load, share in enumerate(LOADS):
        ratios = {key: ratio for key in carried if (ratio := _slower(key, load, reports))}
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            slow = sum(ratio > NOTHING_LEFT for ratio in ratios.values())
            sentences.append(
                f"At {share:g} of the load on paper, lru takes at most {ratios[worst]:.2f} times the mean latency of copy_ahead"
                f" ({worst.label}, {worst.name}), and more than {NOTHING_LEFT} times on {slow} of {len(ratios)}."
            )
    for key in carried:
        if ratio := _slower(key, LONG, reports):
            theirs, ours = (
                latency_text(reports[CombinationTrial(key, policy_name, LONG)]) for policy_name in ("lru", "copy_ahead")
            )
            sentences.append(
                f"With {LONG_S:g} s of arrivals at {LONG_LOAD:g} of the load on paper, lru takes {ratio:.2f} times the latency"
                f" of copy_ahead ({key.label}, {key.name}): {theirs} and {ours}."
            )
    return sentences
