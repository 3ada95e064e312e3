"""The report of `python -m studies paper`: tables in Markdown and the panels of its plot, beside the paper's numbers.

The published results are those of InferCept (arXiv 2402.01869).
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from jinfercept.engine.meter.ledger import WasteTotals
from jinfercept.errors import ConfigError, shown
from jinfercept.sim.reports import Range, group, latency_ms
from jinfercept.sim.simulation import BOUNDS
from jinfercept.sim.sweep import Report
from studies.answer import markdown_table
from studies.plots import COLOURS, Bars, CurvePanel, Panel, PlottedCurve

Points = Sequence[tuple[float, float]]
"""(requests per second, latency), by ascending rate."""

LATENCY_FACTOR = 5.0
"""Curves are compared at this multiple of the low-load latency."""


class Capacity(NamedTuple):
    """The load at which a latency is reached.

    Attributes:
        rate: requests per second.
        side: "": between two points of the curve; "<": at most its first point; ">": beyond its last point.
    """

    rate: float
    side: str = ""

    def __str__(self) -> str:
        return f"{self.side}{self.rate:.2f}"


def latency_threshold(curves: Iterable[Points]) -> float:
    """`LATENCY_FACTOR` times the low-load latency, which is the least of all curves; the same for every curve."""
    return LATENCY_FACTOR * min(latency for points in curves for _, latency in points)


def capacity(points: Points, latency: float) -> Capacity | None:
    """The load at which a curve first reaches a latency, interpolated in its logarithm; None for no points."""
    if not points:
        return None
    before = None
    for rate, value in points:
        if value >= latency:
            if before is None:
                return Capacity(rate, "<")
            share = math.log(latency / before[1]) / math.log(value / before[1])
            return Capacity(before[0] + share * (rate - before[0]))
        before = (rate, value)
    return Capacity(points[-1][0], ">")


def capacity_ratio(load: Capacity | None, base: Capacity | None) -> str:
    """A load over that of `base`, as text, with `>` or `<` where one of them is only a bound; `-` if unknown."""
    if load is None or base is None:
        return "-"
    sides = {load.side, {"<": ">", ">": "<", "": ""}[base.side]} - {""}
    if len(sides) > 1:
        return "-"
    return f"{''.join(sides)}{load.rate / base.rate:.2f}"


SYSTEMS: Mapping[str, str] = {
    "vLLM": "discard",
    "ImprovedDiscard": "improved_discard",
    "Preserve": "preserve",
    "Swap": "swap",
    "InferCept": "min_waste",
}
"""The policy that stands for each of the paper's systems."""

WASTE: Mapping[str, float] = {"discard": 0.27, "swap": 0.26, "min_waste": 0.0069}
"""Wasted share of GPU memory × time, by policy."""


class AblationStep(NamedTuple):
    """A step of the ablation: a policy, what it adds, and the change of normalized latency from the step before."""

    policy: str
    adds: str
    change: float | None


ABLATION = (
    AblationStep("discard", "vLLM of the time", None),
    AblationStep("improved_discard", "requeue by original arrival", -0.245),
    AblationStep("chunked_discard", "chunked recomputation", -0.078),
    AblationStep("budgeted_swap", "swap within the free link budget", -0.127),
    AblationStep("heuristic_preserve", "short automated calls keep their context", -0.461),
    AblationStep("min_waste", "the least waste decides", -0.464),
)

Figure = Mapping[str, Mapping[str, list[tuple[float, float]]]]
"""By panel and policy: (requests per second, ms per token), by ascending rate."""

_COLUMNS = ("panel", "system", "req_per_s", "normalized_latency_ms_per_token")


def load_figure(path: str | Path) -> Figure:
    """The paper's Figure 2 from a digitised table: a CSV file with the columns panel, system, req_per_s and
    normalized_latency_ms_per_token.

    Raises:
        ConfigError: no such file, other columns, an unknown system, or something that is no number.
    """
    curves_by_panel: dict[str, dict[str, list[tuple[float, float]]]] = {}
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if not set(_COLUMNS) <= set(rows.fieldnames or ()):
                got = ", ".join(rows.fieldnames or ()) or "nothing"
                raise ConfigError(f"{path} is no table of the figure", got=got, fix=f"columns {', '.join(_COLUMNS)}")
            for row in rows:
                panel, policy, point = _point(row, f"{path}, line {rows.line_num}")
                curves_by_panel.setdefault(panel, {}).setdefault(policy, []).append(point)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the reference cannot be read", got=f"{path} ({error})", fix="name a .csv file") from None
    return {
        panel: {policy: sorted(points) for policy, points in curves.items()}
        for panel, curves in curves_by_panel.items()
    }


