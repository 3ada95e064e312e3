"""Many tools, bursts and clients that never come back: which policies bear them.

Requests come from `tool_mix`: hundreds of tools whose calls last from 1 ms to 1,000 s. One thing is varied at a time: how
requests arrive, how many of them call tools, how many clients never come back, and how many tools there are.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.arrivals import Arrival, arrival_times
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from jinfercept.sim.tables import TextTable, number_text
from studies.answer import StudyAnswer, StudyEffort
from studies.plots import COLOURS, Bars, CurvePanel, PlottedCurve
from studies.questions.latency import (
    LATENCY_COLUMNS,
    latency_cells,
    limits_text,
    mean_ms,
    num_good,
    point,
    useful_tokens_per_s,
)
from studies.questions.loads import (
    AgentRequests,
    Clients,
    OnOff,
    ParetoSources,
    ToolMix,
    on_off_times,
    self_similar_times,
)

MACHINE = "paper-gptj-6b-a100"
RATE = 9.0
KV_TOKENS, HOST_TOKENS = 53_000, 106_000
DRAIN_S = 8000.0
"""Longer than the calls of any request together: what is unfinished then is the policy's doing."""
NEAR = 1.01
"""Latencies up to so many times the lowest are as good as it."""
NUM_TOOLS, FEW_TOOLS = 300, 16
ON_OFF = OnOff(5.0, 5.0)
SOURCES = ParetoSources(8, 2.0, 1.4)

Times = Callable[[float, float, Random], Iterator[float]]
"""Arrival times, from a rate, seconds and a `Random`."""

ARRIVALS: Mapping[str, Times] = {
    "Poisson": arrival_times,
    "on-off": lambda rate, duration_s, rng: on_off_times(rate, duration_s, rng, ON_OFF),
    "self-similar": lambda rate, duration_s, rng: self_similar_times(rate, duration_s, rng, SOURCES),
}

ALL_RETURN = Clients(calling=1.0, leaving=0.0)


class VarietyLoad(NamedTuple):
    """A load.

    Attributes:
        arrivals: a name in `ARRIVALS`.
        clients: who calls tools, and who never comes back.
        num_tools: number of tools.
    """

    arrivals: str = "Poisson"
    clients: Clients = ALL_RETURN
    num_tools: int = NUM_TOOLS

    def __str__(self) -> str:
        calling, leaving = self.clients
        parts = [self.arrivals, f"{calling:.0%} call"] + [f"{leaving:.0%} never return"] * (leaving > 0)
        return ", ".join(parts + [f"{self.num_tools} tools"] * (self.num_tools != NUM_TOOLS))

    def load(self, duration_s: float, seed: int) -> SimulatedLoad[Sequence[Arrival]]:
        """The arrivals of `duration_s` seconds and their requests.

        With the same seed and number of tools, the n-th requests of two scenarios have the same tokens and tools, but for the
        calls that a scenario leaves out or that never return.
        """
        agents, rng = AgentRequests(ToolMix(self.num_tools, seed), self.clients), Random(f"requests {seed}")
        times = _as_many(ARRIVALS[self.arrivals], duration_s, seed)
        return SimulatedLoad(str(self), RATE, seed, [Arrival(at_s, agents.draw(rng)) for at_s in times])


def _as_many(draw: Times, duration_s: float, seed: int) -> list[float]:
    """Times of as many arrivals as the rate says, within 2 % or one: bursty processes differ much from run to run."""
    mean = RATE * duration_s
    for number in count():
        times = list(draw(RATE, duration_s, Random(f"arrivals {seed} {number}")))
        if abs(len(times) - mean) <= max(1.0, 0.02 * mean):
            return times
    raise AssertionError("one of endless draws fits")


class PolicyCase(NamedTuple):
    """A policy, and the estimator of those that ask one; "": it asks none."""

    policy: str
    estimator: str = ""

    def __str__(self) -> str:
        return f"{self.policy}, {self.estimator}" if self.estimator else self.policy


OURS = PolicyCase("copy_ahead", "history")
RIVAL = PolicyCase("lru_host")
CONTENDERS = (
    *(PolicyCase(policy) for policy in ("discard", "preserve", "swap", "lru", "lru_host")),
    *(PolicyCase(policy, estimator) for policy in ("min_waste", "copy_ahead") for estimator in ("elapsed", "history")),
)

