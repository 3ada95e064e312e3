"""In what chunks a dropped context is best recomputed beside a running batch, by its length; simulated, and by equation (4).

A batch decodes. One more request calls out, loses its context, returns at once and is recomputed in chunks of one size. A step
holds one chunk and a token of every other request. What that costs is the difference from the same run under `preserve`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.profile import Profile
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.run_stats import Report
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad, SweepRun
from jinfercept.sim.tables import TextTable, number_text
from jinfercept.sim.workload import Script, Segment
from studies.answer import StudyAnswer, StudyEffort
from studies.plots import CurvePanel, PlottedCurve
from studies.questions.equation_checks import CHECKS, EQUATIONS, EquationCheck, RecordedRun
from studies.questions.latency import LATENCY_COLUMNS, latency_cells, limits_text, num_good, point

PAPER, LONG = "paper-gptj-6b-a100", "roofline-yarn-llama-2-7b-64k-a100-40gb"
MACHINES: Mapping[str, Sequence[int]] = {PAPER: (512, 1024, 2048), LONG: (2048, 8192, 16384)}
"""Context lengths by profile."""
CHUNKS = (64, 128, 256, 512, 1024, 2048)
BATCH, BATCH_PROMPT = 32, 400
"""Requests that decode, and tokens of their prompts."""
CALL_S = 0.01
DROPPED = EQUATIONS[3]


class ChunkCell(NamedTuple):
    """A context to recompute.

    Attributes:
        profile: the machine.
        context: tokens of the context.
        chunk: tokens of a chunk.
    """

    profile: Profile
    context: int
    chunk: int

    def runs(self, smallest: int) -> list[SweepRun]:
        """Dropped, with its waste, and kept. The batch decodes until chunks of `smallest` would have ended too."""
        prompts = BATCH * BATCH_PROMPT
        prefill_s = prompts / self.chunk * self.profile.step_s(self.chunk + BATCH, prompts)
        decoded = 2 * (prompts + self.context) // smallest + 300
        batch = Script("batch", BATCH_PROMPT, (Segment(decoded, None, 0),))
        paused = Script("paused", self.context - 8, (Segment(8, CALL_S, 1), Segment(1, None, 0)))
        coming = [*[Arrival(0.0, batch)] * BATCH, Arrival(1.2 * prefill_s, paused)]
        load = SimulatedLoad(f"{self.context} tokens in chunks of {self.chunk}", 1.0, 0, coming)
        longest = max(self.context, BATCH_PROMPT + decoded) + 16
        simulation = Simulation(
            replace(
                self.profile, saturation=self.chunk + BATCH
            ),  # the most query tokens of a step; prices do not read it
            DROPPED.policy,
            duration_s=coming[-1].at_s,
            drain_s=1e4,
            kv_tokens=(BATCH + 1) * (longest + 16),
            max_model_len=longest,
            chunked_prefill=True,
            chunk_tokens=self.chunk,
        )
        return [RecordedRun(simulation, load, DROPPED), SweepRun(replace(simulation, policy="preserve"), load)]


class ChunkCost(NamedTuple):
    """What it costs to recompute a context in chunks.

    Attributes:
        own_s: seconds by which the recomputed request ends later.
        others_s: seconds by which every request of the batch ends later.
        step_s: seconds of a step with a full chunk, without reading contexts: the batch waits as long for a token.
        waste: predicted by equation (4), and actual, token·seconds.
        reports: of the runs that drop and that keep.
    """

    own_s: float
    others_s: float
    step_s: float
    waste: EquationCheck
    reports: Sequence[Report]


def cost_of(cell: ChunkCell, reports: Sequence[Report]) -> ChunkCost:
    """The costs, from the reports of `ChunkCell.runs`."""
    dropped, kept = reports
    others_s = dropped["simulated_s"] - kept["simulated_s"]
    all_s = [report["latency_s"]["mean"] * report["requests"] for report in reports]
    [waste] = dropped.pop(CHECKS)
    step_s = cell.profile.step_s(min(cell.chunk, cell.context) + BATCH, 0)
    return ChunkCost(all_s[0] - all_s[1] - BATCH * others_s, others_s, step_s, waste, reports)


Found = Mapping[ChunkCell, ChunkCost]


def ask(effort: StudyEffort) -> StudyAnswer:
    """Every context in chunks of every size, on both machines."""
    cells = _quick_cells() if effort.quick else _cells()
    smallest = min(cell.chunk for cell in cells)
    reports = effort.play([run for cell in cells for run in cell.runs(smallest)])
    costs = {cell: cost_of(cell, pair) for cell, *pair in zip(cells, reports[::2], reports[1::2], strict=True)}
    machines = {name: dict(of) for name, of in groupby(costs.items(), key=lambda item: item[0].profile.name)}
    return StudyAnswer(
        "In what chunks is a dropped context recomputed best?",
        [table for name, of in machines.items() for table in (_table(name, of), _latencies(name, of))],
        [sentence for name, of in machines.items() for sentence in _findings(name, of)],
        [_panels(name, of) for name, of in machines.items()],
        [report for cost in costs.values() for report in cost.reports],
    )


def _cells() -> list[ChunkCell]:
    return [
        ChunkCell(load_profile(name), context, chunk)
        for name, contexts in MACHINES.items()
        for context in contexts
        for chunk in CHUNKS
        if chunk <= context
    ]


def _quick_cells() -> list[ChunkCell]:
    return [ChunkCell(load_profile(PAPER), 1024, chunk) for chunk in CHUNKS[2:5]]


# -- tables ----------------------------------------------------------------------------------------------------------------


def _table(name: str, of: Found) -> TextTable:
    rows = []
    for cell, cost in of.items():
        seconds = [number_text(1e3 * value) for value in (cost.own_s, cost.others_s, cost.step_s)]
        waste = [number_text(value) for value in (cost.waste.actual, cost.waste.predicted)]
        ratio = cost.waste.actual / cost.waste.predicted
        rows.append([f"{cell.context:,}", f"{cell.chunk:,}", *seconds, *waste, f"{ratio:.2f}"])
    columns = ["context", "chunk", "own delay, ms", "batch's delay, ms", "step, ms", "waste", "by (4)", "ratio"]
    title = f"{name}, beside {BATCH} requests: delays, the step with a chunk, and token·seconds wasted."
    return TextTable(title, columns, rows)


def _latencies(name: str, of: Found) -> TextTable:
    rows = [
        [f"{cell.context:,}", f"{cell.chunk:,}", policy, *latency_cells(report)[:3], f"{num_good(report):.0f}"]
        for cell, cost in of.items()
        for policy, report in zip(("drop", "keep"), cost.reports, strict=True)
    ]
    report = next(iter(of.values())).reports[0]
    title = f"{name}: all {BATCH + 1} requests, ms per token; {limits_text(report)}."
    return TextTable(title, ["context", "chunk", "", *LATENCY_COLUMNS[:3], "good"], rows)


# -- sentences -------------------------------------------------------------------------------------------------------------


def _findings(name: str, of: Found) -> Iterator[str]:
    for context, some in groupby(of.items(), key=lambda item: item[0].context):
        by_chunk = {cell.chunk: cost for cell, cost in some}
        own, least, equation = (
            min(by_chunk, key=lambda chunk: (value(by_chunk[chunk]), chunk)) for value in (_own, _waste, _predicted)
        )
        ratios = [cost.waste.actual / cost.waste.predicted for cost in by_chunk.values()]
        late_ms, ratio = 1e3 * by_chunk[own].own_s, f"{min(ratios):.2f} to {max(ratios):.2f}"
        yield (
            f"{name}, {context:,} tokens: the request ends soonest with chunks of {own:,}, {late_ms:.0f} ms later than if "
            f"kept; the least waste is with {least:,}, and equation (4) names {equation:,}; the actual waste is {ratio} times "
            "its prediction."
        )
    delays = [cost.others_s for cost in of.values()]
    profile = next(iter(of)).profile
    yield (
        f"{name}: the batch is delayed by {1e3 * min(delays):.0f} to {1e3 * max(delays):.0f} ms over all sizes and lengths; "
        f"InferCept's chunk, S less the batch's tokens, is {profile.saturation - BATCH:,}."
    )


def _own(cost: ChunkCost) -> float:
    return round(cost.own_s, 6)


def _waste(cost: ChunkCost) -> float:
    return round(cost.waste.actual, 3)


def _predicted(cost: ChunkCost) -> float:
    return round(cost.waste.predicted, 3)


# -- the picture -----------------------------------------------------------------------------------------------------------


def _panels(name: str, of: Found) -> list[CurvePanel]:
    delays, wastes = list[PlottedCurve](), list[PlottedCurve]()
    for number, (context, some) in enumerate(groupby(of.items(), key=lambda item: item[0].context)):
        costs = [(float(cell.chunk), cost) for cell, cost in some]
        colour, tokens = f"C{number}", f"{context:,} tokens"
        own = [(chunk, point(1e3 * cost.own_s)) for chunk, cost in costs]
        others = [(chunk, point(max(1.0, 1e3 * cost.others_s))) for chunk, cost in costs]
        actual = [(chunk, point(cost.waste.actual)) for chunk, cost in costs]
        predicted = [(chunk, point(cost.waste.predicted)) for chunk, cost in costs]
        delays += [
            PlottedCurve(f"{tokens}: own", own, colour),
            PlottedCurve(f"{tokens}: batch's", others, colour, True),
        ]
        wastes += [
            PlottedCurve(f"{tokens}: actual", actual, colour),
            PlottedCurve(f"{tokens}: equation (4)", predicted, colour, True),
        ]
    axis = "tokens of a chunk"
    return [
        CurvePanel(f"delay, {name}", delays, unit="ms later than if kept (1: or less)", axis=axis, log_axis=True),
        CurvePanel("waste", wastes, unit="token·seconds", axis=axis, log_axis=True),
    ]
