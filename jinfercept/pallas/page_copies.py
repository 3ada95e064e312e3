"""Copies pages between a device's layers and one array in page-locked host memory, in place.

On a GPU each direction is one kernel that writes or reads the host's memory where it lies, over the link. On a CPU, and as the
reference, it is gathers and scatters. Knows of jinfercept only `layout` and `operands`.

XLA compiles a kernel whose results are all on the host, or all on the device: with both it takes all for the host's. So the two
directions are two kernels. Both run on the stream of the steps' executables: no compute hides them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32, UInt32

from jinfercept.pallas.layout import OUT_OF_RANGE, KVPages, from_words, to_words
from jinfercept.pallas.operands import EVERYWHERE

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
WORDS, SEGMENTS, NUM_WARPS = 2048, 8, 8
"""Words that a program copies at once, programs of a page, warps of a program. A link of 50 GB/s and 2 µs has 100 KB under way:
a dozen programs."""

HostPool = UInt32[Array, "rows l words"]
"""Copies of pages in host memory, of l layers each, as words."""
Places = Int32[Array, "2 k"]
"""The device slots of pages, and their rows in the host pool. Numbers from `OUT_OF_RANGE` on are padding, all distinct."""


def pages_to_host(layers: tuple[KVPages, ...], host: HostPool, places: Places, *, kernel: bool, **how: Any) -> HostPool:
    """The host's copies with these pages. In place if they are donated.

    Args:
        kernel: use the kernel, which needs a GPU; else gathers and scatters.
        how: `interpret`: run the kernel without a GPU, slowly.
    """
    slots, rows = places
    if kernel:
        words = tuple(map(to_words, layers))
        return jax.device_put(_copy(_out_kernel, places, words, (host,), **how)[0], HOST)
    pages = jnp.stack([to_words(layer.at[slots].get(mode="clip")) for layer in layers], axis=1)
    host, rows, pages = (jax.device_put(array, HOST) for array in (host, rows, pages))
    return host.at[rows].set(pages, mode="drop", unique_indices=True)


def pages_from_host(
    layers: tuple[KVPages, ...], host: HostPool, places: Places, *, kernel: bool, **how: Any
) -> tuple[KVPages, ...]:
    """The layers with these pages. In place if they are donated. Arguments as those of `pages_to_host`."""
    slots, rows = places
    if kernel:
        words = _copy(_in_kernel, places, (host,), tuple(map(to_words, layers)), **how)
        return tuple(from_words(pages, layer, layer.shape) for pages, layer in zip(words, layers, strict=True))
    host, rows = (jax.device_put(array, HOST) for array in (host, rows))
    pages = jax.device_put(host.at[rows].get(mode="clip"), DEVICE)
    return tuple(
        layer.at[slots].set(
            from_words(pages[:, place], layer, (-1, *layer.shape[1:])), mode="drop", unique_indices=True
        )
        for place, layer in enumerate(layers)
    )


def _copy(
    kernel: Any, places: Places, read: Sequence[Array], written: Sequence[Array], interpret: bool = False
) -> Sequence[Array]:
    """Arrays that a kernel has written to in place, which reads others."""
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
