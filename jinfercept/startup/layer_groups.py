"""Layers per executable: the candidates, their costs on this machine, and the choice that is remembered between starts.

More layers mean fewer dispatches per step; fewer layers compile faster, and transfers in parts interleave more finely. Steps
are timed as an engine runs them, each submitted before the tokens of the last one are read. Timed one at a time the candidates
would look alike: the device computes the first group while the host dispatches the others.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple, Protocol

from jinfercept.models.protocol import Params, ServedModel
from jinfercept.runner.executables import Progress, silent
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import StepPlan
from jinfercept.startup.probes import PlanRunner, full_rows, probe, settled, widest
from jinfercept.startup.profiler import PlanRun, remember, run_once, run_pipelined

POWERS = 5
"""Candidates are 1, 2, 4, 8 and 16 layers, and all of a part: one executable a step is launched as one graph on a GPU."""
SLACK = 0.02
"""Relative cost above the best candidate's at which one with less to compile is preferred."""
MOST_SLACK = 0.1
"""Largest slack on a noisy machine."""
CONTEXT = 128
"""Tokens that a decoding row reads."""
ROUNDS = 8
TURN_S = 0.1
LONG_S = 0.25
"""A longer step is timed once a turn, without another one dispatched behind it."""
ENOUGH_S = 4.0
"""Seconds of timing, in the mean over the candidates, after which a step has no further round."""


class CandidateRunner(PlanRunner, Protocol):
    """The runner of a candidate; it has weights and pages between `update` and `close`."""

    def update(self, params: Any) -> None: ...

    def close(self) -> None: ...


class CandidateTiming(NamedTuple):
    """A candidate at one plan: seconds of a step in its fastest turn and in the next, and the least that `submit` took."""

    seconds: float
    again_s: float
    dispatch_s: float


class Tried(NamedTuple):
    """A measured candidate, as a profile's tables have it.

    Attributes:
        num_executables: of layers, for the buckets that were timed.
        compile_s: that these took, one after the other; little if they were found on disk.
        steps: for each its `bucket`, its rows that decode (`decoding`), and its `CandidateTiming`.
        relative: geometric mean of its seconds over the best candidate's.
        chosen: whether it is the choice.
    """

    layers_per_step: int
    num_executables: int
    compile_s: float
    steps: list[dict[str, float]]
    relative: float
    chosen: bool


