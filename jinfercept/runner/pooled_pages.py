"""Pages with all host copies in one preallocated array: one executable copies all pages of a step and direction.

The other way to hold host copies is `page_arrays`. Here every page is a row of its own: it crosses the link alone, and the host
memory is exactly that of the rows. The executables copy over the link themselves, on the stream of the steps: no compute hides
them. Unmeasured on a GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Int32

from jinfercept.kv.page import PageCopy
from jinfercept.layouts.pages import OUT_OF_RANGE, KVPages, PagesLike, kv_shape
from jinfercept.models.mesh import beside, over_devices, place
from jinfercept.models.parallel import AXIS
from jinfercept.pallas.page_copies import HOST, HostPool, pages_from_host, pages_to_host
from jinfercept.runner.executables import Executables
from jinfercept.runner.page_transfers import PAGES_SPEC, transfer_sizes
from jinfercept.runner.step_upload import MOST_TRANSFERS, CommonShape

POOL_SPEC = PartitionSpec(None, None, AXIS)
"""Several devices cut the host pool as they cut a layer's pages: every device copies its own words."""
COPIES_PER_UPLOAD = 2
"""Transfers whose slots and rows fill the common part of an upload: one each way."""


def copy_sizes(common_shape: CommonShape) -> tuple[int, int]:
    """Pages of a copy's executables, largest first: as many as the common part has room for, or an eighth."""
    most = MOST_TRANSFERS * common_shape.num_pages // (2 * COPIES_PER_UPLOAD)
    return most, most // 8


def _out(
    shape: CommonShape, size: int, kernel: bool, layers: tuple[KVPages, ...], host: HostPool, common: Any, number: Any
) -> HostPool:
    return pages_to_host(layers, host, _places(shape, size, common, number), kernel=kernel)


def _in(
    shape: CommonShape, size: int, kernel: bool, layers: tuple[KVPages, ...], host: HostPool, common: Any, number: Any
) -> tuple[KVPages, ...]:
    return pages_from_host(layers, host, _places(shape, size, common, number), kernel=kernel)


def _places(
    shape: CommonShape, size: int, common: Int[Array, "common"], number: Int[Array, ""]
) -> Int[Array, "2 size"]:
    """The device slots and rows of one of the copies in a common part."""
    every = shape.transfers(common).reshape(COPIES_PER_UPLOAD, 2, -1)
    return jax.lax.dynamic_index_in_dim(every, number, keepdims=False)[:, :size]


def add_copies(run: Any, layers: tuple[PagesLike, ...], host: Any, common_shape: CommonShape, platform: str) -> None:
    """Add the copies' executables for a part of the layers.

    Args:
        run: to which they are added.
        layers: pages of consecutive layers, arrays or shapes with shardings.
        host: their copies, likewise.
        platform: of the devices; other than `cpu`, the executables are kernels.
    """
    home, kernel = beside(layers[0]), platform != "cpu"
    common = jax.ShapeDtypeStruct((common_shape.size,), jnp.int32, sharding=home)
    arguments = layers, host, common, jax.ShapeDtypeStruct((), jnp.int32, sharding=home)
    for size in copy_sizes(common_shape):
        for name, function, out, donated in (("out", _out, POOL_SPEC, 1), ("in", _in, PAGES_SPEC, 0)):
            whole = over_devices(partial(function, common_shape, size, kernel), arguments, out)
            run.add((name, size, len(layers)), whole, *arguments, donate=(donated,))


@final
class HostRows:
    """The row of every host slot that holds a page. A row that a step drops is free from the next one on."""

    def __init__(self, num_rows: int) -> None:
        self._rows: dict[int, int] = {}
        self._free = list(range(num_rows))[::-1]
        self._dropped: list[int] = []

    def __getitem__(self, slot: int) -> int:
        return self._rows[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self) -> None:
        """A step begins: nothing reads the rows that the last one dropped."""
        self._free += self._dropped
        self._dropped = []

    def add(self, slot: int) -> int:
        """A free row for this slot, which holds no page."""
        assert slot not in self._rows
        self._rows[slot] = self._free.pop()
        return self._rows[slot]

    def drop(self, slots: Iterable[int]) -> None:
        """Forget these slots' pages."""
        self._dropped += [self._rows.pop(slot) for slot in slots]

    def clear(self) -> None:
        """Forget every page."""
        self.drop(list(self._rows))
        self.begin()


