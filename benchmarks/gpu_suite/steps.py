"""Step times of whole models with random weights against their rooflines: decoding, a chunk beside it, ways of sampling.

A roofline is the larger of the bytes (weights but the embedding, and the contexts' keys and values) over the measured copy
bandwidth, and the operations over the measured matmul rate. Rows: `model`, `layers_per_step`, `buckets` (fitted, or the default
ones of an engine), `joined_decode`, `step`, `batch` (decoding rows), `context`, `chunk`, `bucket`, `sampling`, `seconds`,
`dispatch_s`, `roofline_s`, `bound` (memory or compute) and `times`, seconds over roofline; once for each runner `start_s`,
what compiling it took. A chunk of two tokens has the work of a decode step and the executables of a mixed one: what steps of
decode rows gain from executables of their own is the difference. The part `groups` ends with the `choice` that the profiler's
rule would make.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from benchmarks.gpu_suite.ceilings import copy_rate, matmul_rate
from benchmarks.gpu_suite.plans import GREEDY, fill, pages_of, settled, steady_s, step
from benchmarks.gpu_suite.sizes import GIB, AttentionCase, HeadSizes, Row, Sizes
from jinfercept.models.config import ModelConfig
from jinfercept.models.dummy import random_params
from jinfercept.models.model import Model, Params, abstract_params, kv_bytes_per_token
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.startup.layer_groups import SLACK, choose
from jinfercept.startup.sizing import buckets as default_buckets

SPARE_BYTES = 5 * GIB  # of a GPU's memory, for what steps need besides pages
POOL_SHARE = 0.95
LEAST_BUCKET = 8  # of an engine on a GPU

SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn": SamplingParams(),
    "filtered": SamplingParams(top_k=50, top_p=0.9),
    "shaped": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
"""What all rows of a step ask for."""


class StepCase(NamedTuple):
    """A step: rows that decode with a context each, and a chunk from its first token beside them."""

    batch: int
    context: int
    chunk: int = 0


class Bench(NamedTuple):
    """What is measured with one runner.

    Attributes:
        model: its name among the sizes'.
        layers_per_step: of the runner.
        cases: steps.
        default_buckets: the buckets are those of an engine with its defaults, not the smallest that hold the steps.
        samplings: names of ways to sample, each measured with every step.
        joined_decode: as `RunnerShape` has it.
    """

    model: str
    layers_per_step: int
    cases: Sequence[StepCase]
    default_buckets: bool = False
    samplings: Sequence[str] = ("greedy",)
    joined_decode: bool = True


def decode_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model: decode steps, the first of them in the executables of mixed steps too, and a chunk beside them."""
    (batch, context), *_ = sizes.decodes
    cases = [*(StepCase(*case) for case in sizes.decodes), StepCase(batch - 2, context, 2), StepCase(*sizes.mixed)]
    yield from _rows(sizes, [Bench(next(iter(sizes.models)), sizes.layers_per_step[0], cases)])


def gptj_rows(sizes: Sizes) -> Iterator[Row]:
    """The last model, with the first two decode steps and a chunk."""
    cases = [*(StepCase(*case) for case in sizes.decodes[:2]), StepCase(*sizes.mixed)]
    yield from _rows(sizes, [Bench(list(sizes.models)[-1], sizes.layers_per_step[0], cases)])


def sampled_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model's first decode step, sampled in every way."""
    cases = [StepCase(*sizes.decodes[0])]
    yield from _rows(
        sizes, [Bench(next(iter(sizes.models)), sizes.layers_per_step[0], cases, samplings=tuple(SAMPLINGS))]
    )


def separate_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model's first decode step with rotation and KV writes in kernels of their own, and in that of attention."""
    name, cases = next(iter(sizes.models)), [StepCase(*sizes.decodes[0])]
    ways = [Bench(name, sizes.layers_per_step[0], cases, joined_decode=joined) for joined in (True, False)]
    yield from _rows(sizes, ways)