BASE = VarietyLoad()
BURSTS = tuple(VarietyLoad(name) for name in ARRIVALS)
CALLING = tuple(VarietyLoad(clients=Clients(share, 0.0)) for share in (0.0, 0.25, 0.5, 1.0))
LEAVING = tuple(VarietyLoad(clients=Clients(1.0, share)) for share in (0.0, 0.1, 0.5, 0.7, 0.9))
FEW = VarietyLoad(num_tools=FEW_TOOLS)

Found = Mapping[VarietyLoad, Mapping[PolicyCase, Report]]


def ask(effort: StudyEffort) -> StudyAnswer:
    """Every scenario under every contender."""
    duration_s = 3.0 if effort.quick else 100.0
    scenarios = (BASE, BURSTS[1], LEAVING[3]) if effort.quick else _all()
    contenders = (PolicyCase("discard"), RIVAL, OURS) if effort.quick else CONTENDERS
    machine, runs = load_profile(MACHINE), list[SweepRun]()
    for scenario in scenarios:
        load = scenario.load(duration_s, effort.seed)
        for policy, estimator in contenders:
            simulation = Simulation(
                machine, policy, estimator or "elapsed", duration_s, DRAIN_S, KV_TOKENS, HOST_TOKENS
            )
            runs.append(SweepRun(simulation, load))
    reports = iter(effort.play(runs))
    by_scenario = {scenario: {contender: next(reports) for contender in contenders} for scenario in scenarios}
    return StudyAnswer(
        "Many kinds of tools, bursts, and clients that never come back",
        [_table(scenario, of) for scenario, of in by_scenario.items()],
        [_calls_sentence(effort.seed), *_findings(by_scenario)],
        _panels(by_scenario),
        [report for of in by_scenario.values() for report in of.values()],
    )


def _all() -> tuple[VarietyLoad, ...]:
    return tuple(dict.fromkeys((BASE, *BURSTS, *CALLING, *LEAVING, FEW)))


def _table(scenario: VarietyLoad, of: Mapping[PolicyCase, Report]) -> TextTable:
    any_report = next(iter(of.values()))
    title = f"{scenario}; {any_report['requests']:,} requests; ms per token; {limits_text(any_report)}."
    columns = ["policy", *LATENCY_COLUMNS, "first token, mean s", "p99 s", "useful tokens/device s"]
    rows = []
    for contender, report in of.items():
        first = [number_text(report["ttft_s"][part] or 0.0) for part in ("mean", "p99")]
        rows.append([str(contender), *latency_cells(report), *first, f"{useful_tokens_per_s(report):,.0f}"])
    return TextTable(title, columns, rows)


# -- sentences -----------------------------------------------------------------------------------------------------------


def _calls_sentence(seed: int, num_calls: int = 20_000) -> str:
    rng, mix = Random(seed), ToolMix(NUM_TOOLS, seed)
    calls = [mix.call(rng) for _ in range(num_calls)]
    seconds = [call_s for _, call_s in calls]
    over = [call_s for call_s in seconds if call_s > 60.0]
    return (
        f"Of {num_calls:,} calls of {len({tool for tool, _ in calls})} tools, "
        f"{sum(call_s < 1.0 for call_s in seconds) / num_calls:.1%} last under 1 s, and the {len(over) / num_calls:.1%} "
        f"over a minute hold {sum(over) / sum(seconds):.0%} of the time; the shortest takes {1e3 * min(seconds):.2g} ms, the "
        f"longest {max(seconds):,.0f} s."
    )


def _findings(by_scenario: Found) -> Iterator[str]:
    yield _winners(by_scenario)
    yield _against(by_scenario, OURS, RIVAL)
    for policy in ("min_waste", "copy_ahead"):
        history, elapsed = PolicyCase(policy, "history"), PolicyCase(policy, "elapsed")
        if elapsed in next(iter(by_scenario.values())):
            yield _against(by_scenario, history, elapsed)
    for scenario in BURSTS[1:]:
        if scenario in by_scenario:
            yield _burst(by_scenario, scenario)
    yield _left(by_scenario)


def _winners(by_scenario: Found) -> str:
    best = Counter[str]()
    for of in by_scenario.values():
        least = min(map(mean_ms, of.values()))
        best.update(str(contender) for contender, report in of.items() if mean_ms(report) <= NEAR * least)
    text = "; ".join(f"{name} in {count}" for name, count in best.most_common())
    return f"The lowest mean latency in {len(by_scenario)} scenarios, or within {NEAR - 1:.0%} of it: {text}."