def candidates(num_layers: int, transfer_parts: int = 1) -> tuple[int, ...]:
    """Layers per executable that are worth a try, ascending.

    Powers of two and all layers, or fewer layers for as many groups, which are then more even; every part of a transfer has
    a group.
    """
    most = num_layers // min(transfer_parts, num_layers)
    num_groups = {-(-num_layers // min(size, most)) for size in (*(2**power for power in range(POWERS)), num_layers)}
    return tuple(sorted(-(-num_layers // count) for count in num_groups))


def relative_costs(seconds: Mapping[int, Iterable[float]]) -> dict[int, float]:
    """The geometric mean of each candidate's seconds over the least such mean."""
    means = {layers: geometric_mean(costs) for layers, costs in seconds.items()}
    return {layers: mean / min(means.values()) for layers, mean in means.items()}


def choose(seconds: Mapping[int, Iterable[float]], slack: float) -> int:
    """The fewest layers per executable whose relative cost is no more than 1 + `slack`."""
    return min(layers for layers, cost in relative_costs(seconds).items() if cost <= 1 + slack)


def tolerated(turns: Iterable[CandidateTiming]) -> float:
    """The slack for a choice: `SLACK`, or what a candidate's two fastest turns mostly differ by, at most `MOST_SLACK`."""
    return min(MOST_SLACK, max(SLACK, median(turn.again_s / turn.seconds for turn in turns) - 1))


def try_groups(
    model: ServedModel, params: Params, shape: RunnerShape, attention: str, progress: Progress = silent
) -> list[Tried]:
    """Compile and time all candidates. One of them at a time has pages: a page for every sequence, and the largest step's.

    Args:
        attention: see `pallas.attention`.
        progress: called with what is done.
    """
    shape, plans = timed_steps(shape)
    runners = dict[int, ModelRunner]()
    for layers in candidates(model.config.num_layers, shape.transfer_parts):
        runner = ModelRunner(model, params, replace(shape, layers_per_step=layers), attention=attention)
        runner.warm_up(progress)
        runner.close()
        runners[layers] = runner
    turns = compare(runners, params, plans, progress)
    seconds = {layers: [turn.seconds for turn in row] for layers, row in turns.items()}
    relative = relative_costs(seconds)
    chosen = choose(seconds, tolerated(chain.from_iterable(turns.values())))
    return [
        Tried(
            layers_per_step=layers,
            num_executables=len(runner.layers_compile_s),
            compile_s=sum(runner.layers_compile_s),
            steps=[_step(plan) | turn._asdict() for plan, turn in zip(plans, turns[layers], strict=True)],
            relative=relative[layers],
            chosen=layers == chosen,
        )
        for layers, runner in runners.items()
    ]


def timed_steps(shape: RunnerShape) -> tuple[RunnerShape, list[StepPlan]]:
    """The plans to time, and a shape that holds them.

    The rows decode that the smallest bucket holds, and as many as can be, and beside those a chunk that fills the largest
    bucket. The pool has a page for every sequence and those of the chunk: rows with longer contexts share them.
    """
    buckets = tuple(sorted({shape.buckets[0], widest(shape), shape.buckets[-1]}))
    num_pages = min(shape.num_pages, shape.max_num_seqs + -(-buckets[-1] // shape.page_size))
    shape = replace(shape, buckets=buckets, num_pages=num_pages)
    rows = {size: full_rows(shape, size, CONTEXT * min(size, shape.max_num_seqs)) for size in buckets}
    return shape, [probe(shape, size, rows[size]) for size in buckets]


def compare(
    runners: Mapping[int, CandidateRunner],
    params: Any,
    plans: Sequence[StepPlan],
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[CandidateTiming]]:
    """Time every candidate at every plan. They take turns, for the machine drifts; the fastest counts: what disturbs only adds.

    Args:
        runners: by candidate; warm and closed, as they are afterwards.
        params: their weights.
        plans: that any of them can run.
        progress: called with what is done.
        clock: seconds.
    """
    runs = {layers: [list[PlanRun]() for _ in plans] for layers in runners}
    spent_s = [0.0] * len(plans)
    for number in range(ROUNDS * len(plans)):
        progress("grouping", number, ROUNDS * len(plans))
        index = number % len(plans)
        if spent_s[index] < ENOUGH_S * len(runners):
            for layers, runner in runners.items():
                began_s = clock()
                runner.update(params)
                runs[layers][index].append(_turn(runner, plans[index], clock))
                runner.close()
                spent_s[index] += clock() - began_s
    progress("grouping", 1, 1)
    return {layers: [_turns(past) for past in row] for layers, row in runs.items()}


def remembered_layers(path: Path, num_layers: int) -> int | None:
    """The choice in a file, for a model of so many layers; None if there is none."""
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))["layers_per_step"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None
    return layers if type(layers) is int and 1 <= layers <= num_layers else None


def remember_layers(path: Path, layers: int, settings: Mapping[str, str | int]) -> None:
    """Write a choice, with the settings that it depends on, where `remembered_layers` can read it. Raises `OSError`."""
    text = json.dumps({"layers_per_step": layers, "settings": dict(settings)}, indent=2) + "\n"
    remember(lambda file: file.write_text(text, encoding="utf-8"), path)


def _turn(runner: PlanRunner, plan: StepPlan, clock: Callable[[], float]) -> PlanRun:
    """Seconds of a step, and those of its `submit`: of the first, which sets up the page tables, only if it is long."""
    first = run_once(runner, plan, clock)
    if first.seconds >= LONG_S:
        return first
    return run_pipelined(runner, settled(plan), max(2, math.ceil(TURN_S / first.seconds)), clock)


def _turns(runs: list[PlanRun]) -> CandidateTiming:
    fastest, *slower = sorted(run.seconds for run in runs)
    return CandidateTiming(fastest, next(iter(slower), fastest), min(run.dispatch_s for run in runs))


def _step(plan: StepPlan) -> dict[str, float]:
    return {"bucket": plan.bucket, "decoding": sum(len(chunk.tokens) == 1 for chunk in plan.chunks)}
