"""Times paged attention by itself, by any implementation: every call of a turn reads other pages, together more than the caches
hold, and all inputs lie on the device.

Rows: the case (`model`, `heads`, `rows`, `chunk`, `context`), `implementation`, `seconds` and its extremes, `bytes_per_s` (keys
and values, read once) and `copy_share` of the copy bandwidth, `flops_per_s`, `matmul_share`; or `error` in place of all that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import jax
from jaxtyping import Array

from benchmarks.suite.attention_cases import random_pages, random_queries, scattered_batches
from benchmarks.suite.ceilings import copy_rate, matmul_rate
from benchmarks.suite.sizes import MIB, AttentionCase, Row, Sizes
from benchmarks.suite.timing import RunTiming, timed
from jinfercept.layouts.pages import KVPages
from jinfercept.pallas.attention import prepare
from jinfercept.pallas.work_schedule import WorkCut

BEYOND_CACHE_BYTES = 512 * MIB
MOST_INPUTS = 128
ERROR_CHARACTERS = 300

type Measure = Callable[[Sizes, AttentionCase], RunTiming]
type Candidates = Callable[[KVPages, AttentionCase], Mapping[str, Measure]]
"""How each implementation is timed on a case, in the order in which they are."""


def attention_rows(sizes: Sizes, cases: Sequence[AttentionCase], candidates: Candidates) -> Iterator[Row]:
    """Measure all cases that fit, the pages of one kind of heads at a time."""
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    pages, drawn = None, None
    for case in cases:
        if case.kv_bytes > sizes.attention_pool_bytes:
            continue
        if drawn != case.heads:
            pages = None  # the last ones go before the next ones come
            pages, drawn = random_pages(case.heads, _num_pages(sizes, case), sizes), case.heads
        assert pages is not None
        for name, measure in candidates(pages, case).items():
            row = case.describe() | {"implementation": name}
            try:
                timing = measure(sizes, case)
            except Exception as error:  # a peer may refuse a shape, and a kernel may fail on one
                yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
            else:
                yield row | _reached(case, timing, sizes.calls, copy, matmul)


def time_paged(
    attend: Callable[..., Array], cut: WorkCut | None, pages: KVPages, sizes: Sizes, case: AttentionCase
) -> RunTiming:
    """Time an implementation over these pages.

    Args:
        attend: takes queries, pages and a batch.
        cut: how it cuts batches.
    """
    longest = max(other.context for other in sizes.attention if other.heads == case.heads)
    width = -(-longest // sizes.page_size)
    batches = scattered_batches(case, pages.shape[0], sizes.page_size, num_inputs(case), width)
    q = random_queries(case.heads, case.rows * case.chunk, sizes.dtype)
    prepared = jax.device_put(
        [prepare(batch, cut, decode_only=case.chunk == 1) for batch in batches]
    )  # made by the host
    return time_calls(sizes, attend, q, [(pages, batch) for batch in prepared])


def _reached(case: AttentionCase, timing: RunTiming, calls: int, copy: float, matmul: float) -> Row:
    seconds = timing.seconds / calls
    return {
        "seconds": seconds,
        "fastest_s": timing.fastest_s / calls,
        "slowest_s": timing.slowest_s / calls,
        "bytes_per_s": case.kv_bytes / seconds,
        "copy_share": case.kv_bytes / seconds / copy,
        "flops_per_s": case.flops / seconds,
        "matmul_share": case.flops / seconds / matmul,
    }


def _num_pages(sizes: Sizes, case: AttentionCase) -> int:
    return 1 + sizes.attention_pool_bytes // (case.heads.token_bytes * sizes.page_size)


def num_inputs(case: AttentionCase) -> int:
    """Of one case, so that together they are more than a cache holds."""
    return max(1, min(MOST_INPUTS, BEYOND_CACHE_BYTES // case.kv_bytes))


def time_calls(sizes: Sizes, attend: Callable[..., Array], q: Array, inputs: Sequence[tuple[Any, ...]]) -> RunTiming:
    """Time some calls of `attend(q, *input)`, one after the other in one executable, with all inputs in turn."""

    @jax.jit
    def calls(q: Array, some: list[tuple[Any, ...]]) -> list[Array]:
        outs: list[Array] = []
        for mine in some:
            after, _ = jax.lax.optimization_barrier((q, outs[-1:]))
            outs.append(attend(after, *mine))
        return outs

    turns = cycle(inputs)
    return timed(lambda: calls(q, list(islice(turns, sizes.calls))), sizes.enough_s)
