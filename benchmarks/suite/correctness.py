"""Whether tokens and kernels are right: small models' tokens when contexts move, and kernels against the reference.

Rows of tokens: `model`, `policy`, `by` (auto, or the reference on a cpu), `requests`, `different`, `devices`, `tokens`,
`copied_in_tokens`, `ok`; the same requests with scripted calls, in a contended pool. They are compared with those of the
reference attention on the same device, in float32 with products of the highest precision, which are compared with a CPU's once.

Rows of kernels: `check`, `heads`, `window`, `soft_cap`, `with_sinks`, `page_size`, `dtype`, `pages`, `error` (‖out −
reference‖ / ‖reference‖), `limit`, `ok`. Their inputs are numbers of bfloat16, so that one reference serves all types but
quantised pages, which have one of their own. Slots that no query sees hold NaN, so that reading one shows.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.prepared_batch import prepare
from benchmarks.replay import Replayed, different, random_tokens, replay
from benchmarks.suite.kernel_timing import interleaved, make_batch, random_queries
from benchmarks.suite.sizes import Checked, HeadSizes, Row, Sizes
from jinfercept.models.attention import available, cut_for, paged_attention
from jinfercept.models.config import ModelConfig
from jinfercept.models.load import random_params
from jinfercept.models.model import Model, Params
from jinfercept.pallas.layouts.interleaved import with_padded_heads
from jinfercept.pallas.layouts.kv_rows import is_quantised, stored_dtype
from jinfercept.pallas.layouts.pages import Batch, KVPages, kv_shape, write_kv
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tiles import Heads
from jinfercept.request import Request
from jinfercept.sim.scripted import Writer, make_request
from jinfercept.sim.workload import Arrival, Script, Segment
from jinfercept.start.start import set_up

DECODE_CONTEXTS = (1, 700, 64, 3, 1500, 257)
CHUNKS = ((0, 130), (513, 77), (40, 2))  # (tokens before it, query tokens)
LIMITS = {"float32": 1e-4, "bfloat16": 1e-2}
"""The largest error that is right."""
KEEPING = "preserve"
POLICIES = ("swap", "copy_ahead")
REFERENCE = "reference"
NUM_REQUESTS = 12
ROOM = 1024
"""Tokens of a pool in which every context stays."""


def rows(sizes: Sizes) -> Iterator[Row]:
    """Check tokens."""
    for number, (name, config) in enumerate(sizes.checked_models.items()):
        yield from _check_tokens(name, config, POLICIES, on_cpu=number == 0)


def kind_rows(sizes: Sizes) -> Iterator[Row]:
    """Check tokens of models with windowed and recurrent layers."""
    for name, config in sizes.checked_kinds.items():
        yield from _check_tokens(name, config, POLICIES)


def kernel_rows(sizes: Sizes) -> Iterator[Row]:
    """Check kernels."""
    for checked in sizes.checked:
        yield from _check_kernels(checked, sizes.interleaved)


def device_rows(sizes: Sizes) -> Iterator[Row]:
    """Models that 2, 4 and 8 GPUs share, as far as there are so many, against one; a machine with one says so."""
    counts = [count for count in (2, 4, 8) if count <= len(jax.devices())]
    if not counts:
        yield {"check": "tokens", "devices": len(jax.devices()), "note": "several devices need more than one"}
    models = {**sizes.checked_models, **sizes.checked_kinds}
    for (name, config), count in product(models.items(), counts):
        if config.num_heads % count == 0:
            yield from _check_tokens(name, config, POLICIES, count)


def memcheck_rows(sizes: Sizes) -> Iterator[Row]:
    """Few of the checks, for `compute-sanitizer`, which slows every kernel."""
    for checked in sizes.checked[:2]:
        yield from _check_kernels(checked._replace(dtypes=checked.dtypes[:1]), sizes.interleaved)
    check = _token_check(*next(iter(sizes.checked_models.items())))
    runs = check.serve([KEEPING, *POLICIES[:1]])
    yield check.row(POLICIES[0], "auto", runs[POLICIES[0]], runs[KEEPING])


def _check_kernels(checked: Checked, as_tpus: bool) -> Iterator[Row]:
    """Check every implementation there is.

    Args:
        as_tpus: pages lie as those of TPUs, which a CPU reads by the reference alone.
    """
    heads = HeadSizes("", *checked.heads)
    q, pages, batch = _inputs(heads, checked.page_size)
    sinks = jnp.linspace(-1.0, 3.0, heads.query, dtype=jnp.float32) if checked.with_sinks else None
    scoring = Scoring(checked.window, checked.soft_cap, sinks)
    by_reference = jax.jit(partial(paged_attention_reference, scoring=scoring))
    quantised_cases = [("bfloat16", kind) for kind in checked.quantised]
    for dtype, kind in [*((dtype, dtype) for dtype in checked.dtypes), *quantised_cases]:
        stored = stored_dtype(kind, dtype) if kind in checked.quantised else jnp.dtype(dtype)
        own = _quantised_pages(pages, stored) if is_quantised(stored) else pages.astype(dtype)
        own = interleaved(own) if as_tpus else own
        with jax.default_matmul_precision("highest"):
            expected = np.asarray(by_reference(q, own if is_quantised(stored) else pages, batch))
        shape = Heads(heads.query, heads.kv, heads.dim, jnp.dtype(dtype).itemsize, is_quantised(stored))
        names = available(dtype, stored, shape, checked.page_size)
        for name in [REFERENCE] if as_tpus and jax.default_backend() == "cpu" else names:
            prepared = prepare(batch, cut_for(shape, name))
            run = jax.jit(partial(paged_attention, scoring=scoring, implementation=name))
            queries = with_padded_heads(q.astype(dtype), heads.kv, own)
            out = np.asarray(run(queries, own, prepared)[:, : heads.query].astype(jnp.float32))
            error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
            yield {
                "check": f"{name} attention",
                "heads": f"{heads.query}/{heads.kv} × {heads.dim}",
                "window": checked.window,
                "soft_cap": checked.soft_cap,
                "with_sinks": checked.with_sinks,
                "page_size": checked.page_size,
                "dtype": dtype,
                "pages": kind,
                "error": error if np.isfinite(error) else repr(error),
                "limit": LIMITS[dtype],
                "ok": error <= LIMITS[dtype],
            }


@partial(jax.jit, static_argnums=1)
def _quantised_pages(pages: jax.Array, stored: jnp.dtype) -> KVPages:
    """The same pages as a step writes quantised ones; a row that is not a number has a scale that is none."""
    num_pages, page_size, _, num_kv_heads, head_dim = pages.shape
    empty = jnp.zeros(kv_shape(num_pages, page_size, num_kv_heads, head_dim, stored), stored)
    tokens = pages.reshape(-1, *pages.shape[2:])
    return write_kv(empty, tokens[:, 0], tokens[:, 1], jnp.arange(len(tokens)))


def _inputs(heads: HeadSizes, page_size: int) -> tuple[jax.Array, jax.Array, Batch]:
    """Queries; pages, of which only what the rows see is a number; the rows' batch, with padding. All in float32."""
    rng = np.random.default_rng(0)
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
    q = random_queries(heads, batch.tokens.shape[0], "bfloat16")
    return q.astype(jnp.float32), jnp.asarray(pages).astype(jnp.bfloat16).astype(jnp.float32), batch