def _point(row: Mapping[str, str], where: str) -> tuple[str, str, tuple[float, float]]:
    panel, system, *texts = (row[name] for name in _COLUMNS)
    if system not in SYSTEMS:
        raise ConfigError(f"{where}: no such system", got=shown(system), fix=f"one of {', '.join(SYSTEMS)}")
    try:
        rate, latency = (float(text) for text in texts)
    except (TypeError, ValueError):
        rate = latency = math.nan
    if not (0 < rate < math.inf and 0 < latency < math.inf):
        raise ConfigError(f"{where}: not a rate and a latency", got=texts, fix="two numbers above 0")
    return panel, SYSTEMS[system], (rate, latency)


PANELS: Mapping[str, str] = {
    "paper-gptj-6b-a100": "6B_1xA100",
    "paper-vicuna-13b-2xa100": "13B_TP2",
    "roofline-llama-13b-a100": "13B_1xA100",
    "roofline-llama-3-70b-4xa100": "70B_TP4",
}
"""Which panel of the paper's Figure 2 shows a profile's model and machine."""

DRAWN = (*SYSTEMS.values(), "lru_host", "copy_ahead", "bound")
"""Policies in the picture of Figure 2; the tables have all."""

WIDE_STEPS = "mixed, wide steps"
"""The mixed workload again for `chunked_discard`, whose steps are as large as those of whole prompts."""

PARTS = tuple(part.name for part in fields(WasteTotals))
"""The parts of waste, as in a report."""


class Study(NamedTuple):
    """The simulated runs on one machine.

    Attributes:
        profile: its name.
        reports: of all runs on it.
        kv_tokens, pool_source: its device pool, and why it is so large.
    """

    profile: str
    reports: Sequence[Report]
    kv_tokens: int
    pool_source: str

    @property
    def mixed(self) -> dict[str, dict[float, Report]]:
        """The runs of the mixed workload that went well, by policy and rate."""
        by_policy: dict[str, dict[float, Report]] = {}
        for report in self.reports:
            if report["workload"] == "mixed" and latency_ms(report) is not None:
                by_policy.setdefault(report["policy"], {})[report["rate"]] = report
        return by_policy

    @property
    def wide_steps(self) -> dict[float, Report]:
        """The runs of `WIDE_STEPS` that went well, by rate."""
        wide = (report for report in self.reports if report["workload"] == WIDE_STEPS)
        return {report["rate"]: report for report in wide if latency_ms(report) is not None}

    @property
    def has_results(self) -> bool:
        """Whether any policy was measured on the mixed workload."""
        return any(policy not in BOUNDS for policy in self.mixed)

    @property
    def points(self) -> dict[str, Points]:
        """Latency against rate, by policy."""
        return {
            policy: [(rate, latency) for rate, report in runs.items() if (latency := latency_ms(report)) is not None]
            for policy, runs in self.mixed.items()
        }

    @property
    def threshold_ms(self) -> float:
        """The latency at which loads are compared; bounds do not count for it."""
        return latency_threshold(points for policy, points in self.points.items() if policy not in BOUNDS)

    @property
    def capacities(self) -> dict[str, Capacity | None]:
        """The load that each policy carries at that latency."""
        return {policy: capacity(points, self.threshold_ms) for policy, points in self.points.items()}

    @property
    def common_rate(self) -> float:
        """Where waste and ablation are read: the first rate at which `discard` is past its limit, or the last one."""
        rates = sorted({rate for runs in self.mixed.values() for rate in runs})
        most = self.capacities.get("discard")
        past = [rate for rate in rates if most is not None and not (most.side == ">" or rate < most.rate)]
        return past[0] if past else rates[-1]


