"""The device half of pages: one array per layer, and the executables that gather pages for the host and scatter them back.

A host page is a few pinned arrays `[l, B, 2, K, D]`, one for each part of the layers, so that one transfer moves l layers of
it; they are freed with their last reference. With one part a page crosses the link whole, during all of the step's compute;
with more, each part crosses during the compute of its own layers. Transfers have a few static sizes, padded with slots out of
range, so that nothing recompiles.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jinfercept.kv.store import PageCopy
from jinfercept.pallas.layout import OUT_OF_RANGE, KVPages, from_words, kv_shape, to_words
from jinfercept.runner.executables import Executables

HostPage = Float[Array, "l B 2 K D"]
"""One part of a page."""

TRANSFER_PAGES = (32, 8, 1)
"""Pages per gather or scatter, largest first.

The GPU runtime of JAX lets 32 executables wait, then dispatch blocks. The memory plan moves at most 1 GiB a step, 512 pages of
2 MiB (Llama-3-8B, page 16): with whole pages these are at most 17 gathers and scatters together, which leaves 15 for the
embedding, the groups of layers, the head and the sampler.
"""


def _gather(layers: tuple[KVPages, ...], slots: Int[Array, "k"]) -> tuple[HostPage, ...]:
    return jax.lax.platform_dependent(layers, slots, cpu=_gather_pages, default=_gather_words)


def _gather_pages(layers: tuple[Array, ...], slots: Int[Array, "k"]) -> tuple[Array, ...]:
    """The pages of these slots: of each an array with the layers first. Padding reads any page."""
    pages = jnp.stack([layer.at[slots].get(mode="clip") for layer in layers], axis=1)
    return tuple(pages[i] for i in range(slots.shape[0]))


def _gather_words(layers: tuple[KVPages, ...], slots: Int[Array, "k"]) -> tuple[HostPage, ...]:
    shape = (len(layers), *layers[0].shape[1:])
    pages = _gather_pages(tuple(map(to_words, layers)), slots)
    return tuple(from_words(page, layers[0], shape) for page in pages)


def _scatter(layers: tuple[KVPages, ...], slots: Int[Array, "k"], pages: tuple[HostPage, ...]) -> tuple[KVPages, ...]:
    return jax.lax.platform_dependent(layers, slots, pages, cpu=_scatter_pages, default=_scatter_words)


def _scatter_pages(layers: tuple[Array, ...], slots: Int[Array, "k"], pages: tuple[Array, ...]) -> tuple[Array, ...]:
    """The layers with these pages in these slots, which are distinct; slots out of range are dropped."""
    if len(pages) == 1:  # a scatter of one row is a read, a selection and a write
        page = pages[0]
        return tuple(jax.lax.dynamic_update_index_in_dim(layer, page[i], slots[0], 0) for i, layer in enumerate(layers))
    stacked = jnp.stack(pages)
    return tuple(
        layer.at[slots].set(stacked[:, index], unique_indices=True, mode="drop") for index, layer in enumerate(layers)
    )


def _scatter_words(
    layers: tuple[KVPages, ...], slots: Int[Array, "k"], pages: tuple[HostPage, ...]
) -> tuple[KVPages, ...]:
    written = _scatter_pages(tuple(map(to_words, layers)), slots, tuple(map(to_words, pages)))
    return tuple(from_words(words, layer, layer.shape) for words, layer in zip(written, layers, strict=True))


def add_transfers(run: Executables, layers: tuple[KVPages, ...], page: HostPage) -> None:
    """Add the transfers' executables for a part of the layers, for arrays or for their shapes.

    Args:
        run: to which they are added.
        layers: pages of consecutive layers.
        page: the part of one page that these layers have.
    """
    for size in TRANSFER_PAGES:
        slots = _padded([], size)
        run.add(("gather", size, len(layers)), _gather, layers, slots)
        run.add(("scatter", size, len(layers)), _scatter, layers, slots, (page,) * size, donate=(0,))


@final
class KVArrays:
    """All pages of a model on one device, and their copies on the host.

    A step calls `begin`, then for each part `start`, the compute of the part's layers, and `scatter`. On a GPU a copy waits for
    what was dispatched when its memory was allocated and overlaps what is dispatched later: the first part's `start` comes
    before every executable of the step.

    Args:
        num_pages: pages of the device pool, without the scratch page.
        page_size: tokens per page.
        parts: first layer and end of every part.
        num_kv_heads, head_dim, dtype: of the model.
        home: where the pool lives; the host copies are in that device's pinned memory.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        parts: Sequence[tuple[int, int]],
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        home: jax.sharding.SingleDeviceSharding,
    ) -> None:
        shape = kv_shape(num_pages + 1, page_size, num_kv_heads, head_dim)
        self.parts = tuple(parts)
        self._on_device = home
        self._on_host = home.with_memory_kind("pinned_host")
        self._zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=self._on_device)
        sizes = {end - first for first, end in parts}
        self._blank = {n: jax.device_put(np.zeros((n, *shape[1:]), dtype), self._on_device) for n in sizes}
        self.layers: tuple[KVPages, ...] = ()
        self.host: dict[int, list[HostPage]] = {}
        self._fetches: list[tuple[int, list[HostPage]]] = []
        self._offloading: Sequence[PageCopy] = ()
        self._fetching: list[HostPage] = []
        self._in_flight: deque[list[HostPage]] = deque(maxlen=2)  # offloaded pieces of the last two steps
        self.reset()

    def add_executables(self, run: Executables) -> None:
        """Add the transfers' executables, which `start` and `scatter` call."""
        self._run = run
        for first, end in {end - first: (first, end) for first, end in self.parts}.values():
            add_transfers(run, self.layers[first:end], self._blank[end - first])

    def close(self) -> None:
        """Free everything, on the device and on the host."""
        self.layers = ()
        self.host.clear()
        self._fetches, self._offloading, self._fetching = [], (), []
        self._in_flight.clear()

    def reset(self) -> None:
        """Forget all pages; the pool is zeros again."""
        self.close()
        self.layers = tuple(self._zeros() for _ in range(self.parts[-1][1]))

    def begin(self, fetch: Sequence[PageCopy], drop: Iterable[int], offload: Sequence[PageCopy]) -> None:
        """Set the pages that a step moves. One step may fetch, drop and refill the same host slot, in this order.

        Waits for the offloads of the step before the last one, if its compute did not hide them, so that pages in flight take
        no more memory than two steps' transfers.
        """
        if len(self._in_flight) == 2 and self._in_flight[0]:
            jax.block_until_ready(self._in_flight[0])
        self._in_flight.append([])
        self._fetches = [(copy.device_slot, self.host[copy.host_slot]) for copy in fetch]
        for slot in drop:
            del self.host[slot]
        self._offloading = offload
        for copy in offload:
            self.host[copy.host_slot] = []

    def start(self, part: int) -> None:
        """Dispatch the copies of one part, both ways: pages are offloaded as they are before anything dispatched later."""
        first, end = self.parts[part]
        if self._fetches:
            self._fetching = jax.device_put([pieces[part] for _, pieces in self._fetches], self._on_device)
        for start, size in _cover(len(self._offloading)):
            group = self._offloading[start : start + size]
            gather = self._run["gather", size, end - first]
            pages = gather(self.layers[first:end], _padded([copy.device_slot for copy in group], size))
            for copy, piece in zip(group, jax.device_put(list(pages[: len(group)]), self._on_host), strict=True):
                self.host[copy.host_slot].append(piece)
                self._in_flight[-1].append(piece)

    def scatter(self, part: int) -> None:
        """Write the fetched pieces of one part to their device slots, after everything dispatched before."""
        first, end = self.parts[part]
        slots = [slot for slot, _ in self._fetches]
        for start, size in _cover(len(slots)):
            group = slots[start : start + size]
            pages = self._fetching[start : start + size] + [self._blank[end - first]] * (size - len(group))
            scatter = self._run["scatter", size, end - first]
            written = scatter(self.layers[first:end], _padded(group, size), tuple(pages))
            self.layers = (*self.layers[:first], *written, *self.layers[end:])
        self._fetching = []

    def wait(self) -> None:
        """Wait for every copy in flight."""
        jax.block_until_ready((self.layers, list(self.host.values())))


def _padded(slots: Sequence[int], size: int) -> Int32[np.ndarray, "k"]:
    padded = np.arange(OUT_OF_RANGE, OUT_OF_RANGE + size, dtype=np.int32)
    padded[: len(slots)] = slots
    return padded


def _cover(count: int) -> list[tuple[int, int]]:
    """(first, static size) of the transfers of `count` pages: full ones, then the smallest that holds the rest."""
    largest = TRANSFER_PAGES[0]
    transfers = [(first, largest) for first in range(0, count - largest + 1, largest)]
    first = len(transfers) * largest
    if first < count:
        transfers.append((first, min(size for size in TRANSFER_PAGES if size >= count - first)))
    return transfers
