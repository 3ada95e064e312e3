"""Beside other optimisations: what is left to win at pauses where prefixes are shared, KV heads are few, or KV is quantised."""

from collections.abc import Mapping

from jinfercept.sim.run_stats import Report
from jinfercept.sim.tables import TextTable
from studies.answer import StudyAnswer, StudyEffort
from studies.capacity import Capacity, capacity, capacity_ratio
from studies.heat_map import HeatMap
from studies.plots import Bars
from studies.questions.combinations import (
    DROPPING,
    DROPPING_LOADS,
    KV_BYTES,
    LOADS,
    LONG,
    LONG_LOAD,
    LONG_S,
    NOTHING_LEFT,
    ON_PAPER,
    POLICIES,
    SHARED,
    SIMULATED,
    SLOWER,
    Combination,
    CombinationTrial,
    Combined,
    combined,
    runs,
)
from studies.questions.latency_grid import LATENCY_CELL, latency_text, mean_ms
from studies.questions.steady_state import most_over_dropping

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
        points = [(rate, mean_ms(report)) for rate, report in played if report]
        if unloaded and (most := capacity(points, SLOWER * mean_ms(unloaded))):
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
    return mean_ms(theirs) / mean_ms(ours) if theirs and ours else None


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
