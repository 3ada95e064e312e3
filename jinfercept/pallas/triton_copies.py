"""The Triton kernels that copy pages between a device's layers and page-locked host memory, over the link, in place."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

from jinfercept.layouts.pages import OUT_OF_RANGE
from jinfercept.pallas.operands import EVERYWHERE

WORDS, SEGMENTS, NUM_WARPS = 2048, 8, 8
"""Words that a program copies at once, programs of a page, warps of a program. A link of 50 GB/s and 2 µs has 100 KB under way:
a dozen programs."""


def copy_pages(
    places: Int32[Array, "2 k"],
    read: Sequence[Array],
    written: Sequence[Array],
    *,
    to_host: bool,
    interpret: bool = False,
) -> Sequence[Array]:
    """The written arrays, in place, with pages of the arrays that are read.

    Args:
        places: as for `page_copies.pages_to_host`.
        read, written: words of the layers' pages, and the host pool; or the other way round if not `to_host`.
        interpret: run without a GPU, slowly.
    """
    kernel = _out_kernel if to_host else _in_kernel
    first = 1 + len(read)
    return pl.pallas_call(
        partial(kernel, num_read=len(read)),
        grid=(places.shape[1], SEGMENTS),
        in_specs=[EVERYWHERE] * (first + len(written)),
        out_specs=[EVERYWHERE] * len(written),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in written],
        input_output_aliases={first + place: place for place in range(len(written))},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(places, *read, *written)


def _out_kernel(places_ref, *refs, num_read: int):
    layers, host = refs[:num_read], refs[-1]

    def copy(slot, row, words, mask):
        for place, layer in enumerate(layers):
            plgpu.store(host.at[row, place, words], plgpu.load(layer.at[slot, words], mask=mask, other=0), mask=mask)

    _for_words(places_ref, host.shape[2], copy)


def _in_kernel(places_ref, host, *refs, num_read: int):
    layers = refs[len(refs) // 2 :]  # the results, in the memory of the operands

    def copy(slot, row, words, mask):
        for place, layer in enumerate(layers):
            plgpu.store(layer.at[slot, words], plgpu.load(host.at[row, place, words], mask=mask, other=0), mask=mask)

    _for_words(places_ref, host.shape[2], copy)


def _for_words(places_ref, num_words: int, copy: Any) -> None:
    """Copy a program's words of its page, one page after another for each `places` column; padding ends at once."""
    column, segment = pl.program_id(0), pl.program_id(1)
    slot, row = places_ref[0, column], places_ref[1, column]

    @pl.when(slot < OUT_OF_RANGE)
    def _():
        @pl.loop(0, pl.cdiv(num_words, SEGMENTS * WORDS))
        def _(index):
            words = (index * SEGMENTS + segment) * WORDS + jnp.arange(WORDS)
            copy(slot, row, words, words < num_words)
