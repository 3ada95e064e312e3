"""How much of the time the device has nothing to do while the whole engine decodes, at depth 0 and 1.

A profiler's trace says so, what no kernel covers between the first and the last, and the wall clock beside it: a step's time
against that of the same steps submitted without reading any. Rows: `model`, `depth`, `batch`, `context`, `step_s`, `queued_s`
and `by_wall` of the clock; `idle_share`, `busy_s`, `largest_gap_s` and `lines` of the trace.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from statistics import median
from typing import Any

from benchmarks.gpu_suite.plans import settled, step
from benchmarks.gpu_suite.sizes import Row, Sizes
from benchmarks.gpu_suite.trace import gaps, traced
from jinfercept.engine.engine import Engine
from jinfercept.events import Token
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import StepPlan
from jinfercept.sim.scripted import random_tokens
from jinfercept.startup.start import EngineSetup, set_up

WARM_STEPS = 8
TURNS = 3


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the first model at both depths."""
    name, config = next(iter(sizes.models.items()))
    batch, context = sizes.transfer_rows
    most = context + 2 + (1 + TURNS) * (WARM_STEPS + sizes.idle_steps)
    flags: dict[str, Any] = {
        "dtype": sizes.dtype,
        "page_size": sizes.page_size,
        "max_num_seqs": batch,
        "max_model_len": most,
    }
    flags |= {
        "kv_tokens": batch * (most + sizes.page_size),
        "max_num_batched_tokens": max(sizes.policies.bucket, batch),
    }
    with closing(set_up(config, load_format="dummy", profile="paper-gptj-6b-a100", **flags)) as setup:
        for depth in (0, 1):
            row = _measure(sizes, setup.changed(pipeline_depth=depth), batch, context, most)
            yield {"model": name, "depth": depth, "batch": batch, "context": context} | row


def _measure(sizes: Sizes, setup: EngineSetup, batch: int, context: int, most: int) -> Row:
    engine, dispatcher, _ = setup.assemble()
    _start_decoding(engine, setup.model.config.vocab_size, batch, context, most)
    seconds = median(_steps(engine, sizes.idle_steps) for _ in range(TURNS)) / sizes.idle_steps
    events = traced(lambda: _steps(engine, sizes.idle_steps))
    engine.close()
    dispatcher.close()
    setup.machine.runner.reset()
    kernels = [(event.start, event.end) for event in events if not event.is_copy]
    queued_s = _queued_s(sizes, setup, batch, context)
    row: Row = {"step_s": seconds, "queued_s": queued_s, "by_wall": max(0.0, 1 - queued_s / seconds)}
    return row | {"lines": sorted({event.line for event in events})} | (gaps(kernels) if kernels else {})


def _start_decoding(engine: Engine, vocab_size: int, batch: int, context: int, most: int) -> None:
    """Submit requests and step until all of them decode."""
    write = random_tokens(vocab_size, 0)
    params = SamplingParams(temperature=0.0, max_tokens=most - context - 1, ignore_eos=True)
    for number in range(batch):
        engine.submit(Request(str(number), write(number, 0, context), params))
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {event.request_id for event in engine.step() if isinstance(event, Token)}
        assert engine.has_work, "a step failed, and the requests with it"
    _steps(engine, WARM_STEPS)


def _steps(engine: Engine, count: int) -> float:
    started_s = time.perf_counter()
    for _ in range(count):
        engine.step()
    return time.perf_counter() - started_s


def _queued_s(sizes: Sizes, setup: EngineSetup, batch: int, context: int) -> float:
    """Seconds of such a step when many are submitted and only the last one is read."""
    runner = setup.machine.runner
    plan = step(setup.machine.shape, batch, context)
    runner.collect(runner.submit(plan))
    plan = settled(plan)

    def turn(plan: StepPlan) -> float:
        started_s = time.perf_counter()
        tickets = [runner.submit(plan) for _ in range(sizes.idle_steps)]
        runner.collect(tickets[-1])
        return (time.perf_counter() - started_s) / sizes.idle_steps

    return median(turn(plan) for _ in range(TURNS))
