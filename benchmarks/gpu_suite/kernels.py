"""What paged attention reaches by itself: ours and, as a peer, cuDNN's, against the ceilings of this device.

Every call of a turn reads other pages, together more than the caches hold; all inputs lie on the device. Rows: the case
(`model`, `heads`, `rows`, `chunk`, `context`), `implementation`, `seconds` and its extremes, `bytes_per_s` (keys and values,
read once) and `copy_share` of the copy bandwidth, `flops_per_s` and `matmul_share`; or `error` in place of all that.

Chunks are timed with other tiles of the Triton kernel too (`triton 128 x 64`: rows and context tokens per turn), without a GPU
as Pallas interprets them. The private cuDNN function is a peer, never a dependency: where it is gone or refuses a shape, its
row says so.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.gpu_suite.attention_cases import random_pages, random_queries, scattered_batches
from benchmarks.gpu_suite.ceilings import copy_rate, matmul_rate
from benchmarks.gpu_suite.sizes import MIB, AttentionCase, Row, Sizes
from benchmarks.gpu_suite.timing import RunTiming, timed
from jinfercept.layouts.pages import KVPages
from jinfercept.layouts.scoring import Scoring
from jinfercept.pallas.attention import available, cut_for, paged_attention, prepare
from jinfercept.pallas.gpu_heads import AMPERE, Heads, compute_capability, tiles_for, work_cut
from jinfercept.pallas.tiles import Tile, Tiles
from jinfercept.pallas.triton_attention import paged_attention_triton
from jinfercept.pallas.work_schedule import WorkCut

BEYOND_CACHE_BYTES = 512 * MIB
MOST_INPUTS = 128
ERROR_CHARACTERS = 300
OTHER_CHUNK_TILES = (Tile(128, 64, num_warps=8, num_stages=3), Tile(64, 32, num_warps=4, num_stages=3))


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases that fit, the pages of one kind of heads at a time."""
    return _rows(sizes, sizes.attention, OTHER_CHUNK_TILES[: 1 if _interpreted() else None])  # interpreting takes long


def chunk_rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the chunks among them by every implementation, each with its own tiles."""
    return _rows(sizes, [case for case in sizes.attention if case.chunk > 1], ())


def _rows(sizes: Sizes, cases: Sequence[AttentionCase], other_tiles: Sequence[Tile]) -> Iterator[Row]:
    copy, matmul = copy_rate(sizes), matmul_rate(sizes)
    pages, drawn = None, None
    for case in cases:
        if case.kv_bytes > sizes.attention_pool_bytes:
            continue
        if drawn != case.heads:
            pages = None  # the last ones go before the next ones come
            pages, drawn = random_pages(case.heads, _num_pages(sizes, case), sizes.page_size, sizes.dtype), case.heads
        assert pages is not None
        candidates: dict[str, Callable[[Sizes, AttentionCase], RunTiming]] = {
            name: partial(_time_ours, _attend_by(name, case), _cut_by(name, case, sizes), pages)
            for name in available(sizes.dtype, sizes.dtype, case.heads.dim, sizes.page_size)
            if name != "mosaic" or case.chunk > 1  # which decodes by the Triton kernels
        }
        if case.chunk > 1:
            for tile in other_tiles:
                tiles = _tiles_with(tile, case, sizes)
                scoring = Scoring(case.window)
                attend = partial(paged_attention_triton, scoring=scoring, tiles=tiles, interpret=_interpreted())
                cut = work_cut(_heads(case, sizes), tiles)
                candidates[f"triton {tile.rows} x {tile.tokens}"] = partial(_time_ours, attend, cut, pages)
        if case.window is None:
            candidates["cudnn"] = _time_cudnn
        if "mosaic" in candidates:  # the last: it may hang
            candidates["mosaic"] = candidates.pop("mosaic")
        for name, measure in candidates.items():
            row = case.describe() | {"implementation": name}
            try:
                timing = measure(sizes, case)
            except Exception as error:  # a peer may refuse a shape, and a kernel may fail on one
                yield row | {"error": repr(error)[:ERROR_CHARACTERS]}
            else:
                yield row | _reached(case, timing, sizes.calls, copy, matmul)


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


def _num_inputs(case: AttentionCase) -> int:
    """Of one case, so that together they are more than a cache holds."""
    return max(1, min(MOST_INPUTS, BEYOND_CACHE_BYTES // case.kv_bytes))


def _time_calls(sizes: Sizes, attend: Callable[..., Array], q: Array, inputs: Sequence[tuple[Any, ...]]) -> RunTiming:
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


def _attend_by(name: str, case: AttentionCase) -> Callable[..., Array]:
    scoring = Scoring(case.window)
    return partial(paged_attention, scoring=scoring, implementation=name, decode_only=case.chunk == 1)


def _cut_by(name: str, case: AttentionCase, sizes: Sizes) -> WorkCut | None:
    return cut_for(_heads(case, sizes), sizes.dtype, sizes.dtype, implementation=name)


def _tiles_with(chunk: Tile, case: AttentionCase, sizes: Sizes) -> Tiles:
    """The tiles of the Triton kernels with another one for chunks."""
    capability = AMPERE if _interpreted() else compute_capability()
    return tiles_for(_heads(case, sizes), capability)._replace(chunk=chunk)


def _interpreted() -> bool:
    return jax.default_backend() != "gpu"


def _heads(case: AttentionCase, sizes: Sizes) -> Heads:
    return Heads(case.heads.query, case.heads.kv, case.heads.dim, jnp.dtype(sizes.dtype).itemsize)


def _time_ours(
    attend: Callable[..., Array], cut: WorkCut | None, pages: KVPages, sizes: Sizes, case: AttentionCase
) -> RunTiming:
    longest = max(other.context for other in sizes.attention if other.heads == case.heads)
    width = -(-longest // sizes.page_size)
    batches = scattered_batches(case, pages.shape[0], sizes.page_size, _num_inputs(case), width)
    q = random_queries(case.heads, case.rows * case.chunk, sizes.dtype)
    prepared = jax.device_put(
        [prepare(batch, cut, decode_only=case.chunk == 1) for batch in batches]
    )  # made by the host
    return _time_calls(sizes, attend, q, [(pages, batch) for batch in prepared])


def _time_cudnn(sizes: Sizes, case: AttentionCase) -> RunTiming:
    """cuDNN's paged attention, over keys and values of its own, which lie apart there.

    A chunk behind other tokens goes without the causal mask, which means another thing there: a little more work.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention  # private: only a benchmark may

    heads, each = case.heads, -(-case.context // sizes.page_size)
    shape = (case.rows * each, sizes.page_size, heads.kv, heads.dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, sizes.dtype))
    keys = iter(jax.random.split(jax.random.key(2), 3 * _num_inputs(case)))
    inputs = [
        (draw(next(keys)), draw(next(keys)), jax.random.permutation(next(keys), shape[0]).astype(jnp.int32))
        for _ in range(_num_inputs(case))
    ]
    queries, seen = (jnp.full(case.rows, length, jnp.int32) for length in (case.chunk, case.context))
    mask = MaskType.PADDING_CAUSAL if case.chunk == case.context else MaskType.PADDING

    def attend(q: Array, key: Array, value: Array, order: Array) -> Array:
        table = order.reshape(case.rows, 1, each, 1)
        return paged_attention(q, key, value, queries, seen, table, table, scale=heads.dim**-0.5, mask_type=mask)

    q = random_queries(heads, case.rows * case.chunk, sizes.dtype)
    return _time_calls(sizes, attend, q.reshape(case.rows, case.chunk, heads.query, heads.dim), inputs)
