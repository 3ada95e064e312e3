"""Estimates against the truth: predicted and actual waste, and what wrong durations cost.

Predictions and what came of them are recorded by `studies.pause_records`. Errors are injected into an oracle, whose estimates
are wrong by a factor, so that nothing else is wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple, final

from jinfercept.sched.estimator import Estimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.sequence import PendingCall
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import OracleEstimator, Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from jinfercept.sim.tables import TextTable
from jinfercept.sim.workload import MIXED_WEIGHTS, draw
from studies.answer import StudyAnswer, StudyEffort
from studies.plots import Bars, CurvePanel, Panel, PlottedCurve
from studies.questions.equation_checks import (
    CHECKS,
    EQUATIONS,
    Equation,
    EquationCheck,
    RecordedRun,
    ratio_of_sums,
    ratios,
)
from studies.questions.latency import (
    LATENCY_COLUMNS,
    goodput,
    latency_cells,
    limits_text,
    mean_ms,
    number_or_dash,
    point,
)

Factor = Callable[[PendingCall], float]
"""The factor of a call's duration, above 0."""


@final
class ScaledEstimator(Estimator):
    """Estimates durations as `factor` times those of another estimator at the start of the call.

    A call that outlasts its estimate is expected to return at once, for as long as it lasts.
    """

    def __init__(self, estimator: Estimator, factor: Factor) -> None:
        self._estimator, self._factor = estimator, factor

    def started(self, call: PendingCall, at_s: float) -> None:
        self._estimator.started(call, at_s)

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        self._estimator.observe(call, duration_s, clean)

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return max(0.0, self._factor(call) * self._estimator.remaining_s(call, 0.0) - age_s)


@dataclass(frozen=True)
class WrongOracle:
    """Makes oracles that are wrong by a factor.

    Attributes:
        factor: of durations; None: between 0.1 and 10, drawn for every call.
        tool: the one whose calls are wrong; None: all.
        draw: number of a draw of a factor for every tool, instead of `factor`.
    """

    factor: float | None = None
    tool: str | None = None
    draw: int | None = None
    reads_durations: ClassVar[bool] = True

    def __call__(self) -> Estimator:
        return ScaledEstimator(OracleEstimator(), self._factor)

    def _factor(self, call: PendingCall) -> float:
        if self.tool is not None and call.name != self.tool:
            return 1.0
        if self.factor is not None:
            return self.factor
        seed = repr(call.key) if self.draw is None else f"{self.draw} {call.name}"
        return 10 ** Random(seed).uniform(-1.0, 1.0)


def one_tool_wrong(tool: str, factor: float) -> str:
    """The name of the oracle in `WRONG_ORACLES` that is wrong about one tool by a factor of 0.1 or 10."""
    return f"oracle_{tool}_x{factor:g}"


WILD_TOOLS = tuple(f"oracle_wild_tools_{number}" for number in range(4))
WRONG_ORACLES: Mapping[str, WrongOracle] = {
    **{f"oracle_x{factor:g}": WrongOracle(factor) for factor in (0.1, 0.3, 3.0, 10.0)},
    "oracle_wild": WrongOracle(),
    **{one_tool_wrong(tool, factor): WrongOracle(factor, tool) for tool in MIXED_WEIGHTS for factor in (0.1, 10.0)},
    **{name: WrongOracle(draw=number) for number, name in enumerate(WILD_TOOLS)},
}
"""Oracles by their names in tables. A constant factor leaves the order of what is expected back; `oracle_wild` does not.
Some are wrong about one of InferCept's kinds of calls only, and `WILD_TOOLS` about each tool by a factor of its own."""


MACHINE = "paper-gptj-6b-a100"
POLICIES = ("min_waste", "copy_ahead")
LEARNED = ("elapsed", "history")
ESTIMATORS = (*LEARNED, "oracle")
CHECK_RATE = 2.0
"""Requests per second of the recorded runs: every baseline keeps up."""
FACTORS: Mapping[float, str] = {
    0.1: "oracle_x0.1",
    0.3: "oracle_x0.3",
    1.0: "oracle",
    3.0: "oracle_x3",
    10.0: "oracle_x10",
}
ONE_TOOL = tuple(one_tool_wrong(tool, factor) for tool in MIXED_WEIGHTS for factor in (0.1, 10.0))