def default_bucket_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model's steps in the buckets of an engine with its defaults."""
    cases = [StepCase(*case) for case in sizes.between_buckets]
    yield from _rows(sizes, [Bench(next(iter(sizes.models)), sizes.layers_per_step[0], cases, True)])


def group_rows(sizes: Sizes) -> Iterator[Row]:
    """The first model's first decode step and a chunk, by layers per executable."""
    name, cases = next(iter(sizes.models)), [StepCase(*sizes.decodes[0]), StepCase(*sizes.mixed)]
    costs: dict[int, list[float]] = {}
    for row in _rows(sizes, [Bench(name, layers, cases) for layers in sizes.layers_per_step]):
        if "seconds" in row:
            costs.setdefault(row["layers_per_step"], []).append(row["seconds"])
        yield row
    yield {"model": name, "layers_per_step": choose(costs, SLACK), "step": "choice"}


def _rows(sizes: Sizes, benches: Sequence[Bench]) -> Iterator[Row]:
    """Measure one runner after the other, all of one model."""
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    config = sizes.models[benches[0].model]
    params = random_params(config, sizes.dtype, 0)
    for bench in benches:
        common = {
            "model": bench.model,
            "layers_per_step": bench.layers_per_step,
            "buckets": "default" if bench.default_buckets else "fitted",
            "joined_decode": bench.joined_decode,
        }
        for row in _measure(sizes, config, params, bench):
            if "seconds" in row:
                memory_s, compute_s = _floors(config, sizes, _case(row), copy, matmul)
                floor_s = max(memory_s, compute_s)
                row |= {"roofline_s": floor_s, "bound": "memory" if memory_s > compute_s else "compute"}
                row["times"] = row["seconds"] / floor_s
            yield common | row


def _case(row: Row) -> StepCase:
    return StepCase(row["batch"], row["context"], row["chunk"])


def _measure(sizes: Sizes, config: ModelConfig, params: Params, bench: Bench) -> Iterator[Row]:
    shape = _shape(sizes, config, params, bench)
    began_s = time.perf_counter()
    runner = ModelRunner(Model(config), params, shape)
    runner.warm_up()
    yield {"step": "start", "start_s": time.perf_counter() - began_s, "pool_tokens": shape.num_pages * shape.page_size}
    fill(runner)
    try:
        for case in bench.cases:
            if pages_of(shape, *case) > shape.num_pages:
                continue
            for sampling in bench.samplings:
                plan = step(shape, *case, SAMPLINGS[sampling])
                runner.collect(runner.submit(plan))
                plan = settled(plan)
                seconds, dispatch_s = steady_s(runner, iter(lambda plan=plan: plan, None), 4 * sizes.enough_s)
                yield {
                    "step": "mixed" if case.chunk else "decode",
                    **case._asdict(),
                    "bucket": plan.bucket,
                    "sampling": sampling,
                    "seconds": seconds,
                    "dispatch_s": dispatch_s,
                }
    finally:
        runner.close()


def _shape(sizes: Sizes, config: ModelConfig, params: Params, bench: Bench) -> RunnerShape:
    tokens = [case.batch + case.chunk for case in bench.cases]
    num_seqs = max(case.batch + bool(case.chunk) for case in bench.cases)
    fitted = {max(LEAST_BUCKET, 1 << (size - 1).bit_length()) for size in tokens}
    if bench.default_buckets:
        buckets = default_buckets(num_seqs, sizes.policies.bucket, jax.default_backend())
    else:
        buckets = tuple(sorted(fitted))
    return RunnerShape(
        num_pages=_pool_tokens(sizes, config, params) // sizes.page_size,
        page_size=sizes.page_size,
        max_num_seqs=num_seqs,
        max_model_len=max(max(case.context, case.chunk) for case in bench.cases),
        buckets=buckets,
        layers_per_step=min(bench.layers_per_step, config.num_layers),
        joined_decode=bench.joined_decode,
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
