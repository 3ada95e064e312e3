"""Steps made by hand for a runner, and how long they take when each is submitted before the last one's tokens are read."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.suite.trace import DRAIN_STEPS, FILL_STEPS
from jinfercept.pallas.layouts.pages import KVPages
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import FROM_DEVICE, Chunk, NewPages, Sample, StepPlan, TokenHistory, draw_options

GREEDY = SamplingParams(temperature=0.0)
FIRST_PAGE = 1  # the scratch page is before it
TURNS = 3
WARM_STEPS = 3
MOST_TURN_S = 1.0
"""Seconds of a turn: where so many steps take longer it has fewer."""
LEAST_STEPS = 4


def step(
    shape: RunnerShape,
    rows: int,
    context: int,
    chunk: int = 0,
    sampling: SamplingParams = GREEDY,
    first_page: int = FIRST_PAGE,
    before: int = 0,
) -> StepPlan:
    """Rows that decode, each with a context of so many tokens, and one chunk beside them, with so many tokens before it.

    Pages lie one after the other from `first_page` on: the pool must have them.
    """
    plans, used, options = [], first_page - FIRST_PAGE, draw_options(sampling, frozenset())
    decoding, prefill = [(context - 1, (FROM_DEVICE,))] * rows, [(before, (1,) * chunk)] * bool(chunk)
    for slot, (start, tokens) in enumerate(decoding + prefill):
        num_pages = -(-(start + len(tokens)) // shape.page_size)
        new_pages = NewPages(0, range(FIRST_PAGE + used, FIRST_PAGE + used + num_pages))
        used += num_pages
        length = start + len(tokens)
        history = TokenHistory((1,) * length, ((0, length),)) if options and options.remembered else None
        sample = Sample(sampling.temperature, slot, options, history=history)
        plans.append(Chunk(slot, start, tokens, new_pages, sample))
    assert used <= shape.num_pages
    num_tokens = sum(len(chunk.tokens) for chunk in plans)
    return StepPlan(0, next(size for size in shape.buckets if size >= num_tokens), tuple(plans))


def pages_of(shape: RunnerShape, rows: int, context: int, chunk: int = 0, before: int = 0) -> int:
    """Pages that `step` takes."""
    return rows * -(-context // shape.page_size) + -(-(before + chunk) // shape.page_size)


def settled(plan: StepPlan) -> StepPlan:
    """The plan when its page tables and the tokens of its slots are known already."""

    def known(chunk: Chunk) -> Chunk:
        return chunk._replace(new_pages=(), sample=chunk.sample and chunk.sample._replace(history=None))

    return replace(plan, chunks=tuple(map(known, plan.chunks)))


class StepTimes(NamedTuple):
    """When a step's tokens were collected, by a clock, and the seconds that its `submit` took."""

    collected_s: float
    dispatch_s: float


def steady_s(
    runner: ModelRunner, plans: Iterator[StepPlan], steps: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Seconds of a step, and those of them that `submit` took: medians over turns of many steps.

    All turns are one run: neither filling the pipeline counts, in which the device waits for the host's first dispatch, nor
    draining it. A turn ends with copies in flight as it begins, which hides none of them: the compute of a step waits for the
    scatter of the step before, and `submit` for the offloads of the step before the last one. Where these are slower than the
    compute, the first turn ends with more of them in flight than it began with, two steps' at most, and the others do not.

    Args:
        steps: of a turn, unless they take more than `MOST_TURN_S`.
        clock: seconds.
    """
    mean_s, _ = mean_times(run_steps(runner, plans, FILL_STEPS + WARM_STEPS, clock), FILL_STEPS, WARM_STEPS)
    count = max(LEAST_STEPS, min(steps, int(MOST_TURN_S / mean_s)))
    times = run_steps(runner, plans, FILL_STEPS + TURNS * count + DRAIN_STEPS, clock)
    turns = [mean_times(times, FILL_STEPS + number * count, count) for number in range(TURNS)]
    return median(seconds for seconds, _ in turns), median(dispatch_s for _, dispatch_s in turns)


def mean_times(times: Sequence[StepTimes], first: int, count: int) -> tuple[float, float]:
    """Seconds of a step, from the collection of the step before the first one to that of the last, and of its `submit`."""
    end = first + count
    seconds = (times[end - 1].collected_s - times[first - 1].collected_s) / count
    return seconds, fmean(step.dispatch_s for step in times[first:end])


def run_steps(
    runner: ModelRunner, plans: Iterator[StepPlan], count: int, clock: Callable[[], float] = time.perf_counter
) -> list[StepTimes]:
    """Run so many steps, each submitted before the last one is collected. When it returns all copies have arrived."""
    collected, dispatches, tickets = list[float](), list[float](), []
    for _ in range(count):
        plan = next(plans)
        began_s = clock()
        tickets.append(runner.submit(plan))
        dispatches.append(clock() - began_s)
        if len(tickets) > 1:
            runner.collect(tickets[-2])
            collected.append(clock())
    runner.collect(tickets[-1])
    collected.append(clock())
    runner.kv.wait()
    return list(map(StepTimes, collected, dispatches))


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