@final
class PooledKVArrays:
    """All pages of a model on its devices, and their copies on the host in one array for each part of the layers.

    A step calls what it calls of `KVArrays`. `offload` copies a part's pages to the host before the compute of its layers, and
    `scatter` those from the host after it.

    Args:
        num_pages: pages of the device pool, without the scratch page.
        page_size: tokens per page.
        host_rows: pages of the host pool: those that it may hold, and as many more as one step may move.
        parts: first layer and end of every part.
        num_kv_heads, head_dim: of the model.
        dtype: of the page arrays.
        home: where the pool lives, see `KVArrays`. The host copies are in the devices' pinned memory.
        num_rows: most sampled rows of a step.

    Attributes:
        shapes, layers, commons: as those of `KVArrays`.
        host: which host slots hold a page.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        host_rows: int,
        *,
        parts: Sequence[tuple[int, int]],
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        home: Sharding,
        num_rows: int = 1,
    ) -> None:
        shape = kv_shape(num_pages + 1, page_size, num_kv_heads, head_dim, dtype)
        self.parts = tuple(parts)
        self._platform = next(iter(home.device_set)).platform
        self.common_shape = CommonShape(num_rows, transfer_sizes(self._platform)[0])
        self._zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=home)
        layer = jax.ShapeDtypeStruct(shape, dtype, sharding=home)
        self.shapes: Any = (layer,) * self.parts[-1][1]
        self._numbers: list[Array] = place(
            [np.array(number, np.int32) for number in range(COPIES_PER_UPLOAD)], beside(layer)
        )
        self.commons: Sequence[Array] = ()
        words = int(np.prod(shape[1:], dtype=np.int64)) * layer.dtype.itemsize // 4
        on_host = beside(layer, POOL_SPEC).with_memory_kind("pinned_host")
        self._pool_shapes = [
            jax.ShapeDtypeStruct((host_rows, end - first, words), jnp.uint32, sharding=on_host) for first, end in parts
        ]
        self.layers: tuple[KVPages, ...] = ()
        self.host = HostRows(host_rows)
        self._pools: list[HostPool] = []
        self._out: list[int] = []  # sizes of the copies to the host
        self._in: list[int] = []

    def add_executables(self, run: Executables) -> None:
        """Add the copies' executables, which `offload` and `scatter` call."""
        self._run = run
        for (first, end), pool in zip(self.parts, self._pool_shapes, strict=True):
            add_copies(run, self.shapes[first:end], pool, self.common_shape, self._platform)

    def close(self) -> None:
        """Free everything, on the device and on the host."""
        self.layers, self._pools, self.commons = (), [], ()
        self.host.clear()
        self._out, self._in = [], []

    def reset(self) -> None:
        """Allocate both pools, or forget all pages; the device's is zeros."""
        self.close()
        self.layers = tuple(self._zeros() for _ in self.shapes)
        self._pools = [_empty(pool) for pool in self._pool_shapes]

    def begin(
        self, fetch: Sequence[PageCopy], drop: Iterable[int], offload: Sequence[PageCopy]
    ) -> list[Int32[np.ndarray, "k"]]:
        """Set the pages that a step moves. One step may fetch, drop and refill the same host slot, in this order.

        Returns:
            What the common part of the step's upload has of the copies, in the place of `KVArrays`' transfers.
        """
        self.host.begin()
        coming = [(copy.device_slot, self.host[copy.host_slot]) for copy in fetch]
        self.host.drop(drop)
        leaving = [(copy.device_slot, self.host.add(copy.host_slot)) for copy in offload]
        (self._out, out), (self._in, back) = self._copies(leaving), self._copies(coming)
        return [*out, *back]

    def fetch(self, part: int) -> None:
        """Nothing: `scatter` reads the host's memory."""

    def offload(self, part: int) -> None:
        """Dispatch the copies of one part to the host: the pages as they are before anything dispatched later."""
        first, end = self.parts[part]
        for number, size in enumerate(self._out):
            copy = self._run["out", size, end - first]
            self._pools[part] = copy(self.layers[first:end], self._pools[part], *self._where(number))

    def scatter(self, part: int) -> None:
        """Dispatch the copies of one part to their device slots, after everything dispatched before."""
        first, end = self.parts[part]
        for number, size in enumerate(self._in, start=len(self._out)):
            copy = self._run["in", size, end - first]
            written = copy(self.layers[first:end], self._pools[part], *self._where(number))
            self.layers = (*self.layers[:first], *written, *self.layers[end:])

    def wait(self) -> None:
        """Wait for every copy in flight."""
        jax.block_until_ready((self.layers, self._pools))

    def _where(self, number: int) -> tuple[Array, Array]:
        """Where the slots and rows of a step's copy are: in which common part, and at which place in that."""
        return self.commons[number // COPIES_PER_UPLOAD], self._numbers[number % COPIES_PER_UPLOAD]

    def _copies(self, pages: Sequence[tuple[int, int]]) -> tuple[list[int], list[Int32[np.ndarray, "k"]]]:
        """The sizes of the copies of these pages, and the rows of a common part that have their slots and rows."""
        most, few = copy_sizes(self.common_shape)
        sizes, vectors = [], list[Int32[np.ndarray, "k"]]()
        for first in range(0, len(pages), most):
            piece = pages[first : first + most]
            sizes.append(few if len(piece) <= few else most)
            places = np.tile(np.arange(OUT_OF_RANGE, OUT_OF_RANGE + most, dtype=np.int32), (2, 1))
            places[:, : len(piece)] = np.array(piece, np.int32).T
            vectors += list(places.reshape(-1, self.common_shape.num_pages))
        return sizes, vectors


def _empty(pool: Any) -> HostPool:
    """A host pool with any content; the device holds nothing of it meanwhile."""
    allocate = jax.jit(lambda: jax.device_put(jnp.empty(pool.shape, pool.dtype), HOST), out_shardings=pool.sharding)
    return allocate()
