"""Whether the device computes the same as the CPU: kernels against the reference, and tiny models' tokens.

Rows of kernels: `check`, `heads`, `page_size`, `dtype`, `seed`, `error` (‖out − reference‖ / ‖reference‖), `limit`, `ok`.
Slots that no query sees hold NaN, so that reading one shows. Rows of tokens: `model`, `policy`, `requests`, `different`,
`devices`, `tokens`, `copied_in_tokens`, `ok`; the same requests are served here and on the CPU, with scripted calls and a
contended pool.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_suite.attention_cases import make_batch, random_queries
from benchmarks.gpu_suite.sizes import HeadSizes, Row, Sizes
from jinfercept.models.config import ModelConfig
from jinfercept.pallas.attention import available, cut_for, paged_attention, prepare
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.layout import Batch, kv_shape
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.startup.start import set_up

SEEDS = (0, 1)
DECODE_CONTEXTS = (1, 700, 64, 3, 1500, 257)
CHUNKS = ((0, 130), (513, 77), (40, 2))  # (tokens before it, query tokens)
POLICIES = ("swap", "copy_ahead")


def rows(sizes: Sizes) -> Iterator[Row]:
    """Check kernels, then models."""
    for heads in sizes.checked_heads:
        for page_size in sizes.checked_pages:
            for dtype, limit in sizes.checked_dtypes.items():
                yield from _check_kernels(HeadSizes("", *heads), page_size, dtype, limit, SEEDS)
    for name, config in sizes.checked_models.items():
        yield from _check_tokens(name, config, POLICIES)


def device_rows(sizes: Sizes) -> Iterator[Row]:
    """Models that 2, 4 and 8 GPUs share, as far as there are so many, against the CPU; a machine with one says so."""
    counts = [count for count in (2, 4, 8) if count <= len(jax.devices())]
    if not counts:
        yield {"check": "tokens", "devices": len(jax.devices()), "note": "several devices need more than one"}
    for (name, config), count in product(sizes.checked_models.items(), counts):
        if config.num_heads % count == 0:
            yield from _check_tokens(name, config, POLICIES, count)


def memcheck_rows(sizes: Sizes) -> Iterator[Row]:
    """Few of the checks, for `compute-sanitizer`, which slows every kernel."""
    dtype, limit = list(sizes.checked_dtypes.items())[-1]
    for heads in sizes.checked_heads[:2]:
        yield from _check_kernels(HeadSizes("", *heads), sizes.checked_pages[0], dtype, limit, SEEDS[:1])
    name, config = next(iter(sizes.checked_models.items()))
    yield from _check_tokens(name, config, POLICIES[:1])


def _check_kernels(heads: HeadSizes, page_size: int, dtype: str, limit: float, seeds: Sequence[int]) -> Iterator[Row]:
    reference, cpu = jax.jit(paged_attention_reference), jax.local_devices(backend="cpu")[0]
    for name in available(dtype, dtype, heads.dim, page_size):
        run = jax.jit(partial(paged_attention, implementation=name))
        for seed in seeds:
            q, pages, batch = _inputs(heads, page_size, dtype, np.random.default_rng(seed))
            sizes = Heads(heads.query, heads.kv, heads.dim, jnp.dtype(dtype).itemsize)
            batch = prepare(batch, cut_for(sizes, dtype, dtype, implementation=name))
            expected = np.asarray(reference(*jax.device_put((_wide(q), _wide(pages), batch), cpu)))
            found = np.asarray(_wide(run(q, pages, batch)))
            error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
            yield {
                "check": f"{name} attention",
                "heads": f"{heads.query}/{heads.kv} × {heads.dim}",
                "page_size": page_size,
                "dtype": dtype,
                "seed": seed,
                "error": error if np.isfinite(error) else repr(error),
                "limit": limit,
                "ok": error <= limit,
            }


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32)


def _inputs(
    heads: HeadSizes, page_size: int, dtype: str, rng: np.random.Generator
) -> tuple[jax.Array, jax.Array, Batch]:
    """Queries; pages, of which only what the rows see is a number; the rows' batch, with padding."""
    spans = [(context - 1, 1) for context in rng.permutation(DECODE_CONTEXTS).tolist()]
    spans += [(before, tokens) for before, tokens in rng.permutation(CHUNKS).tolist()]
    contexts = [start + tokens for start, tokens in spans]
    width = -(-max(contexts) // page_size) + 1
    num_pages = 2 + sum(-(-context // page_size) for context in contexts)
    free = iter(1 + rng.permutation(num_pages - 1))
    tables = np.zeros((len(spans), width), np.int32)
    pages = np.full(kv_shape(num_pages, page_size, heads.kv, heads.dim), np.nan, np.float32)
    for row, context in enumerate(contexts):
        for index in range(-(-context // page_size)):
            tables[row, index] = page = next(free)
            written = min(page_size, context - index * page_size)
            pages[page, :written] = rng.standard_normal((written, *pages.shape[2:]))
    batch = make_batch(spans, tables, page_size, spare_tokens=5, spare_rows=2)
    return random_queries(heads, batch.tokens.shape[0], dtype), jnp.asarray(pages, dtype), batch


def _check_tokens(name: str, config: ModelConfig, policies: Sequence[str], num_devices: int = 1) -> Iterator[Row]:
    from jinfercept.bench.replay import different, replay
    from jinfercept.models.dummy import random_params
    from jinfercept.models.model import Model
    from jinfercept.sim.arrivals import Arrival
    from jinfercept.sim.scripted import make_request, random_tokens
    from jinfercept.sim.workload import Script, Segment

    write = random_tokens(config.vocab_size, 0)
    script = Script("chat", 20, (Segment(6, 0.05, 7), Segment(5, 0.03, 9), Segment(6, None, 0)))
    arrivals = [Arrival(0.005 * number, script._replace(prompt=16 + number % 7)) for number in range(12)]
    requests = [(at_s, make_request(number, one, write)) for number, (at_s, one) in enumerate(arrivals)]
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        params = random_params(config, "float32", 0)
    flags: dict[str, Any] = {
        "page_size": 8,
        "kv_tokens": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
    }
    flags |= {"dtype": "float32", "profile": "paper-gptj-6b-a100", "check_pages": True}
    here = jax.devices()[0]
    with jax.default_device(cpu):
        setup_there = set_up(Model(config), params=params, attention="cpu", **flags)
    with closing(setup_there) as reference:
        expected = replay(reference, "copy_ahead", requests, write, 30.0)
        with (
            nullcontext(reference)
            if here == cpu and num_devices == 1
            else closing(set_up(Model(config), params=params, tensor_parallel_size=num_devices, **flags))
        ) as setup:
            for policy in policies:
                found = replay(setup, policy, requests, write, 30.0)
                wrong = different(found.streams, expected.streams)
                yield {
                    "check": "tokens",
                    "model": name,
                    "policy": policy,
                    "devices": num_devices,
                    "requests": len(found.streams),
                    "different": wrong,
                    "tokens": sum(map(len, found.streams.values())),
                    "copied_in_tokens": found.report["copied_in_tokens"],
                    "ok": not wrong and len(found.streams) == len(requests),
                }
