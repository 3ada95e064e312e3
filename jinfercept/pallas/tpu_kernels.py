"""JAX's own kernels on TPUs: `ragged_paged_attention`, and `gmm` of megablox.

The second multiplies rows that are sorted by expert with stacks of weights.

Attention takes decode rows and chunks alike, with windows and soft caps, over pages as in `layouts/interleaved.py`. It reads
the pages before a window too. It knows no sinks, nor several KV heads on a device that are wider than 128: such layers have the
reference, with a line in the log. Tests compile both for TPUs ahead of time and interpret them on a CPU; no TPU has run them.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jinfercept.pallas.layouts.interleaved import FP8, LANES, SUBLANES
from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages, PagesLike
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.reference import paged_attention_reference

log = logging.getLogger(__name__)
DTYPES = ("bfloat16", "float32")
VMEM_BYTES = 12 << 20
"""Of a TPU's own memory that a kernel's blocks may take: generations let a kernel have 16 MiB unless it says otherwise."""
SMEM_BYTES = 960 << 10
"""Of a TPU's scalar memory, 1 MiB, that the page tables of a step may take."""
QUERIES, CONTEXT_TOKENS = 32, 512
"""Most query tokens and tokens of context of a block."""
FEWEST_QUERIES = 8
"""Of a block whose pages are made fewer instead."""


class Operands(NamedTuple):
    """Operands of jax's kernel and of its reference."""

    q: Float[Array, "T H D2"]
    pages: KVPages
    context_lens: Int32[Array, "S"]
    page_tables: Int32[Array, "S P"]
    query_starts: Int32[Array, "S1"]
    num_rows: Int32[Array, "1"]


class Blocks(NamedTuple):
    """Pages of context and query tokens that the kernel multiplies at a time."""

    pages: int
    queries: int


def is_supported(q: DTypeLike, pages: DTypeLike) -> bool:
    """Whether the kernel takes queries and pages of these types."""
    return jnp.dtype(pages) in (FP8, jnp.dtype(q)) and jnp.dtype(q).name in DTYPES


def paged_attention_tpu(q: HeadRows, pages: KVPages, batch: Batch, scoring: Scoring = PLAIN) -> HeadRows:
    """As `paged_attention_reference`, over interleaved pages. Raises `ValueError` if the kernel does not take these types."""
    if not is_supported(q.dtype, pages.dtype):
        got, fix = f"{q.dtype.name} and {pages.dtype.name}", "use attention reference, or kv_cache_dtype auto or fp8"
        raise ValueError(
            f"a TPU's kernel has queries in {' or '.join(DTYPES)}, and pages as these or in fp8; got {got}; fix: {fix}"
        )
    if (reason := _refused(pages, scoring)) is not None:
        _note(reason)
        return paged_attention_reference(q, pages, batch, scoring)
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    blocks = blocks_for(q, pages, batch.page_tables.shape[1])
    out = ragged_paged_attention(
        *operands_of(q, pages, batch),
        **options_of(q, pages, scoring),
        num_kv_pages_per_block=blocks.pages,
        num_queries_per_block=blocks.queries,
    )
    used = jnp.arange(q.shape[0]) < batch.query_starts[-1]
    return jnp.where(used[:, None, None], out[..., : q.shape[2]], 0.0)


def _refused(pages: KVPages, scoring: Scoring) -> str | None:
    if scoring.sinks is not None:
        return "sinks"
    words = pages.shape[2] * pages.dtype.itemsize // 4  # of a token's column
    if pages.shape[3] > LANES and words > 1:
        return (
            f"{pages.shape[2] // 2} KV heads of {pages.shape[3]} on a device; one would do: raise tensor_parallel_size"
        )
    return None


@cache  # once for each reason
def _note(reason: str) -> None:
    log.warning("attention is the slow reference, since a TPU's kernel does not have %s", reason)


