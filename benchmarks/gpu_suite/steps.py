"""Step times of whole models with random weights against their rooflines: decoding, and a chunk beside it.

A roofline is the larger of the bytes (weights but the embedding, and the contexts' keys and values) over the measured copy
bandwidth, and the operations over the measured matmul rate. Rows: `model`, `layers_per_step`, `step`, `batch` (decoding rows),
`context`, `chunk`, `seconds`, `dispatch_s`, `roofline_s`, `bound` (memory or compute) and `times`, seconds over roofline; once
for each runner `start_s`, what compiling it took; and last for each model the `choice` that the profiler's rule would make of
these `layers_per_step`.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

from benchmarks.gpu_suite.ceilings import copy_rate, matmul_rate
from benchmarks.gpu_suite.plans import fill, pages_of, settled, steady_s, step
from benchmarks.gpu_suite.sizes import GIB, AttentionCase, HeadSizes, Row, Sizes
from jinfercept.models.config import ModelConfig
from jinfercept.models.dummy import random_params
from jinfercept.models.model import Model, Params, abstract_params, kv_bytes_per_token
from jinfercept.runner.runner import ModelRunner, RunnerShape
from jinfercept.startup.layer_groups import SLACK, choose

SPARE_BYTES = 5 * GIB  # of a GPU's memory, for what steps need besides pages
POOL_SHARE = 0.95


class StepCase(NamedTuple):
    """A step: rows that decode with a context each, and a chunk from its first token beside them."""

    batch: int
    context: int
    chunk: int


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all models, the settings that matter most first."""
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in sizes.models}
    for layers_per_step in sizes.layers_per_step:
        for name, config in sizes.models.items():
            params = random_params(config, sizes.dtype, 0)
            measured = list[float]()
            for row in _measure(sizes, config, params, layers_per_step, copy, matmul):
                measured += [row["seconds"]] if "seconds" in row else []
                yield {"model": name, "layers_per_step": layers_per_step} | row
            seconds[name][layers_per_step] = measured
            del params
    for name, costs in seconds.items():
        if len(set(map(len, costs.values()))) == 1:  # all had pages for the same steps
            yield {"model": name, "layers_per_step": choose(costs, SLACK), "step": "choice"}


def _measure(
    sizes: Sizes, config: ModelConfig, params: Params, layers_per_step: int, copy: float, matmul: float
) -> Iterator[Row]:
    shape = _shape(sizes, config, params, layers_per_step)
    began_s = time.perf_counter()
    runner = ModelRunner(Model(config), params, shape)
    runner.warm_up()
    yield {"step": "start", "start_s": time.perf_counter() - began_s, "pool_tokens": shape.num_pages * shape.page_size}
    fill(runner)
    try:
        for case in _cases(sizes):
            if pages_of(shape, *case) > shape.num_pages:
                continue
            plan = step(shape, *case)
            runner.collect(runner.submit(plan))
            plan = settled(plan)
            seconds, dispatch_s = steady_s(runner, iter(lambda plan=plan: plan, None), 4 * sizes.enough_s)
            memory_s, compute_s = _floors(config, sizes, case, copy, matmul)
            yield {
                "step": "mixed" if case.chunk else "decode",
                **case._asdict(),
                "seconds": seconds,
                "dispatch_s": dispatch_s,
                "roofline_s": max(memory_s, compute_s),
                "bound": "memory" if memory_s > compute_s else "compute",
                "times": seconds / max(memory_s, compute_s),
            }
    finally:
        runner.close()


def _cases(sizes: Sizes) -> list[StepCase]:
    decoding = [StepCase(batch, context, 0) for batch in sizes.batches for context in sizes.contexts]
    batch, context, chunk = sizes.mixed
    return [*decoding[: len(sizes.contexts)], StepCase(batch, context, chunk), *decoding[len(sizes.contexts) :]]


def _shape(sizes: Sizes, config: ModelConfig, params: Params, layers_per_step: int) -> RunnerShape:
    batch, context, chunk = sizes.mixed
    return RunnerShape(
        num_pages=_pool_tokens(sizes, config, params) // sizes.page_size,
        page_size=sizes.page_size,
        max_num_seqs=max(*sizes.batches, batch + 1),
        max_model_len=max(*sizes.contexts, context, chunk),
        buckets=tuple(sorted({*sizes.batches, batch + chunk})),
        layers_per_step=layers_per_step,
    )


def _pool_tokens(sizes: Sizes, config: ModelConfig, params: Params) -> int:
    """What is asked for, or what the device's memory has left beside the weights and a margin."""
    leaf = jax.tree.leaves(jax.block_until_ready(params))[0]
    stats = next(iter(leaf.devices())).memory_stats()
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
    contexts = case.batch * case.context + case.chunk
    num_bytes = itemsize * (sum(layer_sizes) + sum(head_sizes)) + contexts * kv_bytes_per_token(config, sizes.dtype)
    heads = HeadSizes("", config.num_heads, config.num_kv_heads, config.head_dim)
    attention = AttentionCase(heads, case.batch, 1, case.context).flops
    if case.chunk:
        attention += AttentionCase(heads, 1, case.chunk, case.chunk).flops
    flops = 2 * tokens * sum(layer_sizes) + 2 * sampled * sum(head_sizes) + config.num_layers * attention
    return num_bytes / copy, flops / matmul