class Summary(NamedTuple):
    """The contents of the report.

    Attributes:
        studies: one for each machine.
        figure: the paper's Figure 2; empty if it was not given.
        workload: source of the requests.
        duration_s, seed: of the arrivals.
    """

    studies: Sequence[Study]
    figure: Figure
    workload: str
    duration_s: float
    seed: int

    def reference(self, study: Study) -> Mapping[str, Points]:
        """The paper's curves for a study's machine, by policy."""
        return self.figure.get(PANELS.get(study.profile, ""), {})


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(summary: Summary) -> str:
    """The whole report."""
    parts = [
        "# The paper's experiments, simulated",
        f"Requests: {summary.workload}. Poisson arrivals for {summary.duration_s:g} s, seed {summary.seed}, then as long "
        "again to finish. Latency is the paper's: (finish − arrival − time in interceptions) / output tokens, returned "
        "tokens included, averaged over all that arrived: what is unfinished counts with the time that it has had so far over "
        "the tokens that it was to get. Durations are predicted by their age, as in the paper; `copy_ahead` predicts from "
        "history. `bound` has infinite memory, `free_pause` moves paused contexts at no cost. They are marks to measure by, "
        "and no proofs: `free_pause` still waits for the step in which a page lands, so that a policy that keeps pages can "
        "be a little faster.",
    ]
    for study in summary.studies:
        if not study.has_results:
            parts += [f"## {study.profile}", "Nothing was measured."]
            continue
        parts += [
            f"## {study.profile}",
            f"Device pool: {study.kv_tokens:,} tokens, {study.pool_source}. {_steps_text(study)}",
            *_figure_2(study),
            *_loads(study, summary.reference(study)),
            *_waste(study),
            *_ablation(study),
            *_kinds(study),
        ]
    return "\n\n".join(parts) + "\n"


def _steps_text(study: Study) -> str:
    sizes = {report["step_tokens"] for runs in study.mixed.values() for report in runs.values()}
    if len(sizes) == 1:
        return f"Steps hold at most {sizes.pop():,} query tokens."
    return f"Steps hold at most {min(sizes):,} query tokens, and where prompts are whole {max(sizes):,}."


def _figure_2(study: Study) -> Iterable[str]:
    from pandas import DataFrame

    def by_rate(value: Callable[[Report], str]) -> str:
        """A row for each policy, a column for each rate."""
        texts = {policy: {rate: value(report) for rate, report in runs.items()} for policy, runs in study.mixed.items()}
        frame = DataFrame.from_dict(texts, orient="index").sort_index(axis="columns").fillna("-")
        return markdown_table(frame.rename(columns="{:g}".format).rename_axis("requests/s"), index=True)

    yield "### Figure 2: normalized latency, ms per token, by load"
    yield by_rate(lambda report: _number(latency_ms(report)))
    yield "Requests left unfinished, in percent of those that arrived:"
    yield by_rate(lambda report: f"{100 * report['unfinished'] / (report['requests'] or 1):.0f}")


def _loads(study: Study, reference: Mapping[str, Points]) -> Iterable[str]:
    from pandas import DataFrame

    ours = study.capacities
    theirs: dict[str, Capacity | None] = {}
    yield "### Load at equal latency"
    words = f"At {LATENCY_FACTOR:g} × the low-load latency: {study.threshold_ms:.1f} ms per token here"
    if reference:
        at = latency_threshold(reference.values())
        theirs = {policy: capacity(points, at) for policy, points in reference.items()}
        words += f", {at:.1f} in the paper's figure"
    words += ". Loads are requests per second, ratios are to `discard`."
    if reference:
        words += (
            " Order and ratios compare, positions do not: the authors' engine was slower than their constants say, and "
            "reading contexts is not in them."
        )
    yield words
    rows = []
    for policy, load in ours.items():
        row = [policy, str(load or "-"), capacity_ratio(load, ours.get("discard"))]
        if reference:
            row += [str(theirs.get(policy) or "-"), capacity_ratio(theirs.get(policy), theirs.get("discard"))]
        rows.append(row)
    yield markdown_table(
        DataFrame(rows, columns=["policy", "load", "ratio", *(["paper: load", "ratio"] if reference else [])])
    )


def _waste(study: Study) -> Iterable[str]:
    from pandas import DataFrame

    rate = study.common_rate
    yield f"### Waste at {rate:g} requests/s"
    yield (
        "In percent of the pool's token·seconds: held by paused requests (`preserve`), during recomputation, while a step "
        "waits for transfers (`stall`), and by running requests without a token in the step (`fetch`). Pages that "
        "`copy_ahead`, `lru` and `lru_host` keep count here, though a request that needs the memory gets it."
    )
    rows = []
    for policy, runs in study.mixed.items():
        if rate in runs and policy not in BOUNDS:
            shares = waste_shares(runs[rate])
            paper = f"{100 * WASTE[policy]:.2g}" if policy in WASTE else ""
            recompute = f"{100 * runs[rate]['recompute_share']['forward_time']:.1f}"
            cells = (f"{100 * share:.2f}" for share in (*shares.values(), sum(shares.values())))
            rows.append([policy, *cells, paper, recompute])
    yield markdown_table(
        DataFrame(rows, columns=["policy", *PARTS, "sum", "paper", "recomputation, % of forward time"])
    )