class ErrorLoad(NamedTuple):
    """Requests per second, and tokens of the pools, under which errors are injected."""

    rate: float
    kv_tokens: int
    host_tokens: int

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s, pools of {self.kv_tokens:,} and {self.host_tokens:,}"


ERROR_LOADS = (ErrorLoad(3.5, 20_000, 10_000), ErrorLoad(6.0, 53_000, 20_000))
"""Paused contexts do not all have room, so that the order of what is expected matters; the second is near saturation."""


class ErrorCase(NamedTuple):
    """A policy under a load."""

    policy: str
    load: ErrorLoad

    def __str__(self) -> str:
        return f"{self.policy}, {self.load}"


Checks = Mapping[tuple[Equation, str], list[EquationCheck]]
"""By equation and estimator."""
Errors = Mapping[ErrorCase, Mapping[str, Report]]
"""Reports by estimator."""


def ask(effort: StudyEffort) -> StudyAnswer:
    """Record and compare; then inject errors."""
    checks, recorded = _recorded(effort)
    errors = _errors(effort)
    tables = [_equation_table(checks)]
    tables += [_error_table(case, of) for case, of in errors.items()]
    return StudyAnswer(
        "Estimates against the truth",
        tables,
        [*_check_sentences(checks), *_error_sentences(errors)],
        _panels(checks, errors),
        [*recorded, *(report for of in errors.values() for report in of.values())],
    )


def _load(rate: float, duration_s: float, seed: int) -> SimulatedLoad[Sequence[Arrival]]:
    rng = Random(seed)
    return SimulatedLoad("mixed", rate, seed, arrivals(lambda: draw("mixed", rng), rate, duration_s, rng))


# -- predicted and actual ------------------------------------------------------------------------------------------------


def _recorded(effort: StudyEffort) -> tuple[Checks, list[Report]]:
    """Runs in which it is recorded what each equation predicts."""
    duration_s = 4.0 if effort.quick else 120.0
    machine, load = load_profile(MACHINE), _load(CHECK_RATE, duration_s, effort.seed)
    cases = [
        (equation, estimator)
        for equation in (EQUATIONS[1:2] if effort.quick else EQUATIONS)
        for estimator in (ESTIMATORS if equation.number in (2, 5) else ESTIMATORS[:1])
    ]
    reports = effort.play(
        [
            RecordedRun(Simulation(machine, equation.policy, estimator, duration_s), load, equation)
            for equation, estimator in cases
        ]
    )
    return {case: report.pop(CHECKS) for case, report in zip(cases, reports, strict=True)}, reports


def _equation_table(checks: Checks) -> TextTable:
    rows = []
    for (equation, estimator), pairs in checks.items():
        predicted, actual = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        spread = ratios(pairs)
        cells = [number_or_dash(value) for value in (predicted, actual, ratio_of_sums(pairs))]
        cells += [number_or_dash(spread[part]) for part in ("p10", "p50", "p90")]
        estimator_name = estimator if equation.number in (2, 5) else "-"
        rows.append([f"({equation.number})", equation.what, equation.policy, estimator_name, f"{len(pairs):,}", *cells])
    columns = ["equation", "context", "policy", "estimator", "calls", "predicted", "actual", "Σ/Σ", "p10", "p50", "p90"]
    title = f"Waste of an interception, token·seconds (mean; then actual over predicted), {CHECK_RATE:g} requests/s."
    return TextTable(title, columns, rows)


# -- errors ----------------------------------------------------------------------------------------------------------------


def _errors(effort: StudyEffort) -> Errors:
    duration_s = 4.0 if effort.quick else 60.0
    names = (*FACTORS.values(), "oracle_wild", *ONE_TOOL, *WILD_TOOLS, *LEARNED)
    if effort.quick:
        names = ("oracle", "oracle_x10")
    loads = ERROR_LOADS[:1] if effort.quick else ERROR_LOADS
    cases = [ErrorCase(policy, load) for load in loads for policy in POLICIES]
    machine, runs = load_profile(MACHINE), list[SweepRun]()
    for case in cases:
        rate, kv_tokens, host_tokens = case.load
        load = _load(rate, duration_s, effort.seed)
        for name in names:
            estimator = WRONG_ORACLES.get(name, name)
            simulation = Simulation(machine, case.policy, estimator, duration_s, None, kv_tokens, host_tokens)
            runs.append(SweepRun(simulation, load))
    reports = iter(effort.play(runs))
    return {case: {name: next(reports) | {"estimator": name} for name in names} for case in cases}


