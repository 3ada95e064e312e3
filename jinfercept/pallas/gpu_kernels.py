"""Which compiler each kernel for NVIDIA GPUs comes from: Pallas' Triton or its Mosaic backend. No other file knows.

JAX announces that it will remove the Triton backend; `docs/gpu_kernels.md` says what replaces each kernel, on which GPU. A
kernel that moves changes its function here. Kernels are imported on demand, since their compilers take up to half a second.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages
from jinfercept.pallas.layouts.scoring import PLAIN, Rotation, Scoring
from jinfercept.pallas.tiles import (
    AMPERE,
    HOPPER,
    WARPGROUP_ROWS,
    Heads,
    Tiles,
    compute_capability,
    is_lowered_for_gpu,
    is_supported,
    tiles_for,
    work_cut,
)
from jinfercept.pallas.work_schedule import WorkCut


def paged_attention_triton(q: HeadRows, pages: KVPages, batch: Batch, **options: Any) -> HeadRows:
    from jinfercept.pallas import triton_attention

    return triton_attention.paged_attention_triton(q, pages, batch, **options)


def paged_attention_mosaic(
    q: HeadRows,
    pages: KVPages,
    batch: Batch,
    *,
    scoring: Scoring = PLAIN,
    decode_only: bool = False,
    interpret: bool = False,
) -> HeadRows:
    """Attention on Hopper: chunks of plain layers by Mosaic's kernel, all else by Triton's.

    Same arguments and result as `triton_attention.paged_attention_triton`, but for `tiles`; pages are not quantised. In
    interpret mode chunks need `tests/support/wgmma_interpreter.py`. Raises `ValueError` if the type, the head dim, the page
    size or the GPU has no kernel.
    """
    from jinfercept.pallas import mosaic_attention, triton_attention, triton_decode

    mosaic_attention.check(q, pages)
    if not interpret and compute_capability() != HOPPER:
        got = f"compute capability {compute_capability()}"
        raise ValueError(f"the Mosaic kernel is for Hopper, {HOPPER}; got {got}; fix: use the Triton kernels")
    heads = Heads.of(q, pages)
    tiles = _mosaic_tiles(heads, interpret)
    if not scoring.is_plain:
        return triton_attention.paged_attention_triton(
            q, pages, batch, scoring=scoring, decode_only=decode_only, tiles=tiles, interpret=interpret
        )
    out = None if decode_only else mosaic_attention.attend_chunks(q, pages, batch, interpret=interpret)
    return triton_decode.attend_decode_rows(q, pages, batch.work, out, tiles, interpret)


def mosaic_cut(heads: Heads, *, interpret: bool = False) -> WorkCut:
    """How the kernels of `paged_attention_mosaic` cut a batch."""
    from jinfercept.pallas.mosaic_attention import COMPUTING, warpgroup_queries

    return work_cut(heads, _mosaic_tiles(heads, interpret))._replace(
        chunk_queries=COMPUTING * warpgroup_queries(heads.group)
    )


ATTENTION: dict[str, Callable[..., Array]] = {"triton": paged_attention_triton, "mosaic": paged_attention_mosaic}
CUTS: dict[str, Callable[[Heads], WorkCut]] = {"triton": work_cut, "mosaic": mosaic_cut}
"""How the implementations cut a batch; all have decode variants too."""


def joined_attention(
    qkv: Float[Array, "T K G2 D"], rotation: Rotation, pages: KVPages, batch: Batch, counts: Int[Array, "SK"] | None
) -> tuple[HeadRows, KVPages, Int[Array, "SK"]]:
    from jinfercept.pallas import triton_decode

    return triton_decode.joined_attention_triton(qkv, rotation, pages, batch, counts)


def quantized_product(num_rows: int, dtype: DTypeLike, values: DTypeLike) -> Callable[..., Float[Array, "T N"]] | None:
    """`triton_quantized.product` if code is lowered for a GPU that has it, else None. `values` is the stored type."""
    if not is_lowered_for_gpu() or jnp.dtype(dtype).itemsize != 2:
        return None
    from jinfercept.pallas import triton_quantized

    least, most = triton_quantized.least_capability(values), triton_quantized.most_rows(values)
    if compute_capability() < least or num_rows > most:
        return None
    return triton_quantized.product


def grouped_product(
    num_rows: int, sizes: Int[Array, "X"], dtype: DTypeLike, values: Collection[DTypeLike]
) -> Callable[..., Float[Array, "N C"]] | None:
    """`triton_grouped.product` if code is lowered for a GPU that has it, else None. `sizes` are the rows of each expert,
    `values` the types of the stacks' stored numbers."""
    if not is_lowered_for_gpu() or jnp.dtype(dtype).itemsize != 2:
        return None
    from jinfercept.pallas import triton_grouped, triton_quantized

    if compute_capability() < max(map(triton_quantized.least_capability, values)):
        return None
    quantised = any(jnp.dtype(kind) != jnp.dtype(dtype) for kind in values)
    tile = triton_grouped.tile_rows(num_rows, len(sizes), quantised=quantised)
    tiles = triton_grouped.row_tiles(sizes, num_rows, tile)
    return lambda rows, stack: triton_grouped.product(rows, tiles, stack)


def available_attention(q: DTypeLike, pages: DTypeLike, heads: Heads, page_size: int) -> list[str]:
    """The implementations for these shapes on the GPU that code is lowered for.

    The first is the best for a model with a plain layer (`Scoring`), the last for one without: Triton's kernel for chunks has
    better tiles where it does not share a step's schedules with Mosaic's.
    """
    if not is_supported(q, pages, heads.head_dim) or compute_capability() < AMPERE:
        return []
    # no GPU before Hopper or after it has wgmma
    if compute_capability() == HOPPER:
        from jinfercept.pallas import mosaic_attention

        if mosaic_attention.is_supported(q, pages, heads, page_size):
            return ["mosaic", "triton"]
    return ["triton"]


def _mosaic_tiles(heads: Heads, interpret: bool) -> Tiles:
    from jinfercept.pallas.mosaic_attention import ROWS

    tiles = tiles_for(heads, HOPPER if interpret else compute_capability())
    # chunks of as many rows as Mosaic's, since layers of both share a step's schedules
    return tiles._replace(chunk=tiles.chunk._replace(rows=ROWS, num_warps=ROWS // WARPGROUP_ROWS * 4))