def waste_shares(report: Report) -> dict[str, float]:
    """The parts of waste, each as a fraction of the pool's token·seconds over the run."""
    whole = report["kv_tokens"] * report["simulated_s"] or 1.0
    return {part: report["waste_token_s"][part] / whole for part in PARTS}


def _ablation(study: Study) -> Iterable[str]:
    from pandas import DataFrame

    rate, before = study.common_rate, None
    rows = []
    for policy, adds, change in ABLATION:
        report = study.mixed.get(policy, {}).get(rate)
        latency = latency_ms(report) if report is not None else None
        ours = f"{latency / before - 1:+.1%}" if latency is not None and before is not None else ""
        rows.append([policy, adds, _number(latency), ours, f"{change:+.1%}" if change is not None else ""])
        wide = study.wide_steps.get(rate) if policy == "chunked_discard" else None
        if wide is not None and before is not None and (latency_wide := latency_ms(wide)) is not None:
            adds = f"or chunks in steps of {wide['step_tokens']:,}, as whole prompts have"
            rows.append([policy, adds, _number(latency_wide), f"{latency_wide / before - 1:+.1%}", ""])
        before = latency
    yield f"### Ablation at {rate:g} requests/s"
    yield markdown_table(DataFrame(rows, columns=["setting", "adds", "ms per token", "change", "paper: change"]))


def _kinds(study: Study) -> Iterable[str]:
    from pandas import DataFrame

    kinds = (report for report in study.reports if report["workload"] not in ("mixed", WIDE_STEPS))
    alone = group(kinds, lambda report: report["workload"])
    if not alone:
        return
    policies = list(dict.fromkeys(report["policy"] for reports in alone.values() for report in reports))
    rows = []
    for kind, reports in alone.items():
        latencies = {report["policy"]: latency_ms(report) for report in reports}
        rows.append([kind, f"{reports[0]['rate']:g}", *(_number(latencies.get(policy)) for policy in policies)])
    yield "### Each kind alone, ms per token"
    yield "At rates that bring the same tokens per second, those of the mix at the middle one of its rates."
    yield markdown_table(DataFrame(rows, columns=["kind", "requests/s", *policies]))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


# -- the picture -------------------------------------------------------------------------------------------------------


def panels(summary: Summary) -> list[list[Panel]]:
    """Figure 2 of every machine; under it, of the first one, waste and ablation."""
    studies = [study for study in summary.studies if study.has_results]
    if not studies:
        return []
    first = studies[0]
    rate = first.common_rate
    at_rate = {policy: runs[rate] for policy, runs in first.mixed.items() if rate in runs}
    waste = {policy: waste_shares(report) for policy, report in at_rate.items() if policy not in BOUNDS}
    name = f"{first.profile}, {rate:g} requests/s"
    return [
        [_figure_2_panel(study, summary.reference(study)) for study in studies],
        [
            Bars(f"Waste: {name}", "share of the pool's token·seconds", waste),
            Bars(f"Ablation: {name}", "normalized latency, times that of discard", _steps(at_rate), beside=True),
        ],
    ]


def _steps(at_rate: Mapping[str, Report]) -> dict[str, dict[str, float]]:
    """The settings of the ablation: latency over that of the first one, ours and the paper's."""
    latencies = {policy: latency_ms(report) for policy, report in at_rate.items()}
    base, theirs = latencies.get(ABLATION[0].policy), 1.0
    steps: dict[str, dict[str, float]] = {}
    for policy, _, change in ABLATION:
        theirs *= 1.0 + (change or 0.0)
        ours = latencies.get(policy)
        steps[policy] = ({"ours": ours / base} if ours is not None and base else {}) | {"the paper's": theirs}
    return steps


def _figure_2_panel(study: Study, reference: Mapping[str, Points]) -> CurvePanel:
    def curve(policy: str, points: Points, is_reference: bool) -> PlottedCurve:
        ranges = [(rate, Range(latency, latency, latency)) for rate, latency in points]
        return PlottedCurve(None if is_reference else policy, ranges, COLOURS.get(policy), is_reference)

    curves = [curve(policy, points, False) for policy, points in study.points.items() if policy in DRAWN]
    curves += [curve(policy, points, True) for policy, points in reference.items()]
    dashed = " (dotted: the paper's)" if reference else ""
    return CurvePanel(study.profile + dashed, curves, study.threshold_ms)
