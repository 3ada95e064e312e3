"""Swap or preserve, by kind of call and load: which of the two wins, each as it was published.

`swap` moves every paused context to the host and back while the batch waits; `preserve` keeps every one on the device. Beside
them `budgeted_swap`, the swap of InferCept that hides behind compute, and `copy_ahead`.
"""

from collections.abc import Iterator, Mapping, Sequence

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SweepRun
from jinfercept.sim.tables import TextTable, number_text
from studies.answer import StudyAnswer, StudyEffort
from studies.plots import COLOURS, CurvePanel, PlottedCurve
from studies.questions.latency import LATENCY_COLUMNS, latency_cells, limits_text, mean_ms, point
from studies.questions.loads import KINDS, kind_load

MACHINE = "paper-gptj-6b-a100"
KV_TOKENS = 53_000
SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Loads, over what would fill the machine if calls took no time."""
POLICIES = ("swap", "preserve", "budgeted_swap", "copy_ahead")
DRAIN_S = 600.0
"""More than the longest calls of a request together."""
CLOSE = 1.02
"""Latencies that differ by less count as equal."""

Found = Mapping[str, Mapping[float, Mapping[str, Report]]]
"""Reports by kind, share and policy."""


def ask(effort: StudyEffort) -> StudyAnswer:
    """Every kind at every load under the four policies."""
    duration_s = 6.0 if effort.quick else 60.0
    kinds, shares = (("math", "ve"), SHARES[1:4:2]) if effort.quick else (KINDS, SHARES)
    policies = POLICIES[:2] if effort.quick else POLICIES
    machine, runs = load_profile(MACHINE), list[SweepRun]()
    for kind in kinds:
        for share in shares:
            load = kind_load(kind, share, machine, KV_TOKENS, duration_s, effort.seed)
            for policy in policies:
                runs.append(SweepRun(Simulation(machine, policy, "history", duration_s, DRAIN_S, KV_TOKENS), load))
    reports = iter(effort.play(runs))
    by_kind = {kind: {share: {policy: next(reports) for policy in policies} for share in shares} for kind in kinds}
    return StudyAnswer(
        "Swap or preserve: which wins, by kind of call and load?",
        [_winners(by_kind), *(_table(kind, of) for kind, of in by_kind.items())],
        list(_findings(by_kind)),
        _panels(by_kind),
        [report for of in by_kind.values() for cell in of.values() for report in cell.values()],
    )


def winner(cell: Mapping[str, Report]) -> str:
    """ "swap" or "preserve", by mean latency; "=" if they are close."""
    ratio = mean_ms(cell["preserve"]) / mean_ms(cell["swap"])
    if 1 / CLOSE < ratio < CLOSE:
        return "="
    return "preserve" if ratio < 1 else "swap"


def _winners(by_kind: Found) -> TextTable:
    shares = list(next(iter(by_kind.values())))
    rows = [
        [kind, *(f"{winner(cell)} {mean_ms(cell['preserve']) / mean_ms(cell['swap']):.2f}" for cell in of.values())]
        for kind, of in by_kind.items()
    ]
    title = "The lower mean latency of swap and preserve, and that of preserve over that of swap, by load."
    return TextTable(title, ["calls", *(f"{share:.0%}" for share in shares)], rows)


def _table(kind: str, of: Mapping[float, Mapping[str, Report]]) -> TextTable:
    rows = [
        [f"{share:.0%}", number_text(report["rate"]), policy, *latency_cells(report)]
        for share, cell in of.items()
        for policy, report in cell.items()
    ]
    any_report = next(iter(next(iter(of.values())).values()))
    title = f"{kind}: ms per token; {limits_text(any_report)}."
    return TextTable(title, ["load", "requests/s", "policy", *LATENCY_COLUMNS], rows)


def _findings(by_kind: Found) -> Iterator[str]:
    for kind, of in by_kind.items():
        names = [(share, winner(cell)) for share, cell in of.items()]
        runs = [named for index, named in enumerate(names) if index == 0 or named[1] != names[index - 1][1]]
        texts = [f"{'neither' if name == '=' else name} from {share:.0%}" for share, name in runs]
        yield f"{kind}: {', '.join(texts)}."
    best = [min(cell, key=lambda policy: mean_ms(cell[policy])) for of in by_kind.values() for cell in of.values()]
    texts = [f"{policy} in {best.count(policy)}" for policy in dict.fromkeys(best)]
    yield f"The lowest mean latency of all policies in {len(best)} cells: {', '.join(texts)}."


def _panels(by_kind: Found) -> list[list[CurvePanel]]:
    panels = [
        CurvePanel(kind, _curves(of), axis="load, % of what fills the machine without calls")
        for kind, of in by_kind.items()
    ]
    return [panels[start : start + 3] for start in range(0, len(panels), 3)]


def _curves(of: Mapping[float, Mapping[str, Report]]) -> Sequence[PlottedCurve]:
    policies = list(next(iter(of.values())))
    return [
        PlottedCurve(
            policy, [(100 * share, point(mean_ms(cell[policy]))) for share, cell in of.items()], COLOURS[policy]
        )
        for policy in policies
    ]
