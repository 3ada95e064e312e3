"""What a decode step costs while pages cross the host link, by the pages of an array.

The same step runs again and again, each submitted before the last one's tokens are read, with and without pages that go
out, come in, or both. Rows: the way (`staging_pages`, as `RunnerShape` has it), `tokens`, `context`,
`way` (none, out, in, both), `share` of the link that was asked for, `pages` each way, `step_s`, `dispatch_s`, and `slowdown`
(over the step without transfers, less 1), `bytes_per_s`, `link_bytes_per_s` (of one large array) and `link_share`, their ratio.

Where pages move, also `embed_s`: from the submission of a step that runs alone until its first executable has ended. Where
they come in, from traces `first_kernel_s`, from the start of its fetch to its first kernel, and of steps that follow each other
`first_array_s` and `last_array_s`, from a step's first kernel to the start of its first and last array. Where the former grow
with the fetch, the step waits for it; where the latter last as long as the compute, the fetch waits for the step.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from typing import NamedTuple

import jax

from benchmarks.suite.plans import FIRST_PAGE, fill, pages_of, run_steps, settled, steady_s, step
from benchmarks.suite.sizes import Row, Sizes, TransferWay
from benchmarks.suite.timing import WAYS, link_rate
from benchmarks.suite.trace import array_starts_s, traced, until_first_kernel_s
from jinfercept.kv.page import PageCopy
from jinfercept.models.load import random_params
from jinfercept.models.model import Model, Params, kv_bytes_per_token
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import StepPlan

FORGOTTEN_AFTER = 3  # steps after which a page that went out is dropped


class Bench(NamedTuple):
    """What is driven: a runner and its step, where its spare pages begin, their bytes, and what the link alone does."""

    runner: ModelRunner
    plan: StepPlan
    first_spare: int
    page_bytes: int
    links: dict[str, float]


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure every way of transferring, and when the pages of a step arrive."""
    for common, bench in _benches(sizes, sizes.overlap_ways):
        yield from _measure(sizes, common, bench)


def _benches(sizes: Sizes, ways: Sequence[TransferWay]) -> Iterator[tuple[Row, Bench]]:
    """A runner for each way, one after the other, with a step that has run; and what all of its rows begin with."""
    config = next(iter(sizes.models.values()))
    model, params = Model(config), random_params(config, sizes.dtype, 0)
    links = {way: link_rate(sizes, way, sizes.link_bytes, 1) for way in WAYS}
    for way in ways:
        bench = _bench(sizes, model, params, way, links)
        try:
            yield {**way._asdict(), "tokens": bench.plan.num_tokens, "context": sizes.transfer_rows[1]}, bench
        finally:
            bench.runner.close()


def _bench(sizes: Sizes, model: Model, params: Params, way: TransferWay, links: dict[str, float]) -> Bench:
    num_rows, context = sizes.transfer_rows
    shape = RunnerShape(
        num_pages=0,
        page_size=sizes.page_size,
        max_num_seqs=num_rows,
        max_model_len=context,
        buckets=(num_rows,),
        layers_per_step=sizes.layers_per_step[0],
        **way._asdict(),
    )
    used = pages_of(shape, num_rows, context)
    shape = replace(shape, num_pages=used + 2 * sizes.transfer_pages)
    runner = ModelRunner(model, params, shape)
    runner.warm_up()
    fill(runner)
    plan = step(shape, num_rows, context)
    runner.collect(runner.submit(plan))
    page_bytes = sizes.page_size * kv_bytes_per_token(model.config, sizes.dtype)
    return Bench(runner, settled(plan), FIRST_PAGE + used, page_bytes, links)


def _measure(sizes: Sizes, common: Row, bench: Bench) -> Iterator[Row]:
    base_s, dispatch_s = _base_s(sizes, bench)
    none = {"way": "none", "share": 0.0, "pages": 0, "step_s": base_s, "dispatch_s": dispatch_s}
    yield common | none | _alone(sizes, bench, "none", 0)
    for share in sizes.overlap_shares:
        for way, ways in WAYS.items():
            pages = _pages(sizes, bench, way, share, base_s)
            with_s, dispatch_s = _loaded(
                bench, way, pages, lambda plans: steady_s(bench.runner, plans, sizes.turn_steps)
            )
            rate = ways * pages * bench.page_bytes / with_s
            row = {"way": way, "share": share, "pages": pages, "step_s": with_s, "dispatch_s": dispatch_s}
            row |= {"slowdown": with_s / base_s - 1, "bytes_per_s": rate}
            row |= {"link_bytes_per_s": bench.links[way], "link_share": rate / bench.links[way]}
            yield common | row | _alone(sizes, bench, way, pages)


def _alone(sizes: Sizes, bench: Bench, way: str, pages: int) -> Row:
    """The start of steps, each of which runs after the end of the one before it."""
    runner, steps, embed_s = bench.runner, sizes.traced_steps, list[float]()

    def run(plans: Iterator[StepPlan]) -> None:
        for _ in range(steps):
            plan = next(plans)
            began_s = time.perf_counter()
            forward = runner.forward(plan)
            if way != "none":
                jax.block_until_ready(runner.kv.commons)  # of the embedding, the step's first executable
                embed_s.append(time.perf_counter() - began_s)
            runner.collect(runner.sample(forward, {}))
            runner.kv.wait()

    def measure(plans: Iterator[StepPlan]) -> Row:
        run(plans)
        row: Row = {"embed_s": median(embed_s) if embed_s else None}
        if way == "in":
            events = traced(lambda: run(plans))
            row["first_kernel_s"] = until_first_kernel_s(events, steps, bench.page_bytes)
            starts_s = array_starts_s(traced(lambda: run_steps(runner, plans, steps)), bench.page_bytes)
            row["first_array_s"], row["last_array_s"] = starts_s or (None, None)
        return row

    return _loaded(bench, way, pages, measure)


def _base_s(sizes: Sizes, bench: Bench) -> tuple[float, float]:
    return steady_s(bench.runner, iter(lambda: bench.plan, None), sizes.turn_steps)


def _pages(sizes: Sizes, bench: Bench, way: str, share: float, base_s: float) -> int:
    """Pages each way of a step that asks for a share of the link."""
    wanted = round(share * bench.links[way] * base_s / bench.page_bytes / WAYS[way])
    return max(1, min(wanted, sizes.transfer_pages))


def _loaded[T](bench: Bench, way: str, pages: int, measure: Callable[[Iterator[StepPlan]], T]) -> T:
    """What a measurement of the step with so many pages out, in, or each gives; the host is empty afterwards."""
    runner, plan, kept = bench.runner, bench.plan, tuple(range(pages))
    if way == "none":
        return measure(iter(lambda: plan, None))
    leaving = [bench.first_spare + index for index in range(pages)]
    landing = [slot + pages for slot in leaving]
    there = tuple(map(PageCopy, landing, kept))
    runner.collect(runner.submit(StepPlan(0, 0, offload=there)))
    left: deque[tuple[int, ...]] = deque()

    def plans() -> Iterator[StepPlan]:
        for number in count(1):
            coming = there if way in ("in", "both") else ()
            if way == "in":
                yield replace(plan, fetch=coming)
                continue
            slots = tuple(range(number * pages, (number + 1) * pages))
            left.append(slots)
            drop = left.popleft() if len(left) > FORGOTTEN_AFTER else ()
            yield replace(plan, fetch=coming, drop=drop, offload=tuple(map(PageCopy, leaving, slots)))

    try:
        return measure(plans())
    finally:
        runner.kv.wait()
        runner.collect(runner.submit(StepPlan(0, 0, drop=tuple(runner.kv.host))))
