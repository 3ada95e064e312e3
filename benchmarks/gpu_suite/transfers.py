"""What a step costs when its transfers use the link in full, by the way of transferring: whole pages, part by part, in arrays.

The same step runs again and again, each submitted before the last one's tokens are read, with and without pages that go
out, come in, or both. Rows: `parts` (pieces of a page), `staging` (most pages of a host array), `step`, `way` (none, out, in,
both), `share` of the link's measured bandwidth that was asked for, `pages` each way, `step_s`, `dispatch_s`, and `slowdown`
(over the step without transfers, less 1), `bytes_per_s`, `link_bytes_per_s` (what the link alone does with single pages) and
`link_share`, their ratio. On a GPU last for each step a trace of some steps with full use of the link: a row for each kind of
copy with `way` trace, see `trace.copies`; where pages move by kernels and not by copy engines, it is missing.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import jax

from benchmarks.gpu_suite.ceilings import MOST_AT_ONCE, WAYS, link_rate
from benchmarks.gpu_suite.plans import fill, pages_of, settled, steady_s, step, turn
from benchmarks.gpu_suite.sizes import Row, Sizes
from benchmarks.gpu_suite.trace import copies, traced
from jinfercept.kv.store import PageCopy
from jinfercept.models.config import ModelConfig
from jinfercept.models.dummy import random_params
from jinfercept.models.model import Model, Params, kv_bytes_per_token
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import StepPlan

TRACED_STEPS = 8
FORGOTTEN_AFTER = 3  # steps after which a page that went out is dropped
TIMES_ENOUGH = 8  # a turn is longer than that of a kernel


class Bench(NamedTuple):
    """What is driven: a runner, its sizes, and where its spare pages begin."""

    runner: ModelRunner
    shape: RunnerShape
    first_spare: int
    page_bytes: int


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure every way of transferring, under a step that only decodes and under one with a chunk."""
    config = next(iter(sizes.models.values()))
    model, params = Model(config), random_params(config, sizes.dtype, 0)
    ways = [(parts, 1) for parts in sizes.transfer_parts] + [(1, pages) for pages in sizes.staging_pages if pages > 1]
    for parts, staging in ways:
        bench = _bench(sizes, model, params, parts, staging)
        try:
            yield from _measure(sizes, config, bench, parts)
        finally:
            bench.runner.close()


def _bench(sizes: Sizes, model: Model, params: Params, parts: int, staging: int) -> Bench:
    num_rows, context = sizes.transfer_rows
    mixed_rows, _, chunk = sizes.mixed
    shape = RunnerShape(
        num_pages=0,
        page_size=sizes.page_size,
        max_num_seqs=max(num_rows, mixed_rows + 1),
        max_model_len=max(context, chunk, 2),
        buckets=tuple(sorted({num_rows, mixed_rows + chunk})),
        layers_per_step=sizes.layers_per_step[0],
        transfer_parts=parts,
        staging_pages=staging,
    )
    used = max(pages_of(shape, num_rows, context), pages_of(shape, mixed_rows, context, chunk))
    shape = replace(shape, num_pages=used + 2 * sizes.transfer_pages)
    runner = ModelRunner(model, params, shape)
    runner.warm_up()
    fill(runner)
    return Bench(runner, shape, 1 + used, sizes.page_size * kv_bytes_per_token(model.config, sizes.dtype))


def _measure(sizes: Sizes, config: ModelConfig, bench: Bench, parts: int) -> Iterator[Row]:
    pieces = min(parts, config.num_layers)
    links = {way: link_rate(sizes, way, bench.page_bytes // pieces, MOST_AT_ONCE) for way in WAYS}
    num_rows, context = sizes.transfer_rows
    mixed_rows, _, chunk = sizes.mixed
    runner, enough_s = bench.runner, TIMES_ENOUGH * sizes.enough_s
    for name, plan in (
        ("decode", step(bench.shape, num_rows, context)),
        ("mixed", step(bench.shape, mixed_rows, context, chunk)),
    ):
        runner.collect(runner.submit(plan))
        plain = settled(plan)
        base_s, dispatch_s = steady_s(runner, iter(lambda plain=plain: plain, None), enough_s)
        common = {
            "parts": parts,
            "staging": bench.shape.staging_pages,
            "step": name,
            "tokens": plan.num_tokens,
            "context": context,
        }
        yield common | {"way": "none", "share": 0.0, "pages": 0, "step_s": base_s, "dispatch_s": dispatch_s}
        for share in sizes.transfer_shares:
            for way, ways in WAYS.items():
                wanted = round(share * links[way] * base_s / bench.page_bytes / ways)
                pages = max(1, min(wanted, sizes.transfer_pages))
                with_s, dispatch_s = _loaded(bench, plain, way, pages, lambda plans: steady_s(runner, plans, enough_s))
                rate = ways * pages * bench.page_bytes / with_s
                yield common | {
                    "way": way,
                    "share": share,
                    "pages": pages,
                    "step_s": with_s,
                    "dispatch_s": dispatch_s,
                    "slowdown": with_s / base_s - 1,
                    "bytes_per_s": rate,
                    "link_bytes_per_s": links[way],
                    "link_share": rate / links[way],
                }
        if jax.default_backend() == "gpu":
            pages = max(1, min(round(links["both"] * base_s / bench.page_bytes / 2), sizes.transfer_pages))
            events = _loaded(
                bench, plain, "both", pages, lambda plans: traced(lambda: turn(runner, plans, TRACED_STEPS))
            )
            for row in copies(events):
                yield common | {"way": "trace", "pages": pages} | row


def _loaded[T](bench: Bench, plan: StepPlan, way: str, pages: int, measure: Callable[[Iterator[StepPlan]], T]) -> T:
    """What a measurement of a step with so many pages out, in, or each gives; the host is empty afterwards."""
    runner, kept = bench.runner, tuple(range(pages))
    leaving = [bench.first_spare + index for index in range(pages)]
    landing = [slot + pages for slot in leaving]
    there = tuple(map(PageCopy, landing, kept))
    runner.collect(runner.submit(StepPlan(0, 0, offload=there)))
    left: deque[tuple[int, ...]] = deque()

    def plans() -> Iterator[StepPlan]:
        for number in count(1):
            coming = there if way in ("in", "both") else ()
            if way == "in":
                yield replace(plan, fetch=coming, scatter=coming)
                continue
            slots = tuple(range(number * pages, (number + 1) * pages))
            left.append(slots)
            drop = left.popleft() if len(left) > FORGOTTEN_AFTER else ()
            yield replace(plan, fetch=coming, scatter=coming, drop=drop, offload=tuple(map(PageCopy, leaving, slots)))

    try:
        return measure(plans())
    finally:
        runner.kv.wait()
        runner.collect(runner.submit(StepPlan(0, 0, drop=tuple(runner.kv.host))))
