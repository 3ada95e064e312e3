"""More load than the machine carries: goodput, and a greedy key beside modest ones.

Requests are InferCept's mix, and its kinds with short calls alone, on its constants for GPT-J-6B on an A100. What arrives while
the machine fills up is not counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from random import Random
from statistics import fmean
from typing import NamedTuple

from jinfercept.engine.meter.counts import LIMITS
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.reports import percentiles
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from jinfercept.sim.tables import TextTable, number_text
from jinfercept.sim.workload import MIXED_WEIGHTS, Script, draw
from studies.answer import StudyAnswer, StudyEffort
from studies.plots import CurvePanel, PlottedCurve
from studies.questions.latency import limits_text, num_good, point
from studies.questions.steady_state import demand, steady_state

MACHINE = "paper-gptj-6b-a100"
KV_TOKENS = 53_000
LOADS = (0.5, 1.0, 1.5, 2.0)
"""Shares of what the machine carries on paper."""
ARRIVING_S, WARM_UP_S, DRAIN_S = 40.0, 15.0, 150.0
KINDS: Mapping[str, Mapping[str, float]] = {"mixed": MIXED_WEIGHTS, "short calls": {"math": 1.0, "qa": 1.0, "ve": 1.0}}
"""Weights of the kinds of requests. Calls of the second take less than a few seconds, and come after a few
tokens each, so that every step that is full costs such a request a large part of what it may take per token."""
MODEST, MODEST_LOAD = ("a", "b", "c", "d"), 0.15
"""Keys that stay within their share, and the load of each."""
GREEDY, GREEDY_LOAD = "greedy", 2.0
"""The fifth key, which sends ten times its share of a fifth."""
AIM = 1.3
_SAMPLES = 4000

OURS = Simulation(load_profile(MACHINE), "copy_ahead", "history", kv_tokens=KV_TOKENS)
WAYS: Mapping[str, Simulation] = {
    "as vLLM queues": replace(OURS, policy="lru", preemption="recompute", max_num_seqs=256, prefix_caching=True),
    "takes all": OURS,
}
"""First come first served with pages of paused contexts in a prefix cache; and this engine."""
SHARING: Mapping[str, Simulation] = {
    "fair": OURS,
    "one queue": replace(OURS, fair=False),
}
"""How keys share the engine beside a greedy one."""
ALONE = "without the greedy key"
SHARING_SEEDS = 5
"""Seeds of a way of sharing, whose requests are taken together: a 99th percentile of one is that of two requests."""


class OverloadRuns(NamedTuple):
    """What the runs found.

    Attributes:
        rates: requests per second that the machine carries on paper, by the kinds of requests.
        by_load: a report for each way, kinds and load.
        by_sharing: reports with the greedy key by way of sharing, and without it, one for each seed.
        counted_s: seconds of arrivals that count.
    """

    rates: Mapping[str, float]
    by_load: Mapping[tuple[str, str, float], Report]
    by_sharing: Mapping[str, Sequence[Report]]
    counted_s: float


def ask(effort: StudyEffort) -> StudyAnswer:
    """Every way under every load, and every way of sharing with and without the greedy key."""
    seconds = (1.5, 0.5) if effort.quick else (ARRIVING_S, WARM_UP_S)
    loads = (0.5, 2.0) if effort.quick else LOADS
    ways = [name for name in WAYS if not effort.quick or name != "as vLLM queues"]
    sharing = [name for name in SHARING if not effort.quick or name == "fair"]
    rates = {kinds: _rate(kinds) for kinds in (("mixed",) if effort.quick else KINDS)}
    first = [(way, kinds, load) for kinds in rates for way in ways for load in loads if kinds == "mixed" or load >= 1.0]
    runs = [
        _run(WAYS[way], f"{way}, {load:g}", [("", load)], kinds, rates[kinds], effort.seed, seconds)
        for way, kinds, load in first
    ]
    modest = [(name, MODEST_LOAD) for name in MODEST]
    crowd = [*modest, (GREEDY, GREEDY_LOAD)]
    second, num_seeds = (ALONE, *sharing), 1 if effort.quick else SHARING_SEEDS
    runs += [
        _run(
            SHARING.get(name, OURS),
            name,
            modest if name == ALONE else crowd,
            "mixed",
            rates["mixed"],
            effort.seed + number,
            seconds,
        )
        for name in second
        for number in range(num_seeds)
    ]
    reports = iter(effort.play(runs))
    by_load = {key: next(reports) for key in first}
    by_sharing = {name: [next(reports) for _ in range(num_seeds)] for name in second}
    return answer(OverloadRuns(rates, by_load, by_sharing, seconds[0] - seconds[1]))


def answer(overload_runs: OverloadRuns) -> StudyAnswer:
    """Tables, findings and panels."""
    reports = [*overload_runs.by_load.values(), *chain(*overload_runs.by_sharing.values())]
    return StudyAnswer(
        "What happens beyond saturation, and what does one greedy key cost the others?",
        [_load_table(overload_runs), _sharing_table(overload_runs)],
        list(_findings(overload_runs)),
        [_panels(overload_runs)],
        [_row(report) for report in reports],
    )


def _draw(rng: Random, kinds: str) -> Script:
    return draw("mixed", rng, weights=KINDS[kinds])


def _rate(kinds: str) -> float:
    """Requests per second that the machine carries on paper if pauses cost nothing."""
    rng = Random(0)
    need = demand([_draw(rng, kinds) for _ in range(_SAMPLES)])
    return steady_state(OURS.profile, need, KV_TOKENS, OURS.profile.saturation).rate


def _run(
    simulation: Simulation,
    name: str,
    keys: Sequence[tuple[str, float]],
    kinds: str,
    rate: float,
    seed: int,
    seconds: tuple[float, float],
) -> SweepRun:
    """A run in which each key sends a Poisson process of its own, the same in every run with the seed."""
    arriving_s, warm_up_s = seconds
    coming = list[Arrival]()
    for key, load in keys:
        rng = Random(f"{key} {seed}")
        drawn = arrivals(lambda rng=rng: _draw(rng, kinds), load * rate, arriving_s, rng)
        coming += [Arrival(at_s, script._replace(tenant=key)) for at_s, script in drawn]
    simulation = replace(simulation, duration_s=arriving_s, warm_up_s=warm_up_s, drain_s=DRAIN_S)
    total = sum(load for _, load in keys) * rate
    return SweepRun(simulation, SimulatedLoad(name, total, seed, sorted(coming, key=lambda arrival: arrival.at_s)))


def _row(report: Report) -> Report:
    """A report without its lists, for which a row has no room."""
    return {key: value for key, value in report.items() if not (isinstance(value, list) or key == "tenant_ttft_s")}


def _modest_s(reports: Sequence[Report]) -> list[float]:
    """Seconds to the first token of all requests of the modest keys."""
    return [seconds for report in reports for key in MODEST for seconds in report["tenant_ttft_s"].get(key, ())]


def _p99_s(overload_runs: OverloadRuns, name: str) -> float:
    spread = percentiles(_modest_s(overload_runs.by_sharing[name]), (99,))
    return spread["p99"] if spread else 0.0


# -- tables ------------------------------------------------------------------------------------------------------------


def _load_table(overload_runs: OverloadRuns) -> TextTable:
    rows = []
    for (way, kinds, load), report in overload_runs.by_load.items():
        first = [number_text(report["ttft_s"][part] or 0.0) for part in ("mean", "p50", "p99")]
        goodput = num_good(report) / overload_runs.counted_s
        rows.append([kinds, way, f"{load:g}", f"{goodput:.2f}", *first, str(report["preemptions"])])
    any_report = next(iter(overload_runs.by_load.values()))
    rates = ", ".join(f"{rate:.2f} requests/s ({kinds})" for kinds, rate in overload_runs.rates.items())
    title = f"By load, 1 being {rates}; first token in seconds; {limits_text(any_report)}."
    columns = ["requests", "", "load", "goodput/s", "first token, mean", "p50", "p99", "preemptions"]
    return TextTable(title, columns, rows)


def _sharing_table(overload_runs: OverloadRuns) -> TextTable:
    rows, alone_s = [], _p99_s(overload_runs, ALONE)
    for name, reports in overload_runs.by_sharing.items():
        modest = _modest_s(reports)
        spread = percentiles(modest, (50, 90, 99)) or dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
        ratio = spread["p99"] / alone_s if alone_s else 0.0
        served = len(_modest_s(overload_runs.by_sharing[ALONE]))
        greedy = sum(len(report["tenant_ttft_s"].get(GREEDY, ())) for report in reports)
        goodput = fmean(num_good(report) for report in reports) / overload_runs.counted_s
        first = [number_text(spread[part]) for part in ("p50", "p90", "p99")]
        rows.append([name, *first, f"{ratio:.2f}", f"{len(modest)} of {served}", str(greedy), f"{goodput:.2f}"])
    title = (
        f"{len(MODEST)} keys of {MODEST_LOAD:.0%} of the load each beside one that sends "
        f"{GREEDY_LOAD:.0%}: seconds to their first token."
    )
    columns = ["", "p50", "p90", "p99", "p99 over alone", "taken", "greedy taken", "goodput/s of all"]
    return TextTable(title, columns, rows)


# -- sentences ---------------------------------------------------------------------------------------------------------


def _findings(overload_runs: OverloadRuns) -> Iterator[str]:
    heaviest = max(load for *_, load in overload_runs.by_load)
    for way, kinds in dict.fromkeys((way, kinds) for way, kinds, _ in overload_runs.by_load):
        goodputs = {
            load: num_good(report) / overload_runs.counted_s
            for (*key, load), report in overload_runs.by_load.items()
            if key == [way, kinds]
        }
        best = max(goodputs, key=lambda load: goodputs[load])
        kept, p99 = (
            goodputs[heaviest] / (goodputs[best] or 1.0),
            overload_runs.by_load[way, kinds, heaviest]["ttft_s"]["p99"],
        )
        yield (
            f"{way}, {kinds}: goodput is highest at load {best:g} with {goodputs[best]:.2f} requests/s; at {heaviest:g} it is "
            f"{kept:.2f} of that, and the 99th percentile of first tokens {p99 or 0.0:.2f} s."
        )
    alone_s = _p99_s(overload_runs, ALONE)
    for name in overload_runs.by_sharing:
        if name != ALONE:
            ratio = _p99_s(overload_runs, name) / (alone_s or 1.0)
            met = "within" if ratio <= AIM else "not within"
            yield f"{name}: a greedy key makes the others' 99th percentile {ratio:.2f} times as long, {met} {AIM:g}."


# -- the picture -------------------------------------------------------------------------------------------------------


def _panels(overload_runs: OverloadRuns) -> list[CurvePanel]:
    ways = list(dict.fromkeys(way for way, *_ in overload_runs.by_load))
    goodputs, firsts = list[PlottedCurve](), list[PlottedCurve]()
    for way in ways:
        of = [(load, report) for (*key, load), report in overload_runs.by_load.items() if key == [way, "mixed"]]
        goodputs.append(
            PlottedCurve(
                way, [(load, point(max(0.01, num_good(report) / overload_runs.counted_s))) for load, report in of]
            )
        )
        firsts.append(PlottedCurve(way, [(load, point(report["ttft_s"]["p99"] or 0.01)) for load, report in of]))
    axis = f"load; 1 is {overload_runs.rates['mixed']:.1f} requests/s"
    places = [
        (float(number), point(_p99_s(overload_runs, name) or 0.01))
        for number, name in enumerate(overload_runs.by_sharing)
    ]
    return [
        CurvePanel("goodput", goodputs, unit="requests/s within the limits", axis=axis),
        CurvePanel("99th percentile of first tokens", firsts, LIMITS.first_token_s, "seconds", axis=axis),
        CurvePanel(
            "modest keys' 99th percentile beside a greedy key",
            [PlottedCurve(None, places)],
            AIM * (_p99_s(overload_runs, ALONE) or 0.01),
            "seconds",
            axis="",
            ticks=[name.replace(", ", "\n").replace("the greedy", "the\ngreedy") for name in overload_runs.by_sharing],
        ),
    ]