class TokenCheck(NamedTuple):
    """A model, and requests that every engine of the check serves."""

    name: str
    config: ModelConfig
    params: Params
    requests: Sequence[tuple[float, Request]]
    write: Writer

    def serve(self, policies: Sequence[str], **options: Any) -> dict[str, Replayed]:
        """What each policy serves on an engine with these options, in a pool that is too small for all contexts."""
        flags: dict[str, Any] = {"page_size": 8, "kv_tokens": 256, "max_num_seqs": 8, "max_num_batched_tokens": 8}
        flags |= {"dtype": "float32", "profile": "paper-gptj-6b-a100", "check_pages": True}
        with closing(set_up(Model(self.config), params=self.params, **(flags | options))) as setup:
            return {policy: replay(setup, policy, self.requests, self.write, 30.0) for policy in policies}

    def row(self, policy: str, by: str, run: Replayed, expected: Replayed, devices: int = 1) -> Row:
        """A run against what it should have served."""
        wrong = different(run.streams, expected.streams)
        return {
            "check": "tokens",
            "model": self.name,
            "policy": policy,
            "by": by,
            "devices": devices,
            "requests": len(run.streams),
            "different": wrong,
            "tokens": sum(map(len, run.streams.values())),
            "copied_in_tokens": run.report["copied_in_tokens"],
            "ok": not wrong and len(run.streams) == len(self.requests),
        }


def _token_check(name: str, config: ModelConfig) -> TokenCheck:
    write = random_tokens(config.vocab_size, 0)
    script = Script("chat", 20, (Segment(6, 0.05, 7), Segment(5, 0.03, 9), Segment(6, None, 0)))
    arrivals = [Arrival(0.005 * number, script._replace(prompt=16 + number % 7)) for number in range(NUM_REQUESTS)]
    requests = [(at_s, make_request(number, each, write)) for number, (at_s, each) in enumerate(arrivals)]
    with jax.default_device(_cpu()):
        params = random_params(config, "float32", 0)
    return TokenCheck(name, config, params, requests, write)


def _check_tokens(
    name: str, config: ModelConfig, policies: Sequence[str], num_devices: int = 1, on_cpu: bool = False
) -> Iterator[Row]:
    """Tokens of contexts that move against kept ones, which the reference serves.

    Args:
        on_cpu: the reference itself is compared with a CPU.
    """
    check = _token_check(name, config)
    expected = check.serve([KEEPING], attention=REFERENCE, kv_tokens=ROOM)[KEEPING]
    for policy, run in check.serve(policies, tensor_parallel_size=num_devices).items():
        yield check.row(policy, "auto", run, expected, num_devices)
    if on_cpu:
        with jax.default_device(_cpu()):
            there = check.serve([KEEPING], attention=REFERENCE, kv_tokens=ROOM)[KEEPING]
        yield check.row(KEEPING, "cpu", there, expected)


def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]