def _against(by_scenario: Found, contender: PolicyCase, other: PolicyCase) -> str:
    """The range of the ratio of two mean latencies."""
    ratios = sorted(
        (mean_ms(of[contender]) / mean_ms(of[other]), str(scenario)) for scenario, of in by_scenario.items()
    )
    (least, best), (most, worst) = ratios[0], ratios[-1]
    return f"{contender} has {least:.2f} ({best}) to {most:.2f} ({worst}) times the mean latency of {other}."


def _burst(by_scenario: Found, scenario: VarietyLoad) -> str:
    texts = []
    for contender, report in by_scenario[scenario].items():
        calm = by_scenario[BASE][contender]
        p99s = [each_report["normalized_latency_paper_ms_per_token"]["p99"] for each_report in (report, calm)]
        texts.append(f"{contender} {p99s[0] / p99s[1]:.2f}")
    return f"{scenario.arrivals} arrivals multiply the 99th percentile of Poisson arrivals by: {'; '.join(texts)}."


def _left(by_scenario: Found) -> str:
    scenario = max(
        (leaving_load for leaving_load in LEAVING if leaving_load in by_scenario),
        key=lambda leaving_load: leaving_load.clients.leaving,
    )
    useful = {contender: useful_tokens_per_s(report) for contender, report in by_scenario[scenario].items()}
    good = {contender: num_good(report) for contender, report in by_scenario[scenario].items()}
    worst, best = (pick(useful, key=lambda contender: useful[contender]) for pick in (min, max))
    least, most = min(good, key=lambda contender: good[contender]), max(good, key=lambda contender: good[contender])
    return (
        f"Where {scenario.clients.leaving:.0%} never come back, useful tokens per second of the device's work are "
        f"{useful[worst]:,.0f} ({worst}) to {useful[best]:,.0f} ({best}; {OURS} {useful[OURS]:,.0f}, {RIVAL} "
        f"{useful[RIVAL]:,.0f}); of {by_scenario[scenario][most]['requests']:,} requests {good[most]:.0f} finish within the "
        f"limits under {most}, {good[least]:.0f} under {least}."
    )


# -- the picture -----------------------------------------------------------------------------------------------------------


def _panels(by_scenario: Found) -> list[list[CurvePanel | Bars]]:
    calling = [
        (100 * scenario.clients.calling, by_scenario[scenario]) for scenario in CALLING if scenario in by_scenario
    ]
    leaving = [
        (100 * scenario.clients.leaving, by_scenario[scenario]) for scenario in LEAVING if scenario in by_scenario
    ]
    bursts = {
        str(contender): {
            burst.arrivals: _p99(by_scenario[burst][contender]) for burst in BURSTS if burst in by_scenario
        }
        for contender in by_scenario[BASE]
        if contender.policy in ("lru", "lru_host", "min_waste", "copy_ahead")
    }
    unit = "mean normalized latency, ms/token"
    return [
        [
            CurvePanel("latency by requests with calls", _curves(calling, mean_ms), None, unit, None, "% that call"),
            Bars("latency by arrivals", "99th percentile, ms/token", bursts, beside=True),
        ],
        [
            CurvePanel("latency by clients that leave", _curves(leaving, mean_ms), None, unit, None, "% that leave"),
            CurvePanel(
                "requests within the limits",
                _curves(leaving, _good_share),
                None,
                "% of those that come back",
                None,
                "% that leave",
            ),
        ],
    ]


def _curves(
    points: Sequence[tuple[float, Mapping[PolicyCase, Report]]], value: Callable[[Report], float]
) -> list[PlottedCurve]:
    return [
        PlottedCurve(
            str(contender),
            [(x, point(value(of[contender]))) for x, of in points],
            COLOURS[contender.policy] if contender.estimator != "elapsed" else None,
        )
        for contender in points[0][1]
    ]


def _good_share(report: Report) -> float:
    """% of the requests whose client comes back; at least 0.1, for a logarithmic axis."""
    returning = report["requests"] - report["abandoned"]
    return max(0.1, 100 * num_good(report) / (returning or 1))


def _p99(report: Report) -> float:
    return report["normalized_latency_paper_ms_per_token"]["p99"] or 0.0
