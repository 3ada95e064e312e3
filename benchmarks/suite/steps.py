"""Step times of a whole model with random weights against their rooflines, and the device's time for every operation.

A roofline is the larger of the bytes (weights but the embedding, and the contexts' keys and values) over the measured copy
bandwidth, and the operations over the measured matmul rate. Rows: `model`, `layers_per_step`, `attention`, `step`, and

* decode, mixed: `batch` (decoding rows), `context`, `chunk`, `before` (tokens before it), `bucket`, `sampling`, `seconds`,
  `dispatch_s`, `roofline_s`, `bound` (memory or compute) and `times`, seconds over roofline;
* trace: of the middle of such steps, with `graphs` or without: `step_s` by the wall clock, which a profiler slows, `kernels`
  and `busy_s` of a step, `idle_share` and `largest_gap_s`; operation: its longest ones, see `trace.operations`, where the shape
  tells a product (qkv, o, gate and up, down, head) by its columns;
* written: `error`, how far the keys and values of the last layer are from those that the first kernel leads to, as a
  share of their norm, its `limit` and whether it is `ok`;
* ceilings: the rates; start: once for each runner `start_s`, what compiling it took.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.parts import TRACED_WITH_GRAPHS
from benchmarks.suite.plans import (
    FIRST_PAGE,
    GREEDY,
    StepTimes,
    fill,
    mean_times,
    pages_of,
    run_steps,
    settled,
    steady_s,
    step,
)
from benchmarks.suite.sizes import GIB, AttentionCase, HeadSizes, Row, Sizes
from benchmarks.suite.timing import copy_rate, matmul_rate
from benchmarks.suite.trace import FILL_STEPS, gaps, operations, traced_steps
from jinfercept.models.attention import available
from jinfercept.models.config import ModelConfig
from jinfercept.models.load import random_params
from jinfercept.models.model import Model, Params, abstract_params, kv_bytes_per_token
from jinfercept.pallas.tiles import Heads
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import StepPlan

SPARE_BYTES = 5 * GIB  # of a GPU's memory, for what steps need besides pages
POOL_SHARE = 0.95
LEAST_BUCKET = 8  # of an engine on a GPU
MOST_OPERATIONS = 24
REFERENCE = "reference"
MOST_ERROR = 0.1
"""Of what the last layer writes in bfloat16 by two kernels: on an H200 each is 0.042 from the reference, a wrong one near 1."""

SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn": SamplingParams(),
    "filtered": SamplingParams(top_k=50, top_p=0.9),
    "shaped": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
"""What all rows of a step ask for."""


class StepCase(NamedTuple):
    """A step: rows that decode with a context each, and a chunk beside them, with so many tokens before it."""

    batch: int
    context: int
    chunk: int = 0
    before: int = 0


class Bench(NamedTuple):
    """What is measured with one runner.

    Attributes:
        model: its name among the sizes'.
        layers_per_step: of the runner.
        cases: steps.
        samplings: names of ways to sample, each measured with the first step.
        traced: whether steps of decode rows are traced too.
        attention: its implementation.
        is_compared: whether what the last layer writes for a prompt is kept, see `_written`.
    """

    model: str
    layers_per_step: int
    cases: Sequence[StepCase]
    samplings: Sequence[str] = ("greedy",)
    traced: bool = False
    attention: str = "auto"
    is_compared: bool = False


def decode_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model: decode steps, a chunk beside them, ways of sampling.

    The first step is measured in the executables of mixed steps too: a chunk of two tokens has the work of a decode step.
    """
    (batch, context), *_ = sizes.decodes
    cases = [*(StepCase(*case) for case in sizes.decodes), StepCase(batch - 2, context, 2), StepCase(*sizes.mixed)]
    bench = Bench(next(iter(sizes.models)), sizes.layers_per_step[0], cases, tuple(SAMPLINGS), traced=True)
    yield from _rows(sizes, [bench])


def group_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model's first decode steps and a chunk, by layers per executable."""
    name, cases = next(iter(sizes.models)), [*(StepCase(*case) for case in sizes.decodes[:2]), StepCase(*sizes.mixed)]
    yield from _rows(sizes, [Bench(name, layers, cases) for layers in sizes.layers_per_step])