def _error_table(case: ErrorCase, of: Mapping[str, Report]) -> TextTable:
    right = of["oracle"]
    rows = []
    for name, report in of.items():
        changes = [_change(value(report), value(right)) for value in (mean_ms, _p99, goodput)]
        rows.append([name, *latency_cells(report), *changes])
    title = f"{case}; ms per token; {limits_text(right)}; change against no error (oracle)."
    return TextTable(title, ["durations", *LATENCY_COLUMNS, "mean, change", "p99, change", "goodput, change"], rows)


def _change(value: float, reference: float) -> str:
    return f"{value / reference - 1:+.1%}" if reference else "-"


def _p99(report: Report) -> float:
    return report["normalized_latency_paper_ms_per_token"]["p99"] or 0.0


# -- sentences -------------------------------------------------------------------------------------------------------------


def _check_sentences(checks: Checks) -> Iterator[str]:
    for (equation, estimator), pairs in checks.items():
        of_all = ratio_of_sums(pairs)
        with_what = f" with {estimator}" if equation.number in (2, 5) else ""
        if of_all is None:
            yield f"Equation ({equation.number}){with_what} predicts no waste at all; {len(pairs):,} calls wasted some."
        else:
            yield f"Equation ({equation.number}){with_what}: the actual waste is {of_all:.2f} times the predicted."


def _error_sentences(errors: Errors) -> Iterator[str]:
    for case, of in errors.items():
        right = mean_ms(of["oracle"])
        changes = {name: mean_ms(report) / right - 1 for name, report in of.items() if name.startswith("oracle_")}
        worst, best = max(changes, key=lambda name: changes[name]), min(changes, key=lambda name: changes[name])
        wild = [changes[name] for name in WILD_TOOLS if name in changes]
        parts = [f"errors change the mean latency by {changes[best]:+.1%} ({best}) to {changes[worst]:+.1%} ({worst})"]
        if wild:
            parts.append(f"each tool wrong at random by {min(wild):+.1%} to {max(wild):+.1%}")
        parts += [
            f"{name} instead of the oracle by {mean_ms(of[name]) / right - 1:+.1%}" for name in LEARNED if name in of
        ]
        yield f"{case}: {'; '.join(parts)}."


# -- the picture -----------------------------------------------------------------------------------------------------------


def _panels(checks: Checks, errors: Errors) -> list[list[Panel]]:
    waste = {
        f"({equation.number}) {estimator if equation.number in (2, 5) else ''}": {
            "predicted": sum(check.predicted for check in pairs) / len(pairs),
            "actual": sum(check.actual for check in pairs) / len(pairs),
        }
        for (equation, estimator), pairs in checks.items()
    }
    unit = "mean latency over that of no error"
    by_tool = {
        str(case): {name: 100 * (mean_ms(of[name]) / mean_ms(of["oracle"]) - 1) for name in _shown(of)}
        for case, of in errors.items()
    }
    return [
        [Bars("waste of an interception", "token·seconds", waste, beside=True)],
        [
            CurvePanel("one factor for all durations", _by_factor(errors), 1.0, unit, None, "factor", log_axis=True),
            Bars("one tool wrong, or each at random", "change of the mean latency, %", _turned(by_tool), beside=True),
        ],
    ]


def _by_factor(errors: Errors) -> list[PlottedCurve]:
    return [
        PlottedCurve(
            str(case),
            [
                (factor, point(mean_ms(of[name]) / mean_ms(of["oracle"])))
                for factor, name in FACTORS.items()
                if name in of
            ],
        )
        for case, of in errors.items()
    ]


def _shown(of: Mapping[str, Report]) -> list[str]:
    return [name for name in of if name in (*ONE_TOOL, *WILD_TOOLS)] or list(of)


def _turned(table: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
    """Rows as columns."""
    names = list(next(iter(table.values())))
    return {name: {row: table[row][name] for row in table} for name in names}
