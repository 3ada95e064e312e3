"""Measures the seconds of a runner's steps and transfers on this machine, as a `Profile`. Schedules nothing.

Hand-made plans, which fill a bucket and hold no context of a request, run on the executables that will serve. On a CPU, steps
run one at a time. A device that computes while the host goes on runs them as an engine does, each submitted before the last one
is collected, so that the host's work for a step is hidden. The pages are empty afterwards.
"""

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple, Protocol

from jinfercept.errors import ConfigError
from jinfercept.kv.page import PageCopy
from jinfercept.runner.executables import Progress, silent
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.fit import MeasuredStep, fit_link, fit_steps
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.plan import Chunk, DraftPlan, NewPages, Sample, StepPlan, WindowEntries
from jinfercept.sched.profile import Profile

Row = tuple[int, int]
"""First position and number of a row's query tokens."""


class StepRunner(Protocol):
    """Runs plans, as `sched.plan.PlanRunner` without masks."""

    def submit(self, plan: StepPlan) -> Any: ...

    def collect(self, ticket: Any) -> Any: ...

    def reset(self) -> None: ...


def probe(shape: RunnerShape, bucket: int, rows: list[Row]) -> StepPlan:
    """A plan of such rows. Pages are consecutive, and the first page follows the last of the pool."""
    chunks, used = [], 0
    for slot, (start, num_tokens) in enumerate(rows):
        end = start + num_tokens
        num_pages = -(-end // shape.page_size)
        pages = range(used, used + num_pages)
        state = 1 + slot % shape.num_states if shape.num_states else 0
        new_pages = NewPages(0, [1 + page % shape.num_pages for page in pages], state)
        if shape.num_window_pages:
            entries = WindowEntries(0, [1 + page % shape.num_window_pages for page in pages])
            new_pages = new_pages._replace(window=entries)
        used += num_pages
        chunks.append(Chunk(slot, start, (0,) * num_tokens, new_pages, Sample(0.0, 0)))
    return StepPlan(0, bucket, tuple(chunks))


def settled(plan: StepPlan) -> StepPlan:
    """The same plan once its page tables are set up."""
    return replace(plan, chunks=tuple(chunk._replace(new_pages=()) for chunk in plan.chunks))


def full_rows(shape: RunnerShape, bucket: int, context_tokens: int) -> list[Row]:
    """Rows that fill a bucket: rows that decode, with equal contexts, and chunks from the first token on for the rest.

    If every token of the bucket can have a row, there are no chunks.

    Args:
        context_tokens: tokens that all rows together read; the nearest possible number counts.
    """
    most, num_rows = longest(shape), min(bucket, shape.max_num_seqs)
    num_chunks = min(num_rows, math.ceil((bucket - num_rows) / (most - 1)))
    num_decoding = num_rows - num_chunks
    rest = min(bucket - num_decoding, num_chunks * most)
    chunks = [(0, (rest + index) // num_chunks) for index in range(num_chunks)]
    length = max(1, min(most, (context_tokens - rest) // max(1, num_decoding)))
    return [(length - 1, 1)] * num_decoding + chunks


def longest(shape: RunnerShape) -> int:
    """Tokens of the longest sequence that fits."""
    return max(2, min(shape.max_model_len, shape.num_pages * shape.page_size))


def widest(shape: RunnerShape) -> int:
    """The bucket in which the most rows decode and nothing else is computed."""
    return max((size for size in shape.buckets if size <= shape.max_num_seqs), default=shape.buckets[0])


MOST_DEPTH = 2048
"""Last token of the deepest chunk that is measured on a CPU."""
MOST_ASYNCHRONOUS_DEPTH = 32_768
"""Last token of the deepest chunk that is measured on a device that computes while the host goes on."""
SHORT_S = 0.1
"""A shorter step runs twice, and the first run does not count: it sets up the page tables."""
PIPELINED_STEPS = 4
"""Most steps of one pipelined run that are timed: as many as take `SHORT_S` together, one at least."""


class Effort(NamedTuple):
    """How much is measured."""

    rounds: int  # turns of every plan; a disturbance of some seconds hits all plans alike
    enough_s: float  # of all its runs, after which a plan has no further turn
    timeout_s: float  # after which no plan runs for the first time
    contexts: tuple[float, ...]  # shares of the pool that the rows of a step read; 0 is the smallest context
    # Every bucket has all contexts and a deep chunk; else only the widest has all contexts, and `deep_bucket` the chunk.
    every_bucket: bool
    pages: tuple[int, ...]  # sizes of transfers


EFFORTS: Mapping[str, Effort] = {
    "measure": Effort(5, 1.2, math.inf, (0.0, 0.4, 1.0), True, (1, 2, 4, 8, 16, 32, 64)),
    "quick": Effort(2, 0.1, 1.5, (0.0, 1.0), False, (16, 128)),
}
"""By the name that selects them as an engine's profile."""


class PlanRun(NamedTuple):
    """Seconds of a step, and of its `submit`."""

    seconds: float
    dispatch_s: float


type RunStep = Callable[[StepRunner, StepPlan], PlanRun]


class PlanTiming(NamedTuple):
    """Seconds of the runs of one plan."""

    seconds: float  # of the fastest run, which counts: disturbances only add
    median_s: float
    most_s: float
    dispatch_s: float  # least of `submit`


def measure(
    runner: StepRunner,
    shape: RunnerShape,
    *,
    name: str,
    kv_bytes_per_token: int,
    effort: Effort,
    settings: Mapping[str, Any],
    drafter: StepRunner | None = None,
    has_draft_layer: bool = False,
    asynchronous: bool = False,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measure steps and transfers. The runner is warm and idle; its pages are empty afterwards.

    Args:
        kv_bytes_per_token: bytes of one token's keys and values.
        settings: everything that the costs depend on; they are written to the profile's tables.
        drafter: runs the draft model alone, if there is one; the runner's steps have its steps in them.
        has_draft_layer: the runner drafts by a layer of the model, if a plan wants that.
        asynchronous: the device computes while the host goes on, as a GPU does: steps are timed as they follow each other, and
            chunks are deeper.
        clock: seconds.

    Returns:
        A profile with buckets. Under `tables` are the settings, `steps` (for every timed plan its `PlanTiming`, and the seconds
        of the profile and of the line through the buckets), and `links` (seconds of every transfer).
    """
    started_s = clock()
    run_step = partial(_run_often if asynchronous else _run_alone, clock=clock)
    plans = list(_steps(shape, effort, asynchronous))
    try:
        # The first run of an executable never counts: a GPU loads its kernels and records its graph in it, which takes up to 30
        # times as long.
        for _, plan in plans if asynchronous else ():
            runner.collect(runner.submit(plan))
        timed = _time_steps(runner, plans, effort, run_step, progress, clock)
        has_drafts = has_draft_layer or drafter is not None
        draft_share = _draft_share(runner, drafter, shape, effort, run_step) if has_drafts else 0.0
        half = max(1, shape.num_pages // 2)  # of the pool
        sizes = [pages for pages in effort.pages if pages <= half] or [half]
        links = [_time_link(runner, shape, pages, effort, clock) for pages in sizes]
    finally:
        runner.reset()
    fit = fit_steps(step for step, _, _ in timed)
    ways = {
        way: fit_link([(num_ways * link["pages"] * shape.page_size, link[f"{way}_s"]) for link in links])
        for way, num_ways in (("out", 1), ("in", 1), ("both", 2))
    }
    line = fit.line
    profile = Profile(
        name=name,
        source="measured",
        flat_s=line.flat_s,
        fixed_s=line.fixed_s,
        per_query_s=line.per_query_s,
        per_context_s=fit.per_context_s,
        per_pair_s=fit.per_pair_s,
        saturation=line.query_tokens,
        link_out_tokens_per_s=ways["out"].tokens_per_s,
        link_in_tokens_per_s=ways["in"].tokens_per_s,
        link_both_tokens_per_s=ways["both"].tokens_per_s,
        kv_bytes_per_token=kv_bytes_per_token,
        copy_s=max(ways["out"].copy_s, ways["in"].copy_s),
        dispatch_s=median_low(timing.dispatch_s for _, _, timing in timed),
        bucket_tokens=fit.bucket_tokens,
        bucket_s=fit.bucket_s,
        draft_share=draft_share,
    )
    straight = replace(profile, bucket_tokens=(), bucket_s=())
    steps = [
        step._asdict() | timing._asdict() | {"profile_s": profile.plan_s(plan), "line_s": straight.plan_s(plan)}
        for step, plan, timing in timed
    ]
    spent_s = clock() - started_s
    return replace(profile, tables={"settings": dict(settings), "took_s": spent_s, "steps": steps, "links": links})


# -- steps -------------------------------------------------------------------------------------------------------------


def _time_steps(
    runner: StepRunner,
    steps: Sequence[tuple[MeasuredStep, StepPlan]],
    effort: Effort,
    run_step: RunStep,
    progress: Progress,
    clock: Callable[[], float],
) -> list[tuple[MeasuredStep, StepPlan, PlanTiming]]:
    started_s = clock()
    runs: list[list[PlanRun]] = [[] for _ in steps]
    for number in range(effort.rounds * len(steps)):
        progress("measuring", number, effort.rounds * len(steps))
        past, plan = runs[number % len(steps)], steps[number % len(steps)][1]
        is_late = number > 0 and clock() - started_s >= effort.timeout_s
        if sum(run.seconds for run in past) < effort.enough_s and (past or not is_late):
            past.append(run_step(runner, plan))
    progress("measuring", 1, 1)
    measured = []
    for (step, plan), past in zip(steps, runs, strict=True):
        if past:
            seconds, dispatch_s = [run.seconds for run in past], min(run.dispatch_s for run in past)
            timing = PlanTiming(min(seconds), median_low(seconds), max(seconds), dispatch_s)
            measured.append((step._replace(seconds=timing.seconds), plan, timing))
    return measured


def deep_bucket(shape: RunnerShape, asynchronous: bool) -> int | None:
    """The bucket of the chunks whose depth is priced where few steps are measured; None: no chunk can be deep."""
    # on an asynchronous device, the largest that leaves half of the depth before it: a short chunk leaves most of a GPU idle
    sizes = shape.buckets if asynchronous else (widest(shape),)
    return max((size for size in sizes if 1 < size <= _reach(shape, asynchronous) // 2), default=None)


def _reach(shape: RunnerShape, asynchronous: bool) -> int:
    return min(longest(shape), MOST_ASYNCHRONOUS_DEPTH if asynchronous else MOST_DEPTH)


def _steps(shape: RunnerShape, effort: Effort, asynchronous: bool) -> Iterator[tuple[MeasuredStep, StepPlan]]:
    # Full buckets differ by the tokens that their rows read, chunks by the tokens before them.
    pool, reach = shape.num_pages * shape.page_size, _reach(shape, asynchronous)
    with_chunks = shape.buckets if effort.every_bucket else (deep_bucket(shape, asynchronous),)
    for bucket in shape.buckets:
        shares = effort.contexts if effort.every_bucket or bucket == widest(shape) else effort.contexts[:1]
        contexts = dict[int, StepPlan]()
        for share in shares:
            plan = probe(shape, bucket, full_rows(shape, bucket, int(share * pool)))
            contexts.setdefault(sum(chunk.start + len(chunk.tokens) for chunk in plan.chunks), plan)
        for context_tokens, plan in contexts.items():
            yield MeasuredStep(plan.bucket, context_tokens, None, 0.0), plan
        deepest = reach - bucket
        for depth in (0, deepest) if bucket in with_chunks and bucket > 1 and deepest > 0 else ():
            yield MeasuredStep(bucket, depth + bucket, depth, 0.0), probe(shape, bucket, [(depth, bucket)])


def _draft_share(
    runner: StepRunner, drafter: StepRunner | None, shape: RunnerShape, effort: Effort, run_step: RunStep
) -> float:
    # Seconds of a draft model's step for as many rows as decode at once, or of one draft by a layer of the served model, over
    # the seconds of a whole step.
    bucket = widest(shape)
    plan = probe(shape, bucket, full_rows(shape, bucket, 0))
    drafting = plan if drafter is not None else replace(plan, draft=DraftPlan(drafts=True, following={}))
    runs = [
        [run_step(runner, plan).seconds, run_step(drafter or runner, drafting).seconds]
        for _ in range(1 + effort.rounds)
    ]
    whole, alone = map(min, zip(*runs, strict=True))
    if drafter is None:
        alone = (alone - whole) / shape.num_drafts
    return max(0.0, min(1.0, alone / whole))


def run_once(runner: StepRunner, plan: StepPlan, clock: Callable[[], float]) -> PlanRun:
    """Seconds from `submit` to `collect`."""
    started_s = clock()
    ticket = runner.submit(plan)
    dispatch_s = clock() - started_s
    runner.collect(ticket)
    return PlanRun(clock() - started_s, dispatch_s)


def run_pipelined(runner: StepRunner, plan: StepPlan, count: int, clock: Callable[[], float]) -> PlanRun:
    """Seconds per step of `count` steps that follow each other; or of a `submit`, if that takes longer."""
    collected_s, dispatches, last = list[float](), list[float](), runner.submit(plan)
    for _ in range(1 + count):
        started_s = clock()
        ticket = runner.submit(plan)
        dispatches.append(clock() - started_s)
        runner.collect(last)
        collected_s.append(clock())
        last = ticket
    runner.collect(last)
    # the device waits for the host in the first two steps, which do not count
    return PlanRun(max(min(dispatches), (clock() - collected_s[1]) / count), min(dispatches))


def _run_alone(runner: StepRunner, plan: StepPlan, clock: Callable[[], float]) -> PlanRun:
    run = run_once(runner, plan, clock)
    return run if run.seconds >= SHORT_S else run_once(runner, settled(plan), clock)


def _run_often(runner: StepRunner, plan: StepPlan, clock: Callable[[], float]) -> PlanRun:
    first_s = max(run_once(runner, plan, clock).seconds, SHORT_S / PIPELINED_STEPS)
    return run_pipelined(runner, settled(plan), max(1, int(SHORT_S / first_s)), clock)


# -- the link ----------------------------------------------------------------------------------------------------------


def _time_link(
    runner: StepRunner, shape: RunnerShape, pages: int, effort: Effort, clock: Callable[[], float]
) -> dict[str, Any]:
    there = tuple(PageCopy(1 + index, index) for index in range(pages))
    other_copies = tuple(PageCopy(1 + (pages + index) % shape.num_pages, pages + index) for index in range(pages))
    out = StepPlan(0, 0, offload=there)
    back = StepPlan(0, 0, fetch=other_copies)
    both = replace(out, fetch=other_copies)
    runner.collect(runner.submit(StepPlan(0, 0, offload=other_copies)))
    seconds: dict[str, Any] = {"pages": pages}
    for way, plan in (("out_s", out), ("in_s", back), ("both_s", both)):
        runs = []
        for _ in range(effort.rounds + 1):  # the first is cold
            started_s = clock()
            runner.collect(runner.submit(plan))
            runs.append(clock() - started_s)
            runner.collect(runner.submit(StepPlan(0, 0, drop=tuple(copy.host_slot for copy in plan.offload))))
        seconds[way] = min(runs[1:])
    runner.collect(runner.submit(StepPlan(0, 0, drop=tuple(copy.host_slot for copy in other_copies))))
    return seconds


# -- between starts ----------------------------------------------------------------------------------------------------


def profile_path(directory: Path, settings: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()
    return directory / "profiles" / f"{digest[:24]}.json"


def remembered(path: Path) -> Profile | None:
    """The profile in a file; None if there is none of this version."""
    try:
        return load_profile(path)
    except ConfigError:
        return None


def remember(save: Callable[[Path], object], path: Path) -> None:
    """Write a file for the next start, atomically. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        save(Path(scratch) / path.name)
        os.replace(Path(scratch) / path.name, path)
