"""Whether the engine works on this machine at all: a default start of a large model, moved contexts, addresses of a large pool.

Rows: `check`, `ok`, and

* start: `seconds`, `load_s` and `compile_s` of them, `executables` and how many of them were `cached`, the pool's `kv_tokens`,
  `peak_bytes` and `limit_bytes` of the device;
* moved tokens: `policy`, `tokens`, `copied_in_tokens` and `different`; one request at a time, so that its steps have the shapes
  of those that keep its context, and equal values by every policy;
* one-byte pages: `layer_bytes`, `wrong_steps` and `wrong_pages`; the same context in the pool's first pages and in its last
  ones, read back by XLA's own gather.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from math import prod

import jax
import numpy as np

from benchmarks.suite.plans import FIRST_PAGE, pages_of, settled, step
from benchmarks.suite.sizes import Row, Sizes
from jinfercept.bench.replay import different, replay
from jinfercept.layouts.kv_rows import stored_dtype
from jinfercept.layouts.pages import kv_shape
from jinfercept.models.config import ModelConfig
from jinfercept.models.dummy import random_params
from jinfercept.models.model import Model
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sim.scripted import make_request, random_tokens
from jinfercept.sim.workload import Script, Segment
from jinfercept.startup.start import EngineSetup, set_up

KEEPING = "preserve"
MOVING = ("swap", "copy_ahead")
REQUESTS = 2
LONGEST_S = 10.0
"""Of a request, which takes about one."""
ONE_BYTE = "int8"
DECODED = 6


def rows(sizes: Sizes) -> Iterator[Row]:
    """Start, move contexts, and use the end of a pool of one-byte pages."""
    logging.basicConfig(level=logging.INFO)  # on standard error, which tells how far a start came that was cut off
    config = next(iter(sizes.models.values()))
    began_s = time.monotonic()
    # a measured profile is what `policies` starts with
    with closing(set_up(config, load_format="dummy", profile="paper-gptj-6b-a100", lazy=True, **sizes.start)) as setup:
        yield _started(setup, time.monotonic() - began_s)
        yield from _moved(setup)
    if sizes.one_byte_pool:
        yield _one_byte_pages(sizes, config)


def _started(setup: EngineSetup, seconds: float) -> Row:
    times, stats = setup.times, setup.runner.device.memory_stats() or {}
    return {
        "check": "start",
        "seconds": seconds,
        "load_s": times.load_s,
        "compile_s": times.compile_s,
        "executables": times.num_executables,
        "cached": times.num_cached,
        "kv_tokens": setup.memory_plan.kv_tokens,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "limit_bytes": stats.get("bytes_limit"),
        "ok": True,
    }


def _moved(setup: EngineSetup) -> Iterator[Row]:
    """The tokens of requests whose contexts move while they call, against those of kept ones."""
    write = random_tokens(setup.model.config.vocab_size, 0)
    script = Script("chat", 40, (Segment(6, 0.05, 7), Segment(5, 0.03, 9), Segment(6, None, 0)))
    requests = [make_request(number, script, write) for number in range(REQUESTS)]

    def serve(policy: str) -> tuple[dict[str, list[int]], int]:
        runs = [replay(setup, policy, [(0.0, request)], write, LONGEST_S) for request in requests]
        streams = {name: stream for run in runs for name, stream in run.streams.items()}
        return streams, sum(run.report["copied_in_tokens"] for run in runs)

    kept, _ = serve(KEEPING)
    for policy in MOVING:
        streams, copied = serve(policy)
        wrong = different(streams, kept)
        yield {
            "check": "moved tokens",
            "policy": policy,
            "tokens": sum(map(len, streams.values())),
            "copied_in_tokens": copied,
            "different": wrong,
            "ok": not wrong and len(streams) == len(kept) == REQUESTS and (copied > 0 or policy != "swap"),
        }


def _one_byte_pages(sizes: Sizes, config: ModelConfig) -> Row:
    """One layer whose pool addresses go beyond 31 bits: what its last pages hold, against its first ones."""
    config = replace(config, num_layers=1)
    model, params = Model(config), random_params(config, sizes.dtype, 0)
    stored = stored_dtype(ONE_BYTE, sizes.dtype)
    page = kv_shape(1, sizes.page_size, config.num_kv_heads, config.head_dim, stored)
    num_rows, context = 4, 2 * sizes.page_size
    shape = RunnerShape(
        num_pages=sizes.one_byte_pool // (stored.itemsize * prod(page)),
        page_size=sizes.page_size,
        max_num_seqs=8,
        max_model_len=context,
        buckets=(8, context),
        layers_per_step=1,
        kv_cache_dtype=ONE_BYTE,
    )
    used = pages_of(shape, num_rows, context)
    places = (FIRST_PAGE, FIRST_PAGE + shape.num_pages - used)
    runner = ModelRunner(model, params, shape)
    runner.warm_up()
    try:
        drawn, pages = zip(
            *(_fill_and_decode(runner, shape, num_rows, context, first) for first in places), strict=True
        )
        layer_bytes = runner.kv.layers[0].nbytes
    finally:
        runner.close()
    wrong_pages = int((pages[0] != pages[1]).any(axis=tuple(range(1, pages[0].ndim))).sum())
    wrong = sum(first != second for first, second in zip(*drawn, strict=True))
    written = bool(pages[0].any())
    return {
        "check": "one-byte pages",
        "layer_bytes": layer_bytes,
        "wrong_steps": wrong,
        "wrong_pages": wrong_pages,
        "ok": written and not wrong and not wrong_pages,
    }


def _fill_and_decode(
    runner: ModelRunner, shape: RunnerShape, num_rows: int, context: int, first_page: int
) -> tuple[list[object], np.ndarray]:
    """The tokens of some steps, and the pages that these filled: a chunk of each row's prompt, then decode steps of all."""
    runner.reset()
    each = pages_of(shape, 1, context)
    for row in range(num_rows):
        chunk = step(shape, 0, 0, context - 1, first_page=first_page + row * each)
        runner.collect(runner.submit(chunk))
    plan, drawn = step(shape, num_rows, context, first_page=first_page), list[object]()
    for _ in range(DECODED):
        drawn.append(runner.collect(runner.submit(plan)).tokens)
        plan = settled(plan)
    slots = np.arange(first_page, first_page + num_rows * each)
    return drawn, np.asarray(jax.jit(lambda layer, slots: layer[slots])(runner.kv.layers[0], slots))
