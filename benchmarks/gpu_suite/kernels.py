"""What paged attention reaches by itself on a GPU: ours and, as a peer, cuDNN's, against the ceilings of this device; the rows
are those of `attention_timing`.

Chunks are timed with other tiles of the Triton kernel too (`triton 128 x 64`: rows and context tokens per turn), without a GPU
as Pallas interprets them. The private cuDNN function is a peer, never a dependency: where it is gone or refuses a shape, its
row says so.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.suite.attention_cases import random_queries
from benchmarks.suite.attention_timing import Measure, attention_rows, num_inputs, time_calls, time_paged
from benchmarks.suite.sizes import AttentionCase, Row, Sizes
from benchmarks.suite.timing import RunTiming
from jinfercept.layouts.pages import KVPages
from jinfercept.layouts.scoring import Scoring
from jinfercept.pallas.attention import available, cut_for, paged_attention
from jinfercept.pallas.gpu_heads import AMPERE, Heads, compute_capability, tiles_for, work_cut
from jinfercept.pallas.tiles import Tile, Tiles
from jinfercept.pallas.triton_attention import paged_attention_triton
from jinfercept.pallas.work_schedule import WorkCut

OTHER_CHUNK_TILES = (Tile(128, 64, num_warps=8, num_stages=3), Tile(64, 32, num_warps=4, num_stages=3))


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases that fit."""
    return _rows(sizes, sizes.attention, OTHER_CHUNK_TILES[: 1 if _interpreted() else None])  # interpreting takes long


def chunk_rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the chunks among them by every implementation, each with its own tiles."""
    return _rows(sizes, [case for case in sizes.attention if case.chunk > 1], ())


def _rows(sizes: Sizes, cases: Sequence[AttentionCase], other_tiles: Sequence[Tile]) -> Iterator[Row]:
    def candidates(pages: KVPages, case: AttentionCase) -> dict[str, Measure]:
        measures: dict[str, Measure] = {
            name: partial(time_paged, _attend_by(name, case), _cut_by(name, case, sizes), pages)
            for name in available(sizes.dtype, sizes.dtype, _heads(case, sizes), sizes.page_size)
            if name != "mosaic" or case.chunk > 1  # which decodes by the Triton kernels
        }
        if case.chunk > 1:
            for tile in other_tiles:
                tiles = _tiles_with(tile, case, sizes)
                scoring = Scoring(case.window)
                attend = partial(paged_attention_triton, scoring=scoring, tiles=tiles, interpret=_interpreted())
                cut = work_cut(_heads(case, sizes), tiles)
                measures[f"triton {tile.rows} x {tile.tokens}"] = partial(time_paged, attend, cut, pages)
        if case.window is None:
            measures["cudnn"] = _time_cudnn
        if "mosaic" in measures:  # the last: it may hang
            measures["mosaic"] = measures.pop("mosaic")
        return measures

    return attention_rows(sizes, cases, candidates)


def _attend_by(name: str, case: AttentionCase) -> Callable[..., Array]:
    scoring = Scoring(case.window)
    return partial(paged_attention, scoring=scoring, implementation=name, decode_only=case.chunk == 1)


def _cut_by(name: str, case: AttentionCase, sizes: Sizes) -> WorkCut | None:
    return cut_for(_heads(case, sizes), name)


def _tiles_with(chunk: Tile, case: AttentionCase, sizes: Sizes) -> Tiles:
    """The tiles of the Triton kernels with another one for chunks."""
    capability = AMPERE if _interpreted() else compute_capability()
    return tiles_for(_heads(case, sizes), capability)._replace(chunk=chunk)


def _interpreted() -> bool:
    return jax.default_backend() != "gpu"


def _heads(case: AttentionCase, sizes: Sizes) -> Heads:
    return Heads(case.heads.query, case.heads.kv, case.heads.dim, jnp.dtype(sizes.dtype).itemsize)


def _time_cudnn(sizes: Sizes, case: AttentionCase) -> RunTiming:
    """cuDNN's paged attention, over keys and values of its own, which lie apart there.

    A chunk behind other tokens goes without the causal mask, which means another thing there: a little more work.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention  # private: only a benchmark may

    heads, each = case.heads, -(-case.context // sizes.page_size)
    shape = (case.rows * each, sizes.page_size, heads.kv, heads.dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, sizes.dtype))
    keys = iter(jax.random.split(jax.random.key(2), 3 * num_inputs(case)))
    inputs = [
        (draw(next(keys)), draw(next(keys)), jax.random.permutation(next(keys), shape[0]).astype(jnp.int32))
        for _ in range(num_inputs(case))
    ]
    queries, seen = (jnp.full(case.rows, length, jnp.int32) for length in (case.chunk, case.context))
    mask = MaskType.PADDING_CAUSAL if case.chunk == case.context else MaskType.PADDING

    def attend(q: Array, key: Array, value: Array, order: Array) -> Array:
        table = order.reshape(case.rows, 1, each, 1)
        return paged_attention(q, key, value, queries, seen, table, table, scale=heads.dim**-0.5, mask_type=mask)

    q = random_queries(heads, case.rows * case.chunk, sizes.dtype)
    return time_calls(sizes, attend, q.reshape(case.rows, case.chunk, heads.query, heads.dim), inputs)
