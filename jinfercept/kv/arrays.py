"""The device half of pages: one array per layer, and the executables that gather pages for the host and scatter them back.

A host page is one pinned array `[L, B, 2, K, D]` with all layers in it, so that one transfer carries it; it is freed when its
last reference goes. Transfers come in a few static sizes, padded with the scratch page, so that nothing recompiles.
"""

from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jinfercept.executables import Executables
from jinfercept.pallas.layout import SCRATCH_PAGE, KVPages, kv_shape

HostPage = Float[Array, "L B 2 K D"]

TRANSFER_PAGES = (16, 4, 1)
"""Pages per gather or scatter, largest first."""


def _gather(layers: tuple[KVPages, ...], slots: Int[Array, "k"]) -> tuple[HostPage, ...]:
    pages = jnp.stack([layer[slots] for layer in layers], axis=1)
    return tuple(pages[i] for i in range(slots.shape[0]))


def _scatter(layers: tuple[KVPages, ...], slots: Int[Array, "k"], pages: tuple[HostPage, ...]) -> tuple[KVPages, ...]:
    stacked = jnp.stack(pages)
    return tuple(layer.at[slots].set(stacked[:, index]) for index, layer in enumerate(layers))


def add_transfers(run: Executables, layers: tuple[KVPages, ...], page: HostPage) -> None:
    """Note the executables that gather pages and scatter them, for arrays or for their shapes."""
    for size in TRANSFER_PAGES:
        slots = _padded([], size)
        run.add(("gather", size), _gather, layers, slots)
        run.add(("scatter", size), _scatter, layers, slots, (page,) * size, donate=(0,))


@final
class KVArrays:
    """All pages of a model on one device, and their copies on the host.

    Args:
        num_pages: pages of the device pool, without the scratch page.
        page_size: tokens per page.
        num_layers, num_kv_heads, head_dim, dtype: of the model.
        home: where the pool lives; the host copies are in that device's pinned memory.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        home: jax.sharding.SingleDeviceSharding,
    ) -> None:
        shape = kv_shape(num_pages + 1, page_size, num_kv_heads, head_dim)
        self._num_layers = num_layers
        self._on_device = home
        self._on_host = home.with_memory_kind("pinned_host")
        self._zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=self._on_device)
        self._blank = jax.device_put(np.zeros((num_layers, *shape[1:]), dtype), self._on_device)
        self.layers: tuple[KVPages, ...] = ()
        self.host: dict[int, HostPage] = {}
        self._landing: dict[int, HostPage] = {}
        self.reset()

    def add_executables(self, run: Executables) -> None:
        """Note the transfers' executables, which `copy_out` and `land` will call."""
        self._run = run
        add_transfers(run, self.layers, self._blank)

    def close(self) -> None:
        """Free everything, on the device and on the host."""
        self.layers = ()
        self.host.clear()
        self._landing.clear()

    def reset(self) -> None:
        """Forget everything; the pool starts empty."""
        self.close()
        self.layers = tuple(self._zeros() for _ in range(self._num_layers))

    def copy_out(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        """Start copying pages to the host, as they are before anything that is dispatched later."""
        for first, size in _cover(len(device_slots)):
            group = device_slots[first : first + size]
            pages = self._run["gather", size](self.layers, _padded(group, size))
            copies = jax.device_put(list(pages[: len(group)]), self._on_host)
            self.host.update(zip(host_slots[first : first + size], copies, strict=False))

    def fetch(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        """Start copying host pages to landing buffers on the device."""
        if host_slots:
            buffers = jax.device_put([self.host[slot] for slot in host_slots], self._on_device)
            self._landing.update(zip(device_slots, buffers, strict=True))

    def land(self, device_slots: Sequence[int]) -> None:
        """Write landing buffers to their slots, after everything that was dispatched before."""
        for first, size in _cover(len(device_slots)):
            group = device_slots[first : first + size]
            pages = [self._landing.pop(slot) for slot in group]
            pages += [self._blank] * (size - len(group))
            self.layers = self._run["scatter", size](self.layers, _padded(group, size), tuple(pages))

    def drop(self, host_slots: Sequence[int]) -> None:
        """Forget host copies."""
        for slot in host_slots:
            del self.host[slot]

    def wait(self) -> None:
        """Wait for every copy that was started: for a plan that does nothing else."""
        jax.block_until_ready((self.layers, list(self.host.values())))


def _padded(slots: Sequence[int], size: int) -> Int32[np.ndarray, "k"]:
    padded = np.full(size, SCRATCH_PAGE, np.int32)
    padded[: len(slots)] = slots
    return padded


def _cover(count: int) -> list[tuple[int, int]]:
    """(first, static size) of the transfers that carry `count` pages: full ones, then the smallest that holds the rest."""
    largest = TRANSFER_PAGES[0]
    transfers = [(first, largest) for first in range(0, count - largest + 1, largest)]
    first = len(transfers) * largest
    if first < count:
        transfers.append((first, min(size for size in TRANSFER_PAGES if size >= count - first)))
    return transfers