def deep_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model's chunk far behind its first token, by every kernel of attention.

    What the last layer writes is compared with what it writes by the first kernel, or by the reference where there is one only.
    """
    (name, config), *_ = sizes.models.items()
    chunk, before = sizes.deep
    cases = [StepCase(0, 0, chunk, before)]
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, jnp.dtype(sizes.dtype).itemsize)
    names = available(sizes.dtype, sizes.dtype, heads, sizes.page_size)
    names = names if len(names) > 1 else [REFERENCE, *names]
    benches = [
        Bench(name, sizes.layers_per_step[0], cases, traced=True, attention=each, is_compared=True) for each in names
    ]
    expected: np.ndarray | None = None
    for row in _rows(sizes, benches):
        if "written" in row:
            written: np.ndarray = row.pop("written")
            expected = written if expected is None else expected
            error = float(np.linalg.norm(written - expected) / np.linalg.norm(expected))
            row |= {"error": error, "limit": MOST_ERROR, "ok": error <= MOST_ERROR}
        yield row


def _rows(sizes: Sizes, benches: Sequence[Bench]) -> Iterator[Row]:
    """Measure one runner after the other, all of one model."""
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    yield {"step": "ceilings", "copy_bytes_per_s": copy, "matmul_flops_per_s": matmul}
    config = sizes.models[benches[0].model]
    params = random_params(config, sizes.dtype, 0)
    for bench in benches:
        common = {"model": bench.model, "layers_per_step": bench.layers_per_step, "attention": bench.attention}
        for row in _measure(sizes, config, params, bench):
            if "seconds" in row:
                memory_s, compute_s = _floors(config, sizes, _case(row), copy, matmul)
                floor_s = max(memory_s, compute_s)
                row |= {"roofline_s": floor_s, "bound": "memory" if memory_s > compute_s else "compute"}
                row["times"] = row["seconds"] / floor_s
            yield common | row


def _case(row: Row) -> StepCase:
    return StepCase(row["batch"], row["context"], row["chunk"], row["before"])


def _measure(sizes: Sizes, config: ModelConfig, params: Params, bench: Bench) -> Iterator[Row]:
    shape = _shape(sizes, config, params, bench)
    began_s = time.perf_counter()
    runner = ModelRunner(Model(config), params, shape, attention=bench.attention)
    runner.warm_up()
    yield {"step": "start", "start_s": time.perf_counter() - began_s, "pool_tokens": shape.num_pages * shape.page_size}
    fill(runner)
    try:
        for number, case in enumerate(bench.cases):
            if pages_of(shape, *case) > shape.num_pages:
                continue
            for sampling in bench.samplings if number == 0 else ("greedy",):
                plan = _plan(shape, case, SAMPLINGS[sampling])
                runner.collect(runner.submit(plan))
                plan = settled(plan)
                seconds, dispatch_s = steady_s(runner, iter(lambda plan=plan: plan, None), sizes.turn_steps)
                common = {"step": "mixed" if case.chunk else "decode", **case._asdict(), "bucket": plan.bucket}
                yield {**common, "sampling": sampling, "seconds": seconds, "dispatch_s": dispatch_s}
                if bench.traced and sampling == "greedy":
                    yield from _traced(sizes, runner, plan, case)
        if bench.is_compared:
            yield {"step": "written", "written": _written(runner, shape, config, bench.cases[0])}
    finally:
        runner.close()


def _written(runner: ModelRunner, shape: RunnerShape, config: ModelConfig, case: StepCase) -> np.ndarray:
    """Keys and values that the last layer writes for a prompt of random tokens in two chunks beside decode rows: they depend
    on the attention of all layers before."""
    plan = _plan(shape, case)
    *decoding, chunk = plan.chunks
    tokens = tuple(np.random.default_rng(0).integers(config.vocab_size, size=case.chunk).tolist())
    half = case.chunk // 2
    for part in (
        chunk._replace(tokens=tokens[:half], sample=None),
        chunk._replace(start=case.before + half, tokens=tokens[half:], new_pages=()),
    ):
        runner.collect(runner.submit(replace(plan, chunks=(*decoding, part))))
    first = FIRST_PAGE + pages_of(shape, case.batch, case.context, 0, case.before)
    pages = runner.kv.layers[-1][first : first + pages_of(shape, 0, 0, half * 2)]
    return np.asarray(pages.astype(jnp.float32))


def _plan(shape: RunnerShape, case: StepCase, sampling: SamplingParams = GREEDY) -> StepPlan:
    return step(shape, case.batch, case.context, case.chunk, sampling, before=case.before)


def _traced(sizes: Sizes, runner: ModelRunner, plan: StepPlan, case: StepCase) -> Iterator[Row]:
    """A trace of some steps: how busy the device is, and the time of its longest operations."""
    count, times = sizes.traced_steps, list[StepTimes]()
    events = traced_steps(lambda steps: times.extend(run_steps(runner, iter(lambda: plan, None), steps)), count)
    kernels = [event for event in events if not event.is_copy]
    if not kernels:
        return
    graphs = TRACED_WITH_GRAPHS[0] in os.environ.get("XLA_FLAGS", "").split()
    common = {**case._asdict(), "graphs": graphs}
    spans = gaps((event.start, event.end) for event in kernels)
    spans["busy_s"] /= count
    step_s, _ = mean_times(times, FILL_STEPS, count)
    yield {"step": "trace", **common, "step_s": step_s, "kernels": len(kernels) / count, **spans}
    for row in operations(kernels, _programs(runner, plan.bucket, not case.chunk), count)[:MOST_OPERATIONS]:
        yield {"step": "operation", **common, **row}


def _programs(runner: ModelRunner, bucket: int, decode_only: bool) -> list[str]:
    """The compiled programs of a bucket's steps, as far as they can be read."""
    keys = [key for key in runner.executables.compile_s if isinstance(key, tuple) and bucket in key]
    others = ("decode embed", "decode layers")
    if decode_only:
        others = ("embed", "layers") if any(key[0] == "decode layers" for key in keys) else ()
    programs = []
    for key in keys:
        if key[0] not in others:
            with suppress(jax.errors.JaxRuntimeError, NotImplementedError):  # one from the cache may have no text
                programs.append(cast(jax.stages.Compiled, runner.executables[key]).as_text() or "")
    return programs