def tables_fit(num_rows: int, pages_per_row: int) -> bool:
    """Whether page tables of so many rows fit into a TPU's scalar memory, where they lie in whole tiles."""
    return 4 * -(-num_rows // SUBLANES) * SUBLANES * -(-pages_per_row // LANES) * LANES <= SMEM_BYTES


def operands_of(q: HeadRows, pages: KVPages, batch: Batch) -> Operands:
    """The operands of the kernel: queries as wide as the pages, and the number of rows that have tokens."""
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, pages.shape[3] - q.shape[2])))
    num_rows = jnp.sum(batch.context_lens > 0, dtype=jnp.int32)[None]
    return Operands(padded, pages, batch.context_lens, batch.page_tables, batch.query_starts, num_rows)


def options_of(q: HeadRows, pages: KVPages, scoring: Scoring) -> dict[str, Any]:
    """The kernel's options for scores. A scale, which fp8 has, makes it widen pages too."""
    scale = 1.0 if pages.dtype == FP8 else None
    own = {"sm_scale": q.shape[2] ** -0.5, "sliding_window": scoring.window, "soft_cap": scoring.soft_cap}
    return own | {"k_scale": scale, "v_scale": scale}


def blocks_for(q: Array | jax.ShapeDtypeStruct, pages: PagesLike, pages_per_row: int) -> Blocks:
    """Blocks that fit into `VMEM_BYTES`; the block of queries is halved first."""
    num_tokens, num_heads, _ = q.shape
    _, page_size, rows, width = pages.shape
    itemsize = pages.dtype.itemsize

    def num_bytes(blocks: Blocks) -> int:
        page = page_size * rows * width * itemsize
        query = num_heads * (
            width * (4 * q.dtype.itemsize + 4) + 2 * LANES * 4
        )  # read, written, summed; maxima and sums
        group, scores = 2 * num_heads // rows, 3 * 4 * page_size
        return blocks.pages * (2 * page + scores * group * blocks.queries) + blocks.queries * query

    blocks = Blocks(min(pages_per_row, max(1, CONTEXT_TOKENS // page_size)), min(num_tokens, QUERIES))
    while num_bytes(blocks) > VMEM_BYTES and blocks.queries > FEWEST_QUERIES:
        blocks = blocks._replace(queries=blocks.queries // 2)
    while num_bytes(blocks) > VMEM_BYTES and blocks.pages > 1:
        blocks = blocks._replace(pages=blocks.pages // 2)
    return blocks


MOST_TILE = (128, 2048, 512)
"""Rows, inputs and outputs that are multiplied at a time, at most: 2 MiB of weights."""
LEAST_ROWS = 16


def is_lowered_for_tpu() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) == "tpu"


def tpu_grouped_product(
    sizes: Int[Array, "X"], dtype: DTypeLike, shapes: list[tuple[int, ...]]
) -> Callable[[Float[Array, "N A"], Float[Array, "X A B"]], Float[Array, "N B"]] | None:
    """The product, if code is lowered for a TPU that has a kernel for it, else None. Rows of no expert may give anything.

    `sizes` are the rows of each expert, which come first; `shapes` are those of the stacks of matrices.
    """
    if not is_lowered_for_tpu() or jnp.dtype(dtype) != jnp.bfloat16:
        return None
    if any(size % LANES for shape in shapes for size in shape[1:]):
        return None
    return lambda rows, stack: product(rows, stack, sizes)


def product(
    rows: Float[Array, "N A"],
    stack: Float[Array, "X A B"],
    sizes: Int[Array, "X"],
    *,
    most: tuple[int, int, int] = MOST_TILE,
    interpret: bool = False,
) -> Float[Array, "N B"]:
    """Rows times the matrix of their expert. `most` are the rows, inputs and outputs of a tile, at most."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    _, num_inputs, num_outputs = stack.shape
    tile = tile_of(len(rows), num_inputs, num_outputs, most)
    padded = jnp.pad(rows, ((0, -len(rows) % tile[0]), (0, 0)))
    sizes = sizes.astype(jnp.int32)
    return gmm(padded, stack, sizes, preferred_element_type=rows.dtype, tiling=tile, interpret=interpret)[: len(rows)]


def tile_of(
    num_rows: int, num_inputs: int, num_outputs: int, most: tuple[int, int, int] = MOST_TILE
) -> tuple[int, int, int]:
    """Rows, inputs and outputs of a tile."""
    rows = max(LEAST_ROWS, 1 << (num_rows - 1).bit_length())
    return min(most[0], rows), min(most[1], num_inputs), min(most[2], num_outputs)
