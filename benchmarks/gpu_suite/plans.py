"""Steps made by hand for a runner, and how long they take when each is submitted before the last one's tokens are read."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp

from jinfercept.layouts.pages import KVPages
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import FROM_DEVICE, Chunk, NewPages, Sample, StepPlan
from jinfercept.sched.sampling_options import TokenHistory, draw_options

GREEDY = SamplingParams(temperature=0.0)
FIRST_PAGE = 1  # the scratch page is before it
TURNS = 3
WARM_STEPS = 3


def step(
    shape: RunnerShape,
    rows: int,
    context: int,
    chunk: int = 0,
    sampling: SamplingParams = GREEDY,
    first_page: int = FIRST_PAGE,
) -> StepPlan:
    """Rows that decode, each with a context of so many tokens, and one chunk from its first token beside them.

    Pages lie one after the other from `first_page` on: the pool must have them.
    """
    plans, used, options = [], first_page - FIRST_PAGE, draw_options(sampling, frozenset())
    decoding, prefill = [(context - 1, (FROM_DEVICE,))] * rows, [(0, (1,) * chunk)] * bool(chunk)
    for slot, (start, tokens) in enumerate(decoding + prefill):
        num_pages = -(-(start + len(tokens)) // shape.page_size)
        new_pages = NewPages(0, range(FIRST_PAGE + used, FIRST_PAGE + used + num_pages))
        used += num_pages
        length = start + len(tokens)
        history = TokenHistory((1,) * length, ((0, length),)) if options and options.remembered else None
        sample = Sample(sampling.temperature, slot, length, options, history=history)
        plans.append(Chunk(slot, start, tokens, new_pages, sample))
    assert used <= shape.num_pages
    num_tokens = sum(len(chunk.tokens) for chunk in plans)
    return StepPlan(0, next(size for size in shape.buckets if size >= num_tokens), tuple(plans))


def pages_of(shape: RunnerShape, rows: int, context: int, chunk: int = 0) -> int:
    """Pages that `step` takes."""
    return rows * -(-context // shape.page_size) + -(-chunk // shape.page_size)


def settled(plan: StepPlan) -> StepPlan:
    """The plan when its page tables and the tokens of its slots are known already."""

    def known(chunk: Chunk) -> Chunk:
        return chunk._replace(new_pages=(), sample=chunk.sample and chunk.sample._replace(history=None))

    return replace(plan, chunks=tuple(map(known, plan.chunks)))


def steady_s(runner: ModelRunner, plans: Iterator[StepPlan], enough_s: float) -> tuple[float, float]:
    """Seconds of a step, and those of them that `submit` took: medians over turns of many steps.

    A turn ends when all that it started has arrived, copies too.
    """
    once_s, _ = turn(runner, plans, WARM_STEPS)
    once_s, _ = turn(runner, plans, WARM_STEPS)
    count = max(4, round(enough_s / once_s))
    turns = [turn(runner, plans, count) for _ in range(TURNS)]
    return median(seconds for seconds, _ in turns), median(dispatch_s for _, dispatch_s in turns)


def turn(runner: ModelRunner, plans: Iterator[StepPlan], count: int) -> tuple[float, float]:
    """Seconds of each of so many steps, and those of them that `submit` took."""
    submitted_s, tickets = 0.0, []
    started_s = time.perf_counter()
    for _ in range(count):
        plan = next(plans)
        before_s = time.perf_counter()
        tickets.append(runner.submit(plan))
        submitted_s += time.perf_counter() - before_s
        if len(tickets) > 1:
            runner.collect(tickets[-2])
    runner.collect(tickets[-1])
    runner.kv.wait()
    return (time.perf_counter() - started_s) / count, submitted_s / count


def fill(runner: ModelRunner) -> None:
    """Give all pages random numbers: on zeros a device runs faster than it really would."""
    layers = list(runner.kv.layers)
    runner.kv.layers = ()
    shape, dtype, home = layers[0].shape, layers[0].dtype, layers[0].sharding
    for number in range(len(layers)):
        layers[number] = jax.device_put(_random_pages(jax.random.key(number), shape, dtype.name), home)
    runner.kv.layers = tuple(layers)


@partial(jax.jit, static_argnums=(1, 2))
def _random_pages(key: jax.Array, shape: tuple[int, ...], dtype: str) -> KVPages:
    """One random page, so many times."""
    return jnp.broadcast_to(jax.random.uniform(key, shape[1:], dtype, -1.0, 1.0), shape)
