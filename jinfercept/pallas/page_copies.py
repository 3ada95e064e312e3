"""Copies pages between a device's layers and one array in page-locked host memory, in place.

On a GPU each direction is one kernel that writes or reads the host's memory where it lies, over the link. On a CPU, and as the
reference, it is gathers and scatters.

XLA compiles a kernel whose results are all on the host, or all on the device: with both it takes all for the host's. So the two
directions are two kernels. Both run on the stream of the steps' executables: no compute hides them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from jinfercept.layouts.pages import KVPages, from_words, to_words
from jinfercept.pallas.gpu_kernels import copy_kernel

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
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
        return jax.device_put(copy_kernel()(places, words, (host,), to_host=True, **how)[0], HOST)
    pages = jnp.stack([to_words(layer.at[slots].get(mode="clip")) for layer in layers], axis=1)
    host, rows, pages = (jax.device_put(array, HOST) for array in (host, rows, pages))
    return host.at[rows].set(pages, mode="drop", unique_indices=True)


def pages_from_host(
    layers: tuple[KVPages, ...], host: HostPool, places: Places, *, kernel: bool, **how: Any
) -> tuple[KVPages, ...]:
    """The layers with these pages. In place if they are donated. Arguments as those of `pages_to_host`."""
    slots, rows = places
    if kernel:
        words = copy_kernel()(places, (host,), tuple(map(to_words, layers)), to_host=False, **how)
        return tuple(from_words(pages, layer, layer.shape) for pages, layer in zip(words, layers, strict=True))
    host, rows = (jax.device_put(array, HOST) for array in (host, rows))
    pages = jax.device_put(host.at[rows].get(mode="clip"), DEVICE)
    return tuple(
        layer.at[slots].set(
            from_words(pages[:, place], layer, (-1, *layer.shape[1:])), mode="drop", unique_indices=True
        )
        for place, layer in enumerate(layers)
    )
