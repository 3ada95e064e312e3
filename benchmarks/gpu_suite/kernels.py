"""What paged attention reaches by itself on a GPU, by every kernel of ours, against the ceilings of this device; the rows are
those of `attention_timing`. FlashInfer's beside it: `flashinfer_peer`.
"""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp

from benchmarks.suite.attention_timing import Measure, attention_rows, time_paged
from benchmarks.suite.sizes import AttentionCase, Row, Sizes
from jinfercept.layouts.pages import KVPages
from jinfercept.layouts.scoring import Scoring
from jinfercept.pallas.attention import available, cut_for, paged_attention
from jinfercept.pallas.gpu_heads import Heads


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure all cases that fit."""
    return attention_rows(sizes, sizes.attention, partial(_candidates, sizes))


def _candidates(sizes: Sizes, pages: KVPages, case: AttentionCase) -> dict[str, Measure]:
    heads = Heads(case.heads.query, case.heads.kv, case.heads.dim, jnp.dtype(sizes.dtype).itemsize)
    scoring = Scoring(case.window)

    def measure(name: str) -> Measure:
        attend = partial(paged_attention, scoring=scoring, implementation=name, decode_only=case.chunk == 1)
        return partial(time_paged, attend, cut_for(heads, name), pages)

    return {
        name: measure(name)
        for name in available(sizes.dtype, sizes.dtype, heads, sizes.page_size)
        if name != "mosaic" or case.chunk > 1  # which decodes by the Triton kernels
    }
