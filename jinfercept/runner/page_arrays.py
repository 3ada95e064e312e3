"""The device half of pages: one array per layer, and the transfers of each step.

Pages cross the link in arrays `[k, l, B, …]` of k pages and l layers, one for each part of the layers. With one part a
page crosses whole, during all of the step's compute; with more, each part crosses during the compute of its own layers.
Transfers have a few static sizes, padded with slots out of range, so that nothing recompiles.

With `staging_pages` of 1 every page is an array, for each of which JAX takes about 30 µs of host time. With more, the pages of
a context go out in arrays of up to so many, a power of two. A page is fetched with its whole array: a context that returns in
part brings up to two arrays with unused pages; of pages that return singly, every one brings its array. Arrays for which the
device has no memory beside the others follow the compute, one transfer after the other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Num

from jinfercept.kv.page import PageCopy
from jinfercept.layouts.pages import OUT_OF_RANGE, KVPages
from jinfercept.models.mesh import beside, place
from jinfercept.runner.executables import Executables
from jinfercept.runner.host_memory import HostMemory, is_whole
from jinfercept.runner.host_pages import HostArray, HostPages, HostSlots, KeptPages
from jinfercept.runner.page_shapes import heads_spec, layer_pages
from jinfercept.runner.page_transfers import add_transfers, transfer_sizes
from jinfercept.runner.step_upload import CommonShape, TransferSlots

Fetched = Sequence[KeptPages]
"""The parts of an array that is on its way to the device. Pages in it without a slot are not wanted."""


class Compaction(NamedTuple):
    """A sparse array that is replaced by a smaller one, by way of the device.

    Attributes:
        parts: its data, on the host.
        into: the smaller array, which gets its data part by part.
    """

    parts: Sequence[KeptPages]
    into: HostArray


@final
class KVArrays:
    """All pages of a model on its devices, and their copies on the host.

    The pool is allocated by `reset`, so that all executables can be compiled before it takes the memory.

    A step calls `begin`, then for each part `fetch`, `offload`, the compute of the part's layers, and `scatter`. On a GPU a
    copy waits for what was dispatched when its memory was allocated and overlaps what is dispatched later. So the first part's
    `fetch` comes right behind the step's first executable, which waits for the step's upload: one engine of the GPU makes all
    copies in this direction, and arrays that do not wait for the upload go before it. `offload` and `scatter` read slots in
    `slots.commons`.

    Args:
        num_pages: pages of the device pool, without the scratch page.
        page_size: tokens per page.
        parts: first layer and end of every part.
        num_kv_heads, head_dim: of the model.
        dtype: of the page arrays, see `kv_rows.stored_dtype`.
        home: where the pool lives; several devices cut it as `layer_pages` says. The host copies are in the devices' pinned
            memory, cut alike.
        staging_pages: most pages of an array on the host, a power of two. The arrays take less than twice the memory of the
            pages that they hold once a step's compaction is done, and exactly as much with 1.
        num_rows: most sampled rows of a step.
        pinned: whether the host copies are page-locked; else they are pageable, and the host waits for every copy that leaves.
        moved_pages: pages for which the device has memory beside the pool while they are on their way.

    Attributes:
        staging_pages: as given.
        shapes: of every layer's pages.
        layers: these arrays; () while there is no pool.
        slots: where the step's uploads have the slots that `begin` returned.
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
        home: Sharding,
        num_rows: int = 1,
        staging_pages: int = 1,
        pinned: bool = True,
        moved_pages: int = 1 << 30,
    ) -> None:
        layer = layer_pages(num_pages + 1, page_size, num_kv_heads, head_dim, dtype, home)
        shape = layer.shape
        self.parts = tuple(parts)
        self.staging_pages = staging_pages
        self._sizes = transfer_sizes(next(iter(home.device_set)).platform, staging_pages)
        self.common_shape = CommonShape(num_rows, self._sizes[0])
        self._zeros = jax.jit(lambda: jnp.zeros(shape, layer.dtype), out_shardings=layer.sharding)
        self.shapes: Any = (layer,) * self.parts[-1][1]
        self.slots = TransferSlots(beside(layer))
        on_device = beside(layer, heads_spec(len(shape) + 1))
        self._host_memory, self._moved_pages = HostMemory(on_device, pinned=pinned), moved_pages
        blanks = {end - first: np.zeros((staging_pages, end - first, *shape[1:]), layer.dtype) for first, end in parts}
        self._blank = place(blanks, on_device)  # fills up a scatter's arrays
        self.layers: tuple[KVPages, ...] = ()
        self.host = HostSlots()
        self._offloads: list[tuple[int, list[HostArray]]] = []  # by gather: its size, arrays
        self._fetches: list[tuple[int, list[Fetched]]] = []  # by scatter: its size, arrays
        self._early = 0  # scatters whose arrays come during the compute
        self._compactions: list[Compaction] = []
        self._arrived: list[HostPages] = []  # on the device: of the fetches, then of the compactions

    def add_executables(self, run: Executables) -> None:
        """Add the transfers' executables, which `offload` and `scatter` call."""
        self._run = run
        for first, end in {end - first: (first, end) for first, end in self.parts}.values():
            add_transfers(run, self.shapes[first:end], self._sizes, self.staging_pages, self.common_shape.num_rows)

    def close(self) -> None:
        """Free everything, on the device and on the host."""
        self._forget()
        self.layers = ()

    def reset(self) -> None:
        """Forget all pages. The pool's arrays stay as they are, with what is in them; those that are missing are allocated."""
        self._forget()
        self.come_back()

    def come_back(self) -> None:
        """Allocate the pool: zeros. Arrays that are there stay, unless a failed step has donated them. Waits, so that memory
        that lacks is an error here and not of a later step."""
        layers = self.layers or (None,) * len(self.shapes)
        self.layers = jax.block_until_ready(tuple(layer if is_whole(layer) else self._zeros() for layer in layers))

    def leave_device(self) -> None:
        """Free the pool, when every copy has arrived. The host's copies stay."""
        self.wait()
        self._drop_transfers()
        for layer in self.layers:
            layer.delete()
        self.layers = ()

    def _forget(self) -> None:
        self.host.clear()
        self._drop_transfers()
        self._host_memory.close()

    def _drop_transfers(self) -> None:
        self._offloads, self._fetches, self._compactions, self._arrived, self.slots.commons = [], [], [], [], ()

    def begin(
        self, fetch: Sequence[PageCopy], drop: Iterable[int], offload: Sequence[PageCopy], first_transfer: int = 0
    ) -> list[Int32[np.ndarray, "_"]]:
        """Set the pages that a step moves. One step may fetch, drop and refill the same host slot, in this order.

        Waits for earlier steps' offloads as `HostMemory.begin` does.

        Args:
            first_transfer: see `TransferSlots.first`.

        Returns:
            The slots of every gather, scatter and selection, for the step's upload.
        """
        self.slots.first = first_transfer
        if offload or drop or self._host_memory.is_busy:
            self._host_memory.begin()
        fetches = self._scatters(fetch) if fetch else []
        self._compactions, selected = [], list[np.ndarray]()
        for array in self.host.drop(drop):
            into, indices = self.host.compact(array)
            self._compactions.append(Compaction(array.parts, into))
            selected.append(_padded(dict(enumerate(indices)), into.size))
        self._offloads, gathered = [], list[np.ndarray]()  # jaxtyping would make its type anew at every step
        for size, pieces in self._joined(self._pieces(offload)) if offload else ():
            pages = min(size, self.staging_pages)
            arrays = [self.host.add([copy.host_slot for copy in piece], pages) for piece in pieces]
            self._offloads.append((size, arrays))
            placed = _numbered([dict(enumerate(copy.device_slot for copy in piece)) for piece in pieces], pages)
            gathered.append(_padded(placed, size))
        self._fetches = [(size, arrays) for size, arrays, _ in fetches]
        self._early = 1
        if len(fetches) > 1:
            moved = accumulate([size for size, _ in self._fetches], initial=len(offload))
            self._early = max(1, sum([pages <= self._moved_pages for pages in list(moved)[1:]]))
        return [*gathered, *[slots for _, _, slots in fetches], *selected]

    @property
    def page_bytes(self) -> int:
        """Of a page, over all layers and devices."""
        return len(self.shapes) * math.prod(self.shapes[0].shape[1:]) * self.shapes[0].dtype.itemsize

    def blank_copies(self, num_pages: int) -> list[Num[np.ndarray, "k l B *sides heads W"]]:
        """Arrays for copies of up to `staging_pages` pages, one for each part of the layers, with anything in them."""
        size, layer = 1 << (num_pages - 1).bit_length(), self.shapes[0]
        return [np.empty((size, end - first, *layer.shape[1:]), layer.dtype) for first, end in self.parts]

    def to_host(self, arrays: Sequence[Num[np.ndarray, "k l B *sides heads W"]]) -> list[KeptPages]:
        """Such arrays in the memory of host copies. From any thread."""
        return self._host_memory.keep(arrays)

    def adopt(self, arrays: list[KeptPages], slots: Sequence[int | None]) -> None:
        """Take arrays of `to_host` as the copies of these slots' pages; None: the page is of no use."""
        if any(slot is not None for slot in slots):
            self.host.add(slots, arrays[0].shape[0]).parts = arrays

    def fetch(self, part: int) -> None:
        """Dispatch the copies of one part to the device."""
        coming = [parts[part] for _, arrays in self._fetches[: self._early] for parts in arrays]
        coming += [compaction.parts[part] for compaction in self._compactions]
        if coming:
            self._arrived = self._host_memory.to_device(coming)

    def offload(self, part: int) -> None:
        """Dispatch the copies of one part to the host: the pages as they are before anything dispatched later."""
        first, end = self.parts[part]
        for number, (size, arrays) in enumerate(self._offloads):
            gather = self._run["gather", size, end - first]
            self._leave(gather(self.layers[first:end], *self.slots[number])[: len(arrays)], arrays)

    def scatter(self, part: int) -> None:
        """Write the fetched pieces of one part to their device slots, after everything dispatched before."""
        first, end = self.parts[part]
        arrived, self._arrived = iter(self._arrived), []
        for index, (size, fetched) in enumerate(self._fetches):
            late = index >= self._early
            pieces = [parts[part] for parts in fetched]
            arrays = self._host_memory.to_device(pieces) if late else [*islice(arrived, len(pieces))]
            arrays += [self._blank[end - first]] * (size // min(size, self.staging_pages) - len(arrays))
            scatter = self._run["scatter", size, end - first]
            written = scatter(self.layers[first:end], *self.slots[len(self._offloads) + index], tuple(arrays))
            self.layers = (*self.layers[:first], *written, *self.layers[end:])
        first_number = len(self._offloads) + len(self._fetches)
        for number, (compaction, array) in enumerate(zip(self._compactions, arrived, strict=True), first_number):
            into = compaction.into
            select = self._run["select", into.size, array.shape[0], end - first]
            self._leave([select(array, *self.slots[number])], [into])

    def wait(self) -> None:
        """Wait for every copy in flight."""
        jax.block_until_ready((self.layers, [array.parts for array in self.host.arrays]))

    def _leave(self, device_arrays: Sequence[Array], arrays: Sequence[HostArray]) -> None:
        """Copy arrays of the device to the host, as the next part of these."""
        for array, piece in zip(arrays, self._host_memory.to_host(device_arrays), strict=True):
            array.parts.append(piece)

    def _scatters(self, fetch: Sequence[PageCopy]) -> list[tuple[int, list[Fetched], Int32[np.ndarray, "slots"]]]:
        """The arrays of these pages by the scatters that write them, each with its size and its slots: arrays of full size
        together, smaller ones alone."""
        by_array: dict[int, tuple[HostArray, dict[int, int]]] = {}
        for copy in fetch:
            array, index = self.host[copy.host_slot]
            by_array.setdefault(id(array), (array, {}))[1][index] = copy.device_slot
        scatters: list[tuple[int, list[Fetched], Int32[np.ndarray, "slots"]]] = []
        for size, group in self._joined([(pair[0].size, pair) for pair in by_array.values()]):
            slots = _numbered([slots for _, slots in group], min(size, self.staging_pages))
            scatters.append((size, [array.parts for array, _ in group], _padded(slots, size)))
        return scatters

    def _pieces(self, offload: Sequence[PageCopy]) -> list[tuple[int, Sequence[PageCopy]]]:
        """The pages of the arrays that leave, each with its size: no array has pages of two contexts."""
        sizes, pieces = [size for size in self._sizes if size <= self.staging_pages], []
        for _, of_context in groupby(offload, attrgetter("context")):
            pages = list(of_context)
            cover = _cover(len(pages), sizes, self.staging_pages)
            pieces += [(size, pages[start : start + size]) for start, size in cover]
        return pieces

    def _joined[A](self, arrays: Sequence[tuple[int, A]]) -> list[tuple[int, list[A]]]:
        """The arrays of every transfer, with its size: smaller ones alone, those of full size together."""
        full = [array for size, array in arrays if size == self.staging_pages]
        joined = [(size, [array]) for size, array in arrays if size < self.staging_pages]
        sizes, least = self._sizes, self.staging_pages
        if self._run.missing and self._is_compiled(least):
            sizes = [size for size in sizes if size <= least or self._is_compiled(size)]
        for start, size in _cover(len(full) * self.staging_pages, sizes, self.staging_pages):
            joined.append((size, full[start // self.staging_pages : (start + size) // self.staging_pages]))
        return joined

    def _is_compiled(self, size: int) -> bool:
        keys = {(way, size, end - first) for way in ("gather", "scatter") for first, end in self.parts}
        return self._run.missing.isdisjoint(keys)


def _numbered(by_array: Sequence[Mapping[int, int]], pages: int) -> dict[int, int]:
    """Device slots by their place in a transfer, from those by their place in its arrays of so many pages."""
    return {place * pages + index: slot for place, slots in enumerate(by_array) for index, slot in slots.items()}


def _padded(slots: Mapping[int, int], size: int) -> Int32[np.ndarray, "k"]:
    padded = np.arange(OUT_OF_RANGE, OUT_OF_RANGE + size, dtype=np.int32)
    padded[list(slots)] = list(slots.values())
    return padded


def _cover(count: int, sizes: Sequence[int], staging_pages: int) -> list[tuple[int, int]]:
    """(first, static size) of the transfers of `count` pages: the smallest that holds the rest, unless that is an array's half
    or more too large; then the largest that it fills."""
    transfers, first = [], 0
    while first < count:
        rest = count - first
        size = min((size for size in sizes if size >= rest), default=max(sizes))
        pages = min(size, staging_pages)
        if (rest - 1) % pages + 1 <= pages // 2:
            size = max(size for size in sizes if size <= rest)
        transfers.append((first, size))
        first += size
    return transfers
