"""What a pause wastes in an engine that drops contexts: one kind of call at a time, under vLLM's policy of 2024.

`discard` requeues a returning request at the tail and computes its whole context again, before any sequence decodes. Beside it
`copy_ahead`, to show what of the waste is not necessary.
"""

from collections.abc import Iterator, Sequence

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SweepRun
from jinfercept.sim.tables import TextTable, number_text
from studies.answer import StudyAnswer, StudyEffort
from studies.plots import Bars
from studies.questions.latency import LATENCY_COLUMNS, latency_cells, limits_text, mean_ms
from studies.questions.loads import KINDS, MIXED, kind_load

MACHINE = "paper-gptj-6b-a100"
KV_TOKENS = 53_000
SHARES = (0.25, 0.5)
"""Loads, over what would fill the machine if calls took no time."""
BASELINE, RIVAL = "discard", "copy_ahead"

Cell = tuple[str, float, str]
"""A kind, a share of the full load, and a policy."""


def ask(effort: StudyEffort) -> StudyAnswer:
    """Requests whose calls are all of one kind, and the mix, at two loads under the baseline and under `copy_ahead`."""
    duration_s = 10.0 if effort.quick else 120.0
    machine = load_profile(MACHINE)
    cells = [
        (kind, share, policy)
        for kind in ((*KINDS, MIXED) if not effort.quick else ("math", "ve"))
        for share in (SHARES if not effort.quick else SHARES[:1])
        for policy in (BASELINE, RIVAL)
    ]
    runs = [
        SweepRun(
            Simulation(machine, policy, "history", duration_s, kv_tokens=KV_TOKENS),
            kind_load(kind, share, machine, KV_TOKENS, duration_s, effort.seed),
        )
        for kind, share, policy in cells
    ]
    reports = dict(zip(cells, effort.play(runs), strict=True))
    shares = list(dict.fromkeys(share for _, share, _ in cells))
    return StudyAnswer(
        "What does a pause waste where contexts are dropped?",
        [_table(reports, share) for share in shares],
        [sentence for share in shares for sentence in _findings(reports, share)],
        [[_bars(reports, share) for share in shares]],
        list(reports.values()),
    )


def _of(reports: dict[Cell, Report], share: float, policy: str) -> dict[str, Report]:
    """The reports of a load and a policy, by kind."""
    return {kind: report for (kind, *rest), report in reports.items() if rest == [share, policy]}


def _waste(report: Report) -> Sequence[float]:
    """Shares of device time, of latency and of the pool's token·seconds."""
    recompute = report["recompute_share"]
    return recompute["forward_time"], recompute["request_latency"], report["waste_fraction"]


def _table(reports: dict[Cell, Report], share: float) -> TextTable:
    columns = ["calls", "requests/s", "policy", "device time", "latency", "memory", *LATENCY_COLUMNS]
    rows = [
        [
            kind,
            number_text(report["rate"]),
            policy,
            *(f"{value:.1%}" for value in _waste(report)),
            *latency_cells(report),
        ]
        for (kind, at, policy), report in reports.items()
        if at == share
    ]
    title = f"Load of {share:.0%}: recomputation, share of device time and of latency; memory wasted; then ms per token"
    return TextTable(f"{title}; {limits_text(next(iter(reports.values())))}.", columns, rows)


def _findings(reports: dict[Cell, Report], share: float) -> Iterator[str]:
    dropped, kept = _of(reports, share, BASELINE), _of(reports, share, RIVAL)
    kinds = [kind for kind in dropped if kind != MIXED]
    most = max(kinds, key=lambda kind: _waste(dropped[kind])[0])
    least = min(kinds, key=lambda kind: _waste(dropped[kind])[0])
    yield (
        f"At a load of {share:.0%}, recomputation takes {_waste(dropped[least])[0]:.0%} ({least}) to "
        f"{_waste(dropped[most])[0]:.0%} ({most}) of the device's time under {BASELINE}, and at most "
        f"{max(_waste(kept[kind])[0] for kind in kinds):.1%} under {RIVAL}."
    )
    slower = {kind: mean_ms(dropped[kind]) / mean_ms(kept[kind]) for kind in kinds}
    most, least = max(slower, key=lambda kind: slower[kind]), min(slower, key=lambda kind: slower[kind])
    yield f"There {BASELINE} has {slower[least]:.2f} ({least}) to {slower[most]:.2f} ({most}) times the latency of {RIVAL}."
    if MIXED in dropped:
        time, _, memory = _waste(dropped[MIXED])
        yield (
            f"For the mix it is {time:.0%} of the device's time and {memory:.0%} of the memory "
            f"(InferCept's paper, at its own load: 37 to 40 % and 27 %)."
        )


def _bars(reports: dict[Cell, Report], share: float) -> Bars:
    names = ("of device time", "of latency", "memory")
    bars = {
        kind: {name: 100 * value for name, value in zip(names, _waste(report), strict=True)}
        for kind, report in _of(reports, share, BASELINE).items()
    }
    return Bars(f"waste under {BASELINE}, load of {share:.0%}", "%", bars, beside=True)
