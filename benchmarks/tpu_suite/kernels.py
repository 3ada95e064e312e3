"""What kernels reach by themselves on a TPU, against the ceilings of this device: paged attention, and products with the
weights of experts. No TPU has run them.

Attention by jax's kernel with our blocks and with those of jax's own table (rows: `kernel_timing`). A block is named by
its pages' tokens and its query tokens (`tpu 1024 x 64`). On a CPU, for which jax's kernel has no interpreter, the reference
stands for it. Products by jax's grouped kernel (`gmm`) with our tiles and with others, beside XLA's `ragged_dot` (rows:
`kernel_timing`). On a CPU Pallas interprets the kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
from jaxtyping import Array

from benchmarks.suite.kernel_timing import Candidate, Measure, attention_rows, expert_rows, time_paged
from benchmarks.suite.sizes import AttentionCase, ExpertsCase, Row, Sizes
from jinfercept.models.attention import paged_attention
from jinfercept.pallas.layouts.interleaved import with_padded_heads
from jinfercept.pallas.layouts.pages import Batch, KVPages
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.pallas.tpu_kernels import MOST_TILE, Blocks, operands_of, options_of, product

OTHER_BLOCKS = ((128, 32), (1024, 32), (512, 64), (256, 128))
"""Tokens of context and query tokens of a block, beside ours."""
OTHER_VMEM_BYTES = 64 << 20
"""Of a TPU's own memory that other blocks may take: more than every kernel has unless it says so."""
TABLE = "tpu, jax's table"


def attention(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases that fit."""
    return attention_rows(sizes, sizes.attention, partial(_attends, sizes))


def _attends(sizes: Sizes, pages: KVPages, case: AttentionCase) -> dict[str, Measure]:
    scoring = Scoring(case.window)
    if jax.default_backend() != "tpu":
        attend = partial(paged_attention, scoring=scoring, implementation="reference")
        return {"reference": partial(time_paged, _padded(case, attend), None, pages)}
    attends: dict[str, Callable[..., Array]] = {
        "tpu": partial(paged_attention, scoring=scoring, implementation="tpu"),
        TABLE: partial(_attend, scoring, None),
    }
    for tokens, queries in OTHER_BLOCKS:
        if queries <= case.rows * case.chunk:
            blocks = Blocks(max(1, tokens // sizes.page_size), queries)
            attends[f"tpu {tokens} x {queries}"] = partial(_attend, scoring, blocks)
    return {name: partial(time_paged, _padded(case, attend), None, pages) for name, attend in attends.items()}


def _padded(case: AttentionCase, attend: Callable[..., Array]) -> Callable[..., Array]:
    """Attention whose queries have the heads of the pages."""
    return lambda q, pages, batch: attend(with_padded_heads(q, case.heads.kv, pages), pages, batch)


def _attend(scoring: Scoring, blocks: Blocks | None, q: Array, pages: KVPages, batch: Batch) -> Array:
    """jax's kernel with these blocks; None: with those of its own table of measured shapes."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention(
        *operands_of(q, pages, batch),
        **options_of(q, pages, scoring),
        num_kv_pages_per_block=None if blocks is None else blocks.pages,
        num_queries_per_block=None if blocks is None else blocks.queries,
        vmem_limit_bytes=OTHER_VMEM_BYTES,
    )


OTHER_TILES = ((128, 1024, 512), (128, 2048, 1024), (64, 2048, 512))
"""Most rows, inputs and outputs of a tile, beside ours."""


def experts(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases of products with the weights of experts."""
    return expert_rows(sizes, _products)


def _products(_: ExpertsCase, stack: jax.Array) -> dict[str, Candidate]:
    interpret = jax.default_backend() != "tpu"
    others = {} if interpret else {f"gmm {' x '.join(map(str, tile))}": tile for tile in OTHER_TILES}
    return {
        name: Candidate(stack, jax.jit(partial(product, most=tile, interpret=interpret)))
        for name, tile in {"gmm": MOST_TILE, **others}.items()
    }