def _shape(sizes: Sizes, config: ModelConfig, params: Params, bench: Bench) -> RunnerShape:
    """Of one pool, whatever is measured: executables depend on its pages, and others are not found in the compilation cache."""
    tokens = [case.batch + case.chunk for case in bench.cases]
    leaf = jax.tree.leaves(jax.block_until_ready(params))[0]
    stats = next(iter(leaf.devices())).memory_stats()
    return RunnerShape(
        num_pages=pool_tokens(sizes, config, stats) // sizes.page_size,
        page_size=sizes.page_size,
        max_num_seqs=max(case.batch + bool(case.chunk) for case in bench.cases),
        max_model_len=max(max(case.context, case.before + case.chunk) for case in bench.cases),
        buckets=tuple(sorted({max(LEAST_BUCKET, 1 << (size - 1).bit_length()) for size in tokens})),
        layers_per_step=min(bench.layers_per_step, config.num_layers),
    )


def pool_tokens(sizes: Sizes, config: ModelConfig, stats: Mapping[str, int] | None) -> int:
    """What is asked for, or what the device's memory has left beside the weights and a margin.

    Args:
        stats: of the memory, as JAX has them; None on a CPU.
    """
    if not stats or "bytes_limit" not in stats:
        return sizes.pool_tokens
    free = POOL_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"] - SPARE_BYTES)
    return min(sizes.pool_tokens, int(free) // kv_bytes_per_token(config, sizes.dtype))


def _floors(config: ModelConfig, sizes: Sizes, case: StepCase, copy: float, matmul: float) -> tuple[float, float]:
    """Least seconds by bytes, and by operations."""
    shapes = abstract_params(config, sizes.dtype)
    layer_sizes, head_sizes = ([leaf.size for leaf in jax.tree.leaves(part)] for part in (shapes.layers, shapes.head))
    itemsize = jax.tree.leaves(shapes.embed)[0].dtype.itemsize
    tokens, sampled = case.batch + case.chunk, case.batch + bool(case.chunk)
    contexts = case.batch * case.context + case.before + case.chunk
    num_bytes = itemsize * (sum(layer_sizes) + sum(head_sizes)) + contexts * kv_bytes_per_token(config, sizes.dtype)
    heads = HeadSizes("", config.num_heads, config.num_kv_heads, config.head_dim)
    attention = AttentionCase(heads, case.batch, 1, case.context).flops
    if case.chunk:
        attention += AttentionCase(heads, 1, case.chunk, case.before + case.chunk).flops
    flops = 2 * tokens * sum(layer_sizes) + 2 * sampled * sum(head_sizes) + config.num_layers * attention
    return num_bytes / copy, flops / matmul
