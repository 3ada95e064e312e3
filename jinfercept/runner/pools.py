"""Pools: arrays of layers on the devices, cut into slots, and the copies of slots on the host, with the transfers of each step.

A slot is a page of each of some layers, or the states of one sequence in the recurrent layers. Below, "page" means both: states
are pages that each make an array of their own. Pages cross the link during the step's compute, in arrays `[k, l, B, …]` of k
pages and l layers; states in an array for each of their dtypes. Transfers have a few static sizes, padded with slots out of
range, so that nothing recompiles.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jinfercept.kv.page import PageCopy
from jinfercept.models.mesh import Placed, beside, move, place
from jinfercept.models.protocol import ModelDimensions, ServedModel, states_of, windowed_config
from jinfercept.pallas.layouts.kv_rows import stored_dtype
from jinfercept.pallas.layouts.pages import OUT_OF_RANGE
from jinfercept.runner.executables import Executables
from jinfercept.runner.packing import MOST_TRANSFERS, CommonShape
from jinfercept.runner.page_transfers import KeptPages, add_transfers, layer_pages, on_link, state_shapes
from jinfercept.runner.shape import RunnerShape, in_second_pool


@dataclass(slots=True, eq=False)
class HostArray:
    """Several pages that cross the link together, in one array on the host. It is freed when its last page is dropped."""

    size: int  # pages that it has room for, a power of two
    slots: dict[int, int]  # host slots of the live pages, by index in the array
    data: KeptPages | None = None  # the pages of all layers; None until they are on their way

    @property
    def is_sparse(self) -> bool:
        # it gets replaced by a smaller one, so that all arrays have less than twice as many pages as are live
        return 2 * len(self.slots) <= self.size


class HostPage(NamedTuple):
    array: HostArray
    position: int


@final
class HostSlots(dict[int, HostPage]):
    """The page of every host slot that holds one; written by `add`, `drop`, `compact` and `clear` alone."""

    @property
    def arrays(self) -> list[HostArray]:
        """Every array once."""
        return list({id(page.array): page.array for page in self.values()}.values())

    def add(self, slots: Sequence[int | None], size: int) -> HostArray:
        """Add an array of `size` pages, still without data, for these empty slots. None: the page is not used."""
        array = HostArray(size, {index: slot for index, slot in enumerate(slots) if slot is not None})
        assert len(slots) <= size
        assert not self.keys() & set(array.slots.values())
        self.update({slot: HostPage(array, index) for index, slot in array.slots.items()})
        return array

    def drop(self, slots: Iterable[int]) -> list[HostArray]:
        """Forget these slots' pages. Returns the arrays that have become sparse and still hold a page."""
        touched: dict[int, HostArray] = {}
        for slot in slots:
            array, index = self.pop(slot)
            del array.slots[index]
            touched[id(array)] = array
        return [array for array in touched.values() if array.slots and array.is_sparse]

    def compact(self, array: HostArray) -> tuple[HostArray, list[int]]:
        """Replace a sparse array by one of the smallest size. Returns the new one, without data, and its pages' old indices."""
        indices, slots = list(array.slots), list(array.slots.values())
        for slot in slots:
            del self[slot]
        return self.add(slots, 1 << (len(slots) - 1).bit_length()), indices


@final
class Pool:
    """Pages or states on a model's devices, and their copies on the host. `reset` allocates the arrays, so that all executables
    can be compiled before they take the memory.

    A step that moves pages calls `begin`, `fetch`, `offload`, the compute of the layers, then `scatter`. Later steps do so too,
    as long as the pool `is_busy`. `fetch` is called right behind the step's first executable.

    Args:
        shapes: by place of the layer, of its pages, or of a recurrent layer's states with the slot that is no sequence's.
            Several devices cut the host copies as `on_link` says.
        sizes: pages per transfer, see `transfer_sizes`.
        staging_pages: most pages of an array on the host, a power of two.
        pinned: whether the host copies are page-locked; otherwise the host waits for every copy that leaves.
        moved_pages: pages for which the device has memory beside the pool while they are on their way.

    Attributes:
        places: of the layers.
        layers: the arrays of every layer; () while there are none.
        host: the copies by host slot.
        commons: the common parts of the step's uploads, with the slots that `begin` returned.
    """

    def __init__(
        self,
        shapes: Mapping[int, Any],
        common_shape: CommonShape,
        *,
        sizes: tuple[int, ...] = (1,),
        staging_pages: int = 1,
        pinned: bool = True,
        moved_pages: int = 1 << 30,
    ) -> None:
        # With `staging_pages` of 1 every page is an array, and each array takes JAX about 30 µs of host time. With more, the
        # pages of a context leave in arrays of up to that many pages. A page is fetched with its whole array: a context that
        # returns in part brings up to two arrays with unused pages, and pages that return singly bring one array each. After a
        # step's compaction the arrays take less than twice the memory of the pages that they hold; with 1, exactly as much.
        self.places, self.shapes, self.staging_pages = tuple(shapes), tuple(shapes.values()), staging_pages
        self._common_shape, self._sizes, self._moved_pages, self._pinned = common_shape, sizes, moved_pages, pinned
        self._on_device = on_link(self.shapes[0])
        self._on_host = self._on_device.with_memory_kind("pinned_host")
        self._blank: Array | None = None  # what fills up a scatter's arrays
        if len(sizes) > 1:
            self._blank = place(np.zeros_like(self.blank_copy(staging_pages)), self._on_device)
        rows = [np.array(row, np.int32) for row in range(MOST_TRANSFERS)]
        self._rows: list[Array] = place(rows, beside(jax.tree.leaves(self.shapes)[0]))
        self.layers: tuple[Any, ...] = ()
        self.host = HostSlots()
        self._in_flight: deque[list[Any]] = deque(maxlen=2)  # what the last two steps moved to the host
        self._drop_transfers()

    def add_executables(self, run: Executables) -> None:
        """Add the transfers' executables, which `offload` and `scatter` call."""
        self._run = run
        add_transfers(run, self.shapes, self._sizes, self.staging_pages, self._common_shape)

    def close(self) -> None:
        """Free everything, on the device and on the host."""
        self._forget()
        self.layers = ()

    def reset(self) -> None:
        """Forget all pages. Missing arrays are allocated; the others keep their contents."""
        self._forget()
        self.come_back()

    def come_back(self) -> None:
        """Allocate arrays of zeros where they are missing, or where a failed step has donated them. Waits, so that a lack of
        memory is an error here and not of a later step."""

        def made(shape: jax.ShapeDtypeStruct, array: Array | None = None) -> Array:
            return array if array is not None and _is_whole(array) else _zeros(shape)()

        self.layers = jax.block_until_ready(jax.tree.map(made, self.shapes, *([self.layers] if self.layers else [])))

    def leave_device(self) -> None:
        """Free the arrays when every copy has arrived. The copies on the host stay."""
        self.wait()
        self._drop_transfers()
        for array in jax.tree.leaves(self.layers):
            array.delete()
        self.layers = ()

    def _forget(self) -> None:
        self.host.clear()
        self._drop_transfers()
        self._in_flight.clear()

    def _drop_transfers(self) -> None:
        self.commons: Sequence[Array] = ()
        self._first_transfer = 0  # transfers of other pools that come before this one's
        self._offloads: list[tuple[int, list[HostArray]]] = []  # by gather: its size, arrays
        self._fetches: list[tuple[int, list[Any]]] = []  # by scatter: its size, arrays on the host
        self._early = 0  # scatters whose arrays come during the compute
        self._compactions: list[tuple[Any, HostArray]] = []  # a sparse array, and the smaller one in its place
        self._arrived: list[Any] = []  # on the device: of the fetches, then of the compactions

    def begin(
        self, fetch: Sequence[PageCopy], drop: Iterable[int], offload: Sequence[PageCopy], first_transfer: int = 0
    ) -> list[Int32[np.ndarray, "_"]]:
        """Set the pages that a step moves. One step may fetch, drop and refill the same host slot, in this order.

        Returns the slots of every gather, scatter and selection, for the step's upload, in which `first_transfer` transfers of
        other pools come before them.
        """
        self._first_transfer, self._early = first_transfer, 1
        self._offloads, self._fetches, self._compactions = [], [], []
        if len(self._in_flight) == 2:  # at most two steps' transfers are in flight
            jax.block_until_ready(self._in_flight[0])
        self._in_flight.append([])
        fetches, selected = self._scatters(fetch), list[np.ndarray]()
        for array in self.host.drop(drop):
            into, indices = self.host.compact(array)
            self._compactions.append((array.data, into))
            selected.append(_padded(dict(enumerate(indices)), into.size))
        gathered = list[np.ndarray]()  # jaxtyping would make its type anew at every step
        for size, pieces in self._joined(self._pieces(offload)):
            pages = min(size, self.staging_pages)
            arrays = [self.host.add([copy.host_slot for copy in piece], pages) for piece in pieces]
            self._offloads.append((size, arrays))
            placed = _numbered([dict(enumerate(copy.device_slot for copy in piece)) for piece in pieces], pages)
            gathered.append(_padded(placed, size))
        self._fetches = [(size, arrays) for size, arrays, _ in fetches]
        if len(fetches) > 1:
            moved = accumulate([size for size, _ in self._fetches], initial=len(offload))
            self._early = max(1, sum([pages <= self._moved_pages for pages in list(moved)[1:]]))
        return [*gathered, *[slots for _, _, slots in fetches], *selected]

    @property
    def is_busy(self) -> bool:
        """Whether one of the last two steps that began moved pages to the host."""
        return any(self._in_flight)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers and devices."""
        return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes))

    def blank_copy(self, num_pages: int) -> Any:
        """An uninitialised array for copies of up to `staging_pages` pages; for states, one array for each dtype."""
        if isinstance(self.shapes[0], tuple):
            sizes = Counter[Any]()
            for array in jax.tree.leaves(self.shapes):
                part = array.sharding.shard_shape(array.shape)
                sizes[array.dtype] += len(array.sharding.device_set) * math.prod(part[1:])
            return tuple(np.empty(size, dtype) for dtype, size in sizes.items())
        size = 1 << (num_pages - 1).bit_length()
        return np.empty((size, len(self.shapes), *self.shapes[0].shape[1:]), self.shapes[0].dtype)

    def to_host(self, array: KeptPages) -> KeptPages:
        """Put an array of `blank_copy` into the memory of host copies. Any thread may call it."""
        return jax.device_put(array, self._on_host) if self._pinned else array

    def adopt(self, array: KeptPages, slots: Sequence[int | None]) -> None:
        """Take an array of `to_host` as the copies of these slots' pages. None: the page is not used."""
        if any(slot is not None for slot in slots):
            self.host.add(slots, 1 if isinstance(array, tuple) else len(array)).data = array

    def fetch(self) -> None:
        """Dispatch the copies to the device."""
        # On a GPU a copy waits for everything dispatched before its memory was allocated, and overlaps what is dispatched
        # later. One engine makes all copies to the device: arrays that do not wait for the step's upload would go before it. So
        # the step's first executable, which waits for the upload, is dispatched before.
        coming = [array for _, arrays in self._fetches[: self._early] for array in arrays]
        coming += [sparse for sparse, _ in self._compactions]
        if coming:
            self._arrived = move(coming, self._on_device)

    def offload(self) -> None:
        """Dispatch the copies to the host: the pages as they are before anything dispatched later."""
        for number, (size, arrays) in enumerate(self._offloads):
            self._leave(self._run["gather", size](self.layers, *self._slots(number))[: len(arrays)], arrays)

    def scatter(self) -> None:
        """Write the fetched pages to their device slots, after everything dispatched before."""
        arrived, self._arrived = iter(self._arrived), []
        for index, (size, fetched) in enumerate(self._fetches):
            # arrays for which the device has no memory to spare follow the compute, one transfer after the other
            late = index >= self._early
            arrays = move(fetched, self._on_device) if late else [*islice(arrived, len(fetched))]
            arrays += [self._blank] * (size // min(size, self.staging_pages) - len(arrays))
            slots = self._slots(len(self._offloads) + index)
            self.layers = self._run["scatter", size](self.layers, *slots, tuple(arrays))
        first_number = len(self._offloads) + len(self._fetches)
        for number, ((_, into), array) in enumerate(zip(self._compactions, arrived, strict=True), first_number):
            select = self._run["select", into.size, array.shape[0]]
            self._leave([select(array, *self._slots(number))], [into])
        self._offloads, self._fetches, self._compactions = [], [], []

    def wait(self) -> None:
        """Wait for every copy in flight."""
        jax.block_until_ready((self.layers, [array.data for array in self.host.arrays]))

    def _slots(self, number: int) -> tuple[Array, Array]:
        upload, row = divmod(self._first_transfer + number, MOST_TRANSFERS)
        return self.commons[upload], self._rows[row]

    def _leave(self, device_arrays: Sequence[Any], arrays: Sequence[HostArray]) -> None:
        copies = move(device_arrays, self._on_host) if self._pinned else jax.tree.map(np.asarray, list(device_arrays))
        self._in_flight[-1] += copies
        for array, copy in zip(arrays, copies, strict=True):
            array.data = copy

    def _scatters(self, fetch: Sequence[PageCopy]) -> list[tuple[int, list[Any], Int32[np.ndarray, "slots"]]]:
        by_array: dict[int, tuple[HostArray, dict[int, int]]] = {}
        for copy in fetch:
            array, index = self.host[copy.host_slot]
            by_array.setdefault(id(array), (array, {}))[1][index] = copy.device_slot
        scatters: list[tuple[int, list[Any], Int32[np.ndarray, "slots"]]] = []
        for size, group in self._joined([(pair[0].size, pair) for pair in by_array.values()]):
            slots = _numbered([slots for _, slots in group], min(size, self.staging_pages))
            scatters.append((size, [array.data for array, _ in group], _padded(slots, size)))
        return scatters

    def _pieces(self, offload: Sequence[PageCopy]) -> list[tuple[int, Sequence[PageCopy]]]:
        sizes, pieces = [size for size in self._sizes if size <= self.staging_pages], []
        # no array has pages of two contexts
        for _, of_context in groupby(offload, attrgetter("context")):
            pages = list(of_context)
            cover = _cover(len(pages), sizes, self.staging_pages)
            pieces += [(size, pages[start : start + size]) for start, size in cover]
        return pieces

    def _joined[A](self, arrays: Sequence[tuple[int, A]]) -> list[tuple[int, list[A]]]:
        # arrays of full size share transfers, smaller ones go alone
        full = [array for size, array in arrays if size == self.staging_pages]
        joined = [(size, [array]) for size, array in arrays if size < self.staging_pages]
        sizes, least = self._sizes, self.staging_pages
        if self._run.missing and self._is_compiled(least):
            sizes = [size for size in sizes if size <= least or self._is_compiled(size)]
        for start, size in _cover(len(full) * self.staging_pages, sizes, self.staging_pages):
            joined.append((size, full[start // self.staging_pages : (start + size) // self.staging_pages]))
        return joined

    def _is_compiled(self, size: int) -> bool:
        return self._run.missing.isdisjoint({("gather", size), ("scatter", size)})


def pool_shapes(model: ServedModel, shape: RunnerShape, like: Placed) -> list[dict[int, Any]]:
    """By pool, the arrays of each of its layers by place (`kv_places`): pages in the first pool; in the second, if there is
    one, pages of the pool for windows or states. `like` has the dtype of the weights, on their devices."""
    in_second = in_second_pool(model, shape)
    first, second = (
        [place for place, other in enumerate(in_second) if other == is_second] for is_second in (False, True)
    )

    def pages(config: ModelDimensions, num_pages: int) -> Any:
        dims = num_pages + 1, shape.page_size, config.num_kv_heads, config.head_dim
        return layer_pages(*dims, stored_dtype(shape.kv_cache_dtype, like.dtype), beside(like))

    pools = [dict.fromkeys(first, pages(model.config, shape.num_pages))]
    if shape.num_window_pages:
        pools.append(dict.fromkeys(second, pages(windowed_config(model), shape.num_window_pages)))
    elif second:
        pools.append(dict(zip(second, state_shapes(states_of(model), shape.num_states, like), strict=True)))
    return pools


def _is_whole(array: Array) -> bool:
    try:
        return array.block_until_ready() is array
    except RuntimeError:  # a failed step leaves arrays that are donated, or are its error
        return False


@lru_cache
def _zeros(shape: jax.ShapeDtypeStruct) -> Any:
    return jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)


def _numbered(by_array: Sequence[Mapping[int, int]], pages: int) -> dict[int, int]:
    return {place * pages + index: slot for place, slots in enumerate(by_array) for index, slot in slots.items()}


def _padded(slots: Mapping[int, int], size: int) -> Int32[np.ndarray, "k"]:
    padded = np.arange(OUT_OF_RANGE, OUT_OF_RANGE + size, dtype=np.int32)
    padded[list(slots)] = list(slots.values())
    return padded


def _cover(count: int, sizes: Sequence[int], staging_pages: int) -> list[tuple[int, int]]:
    # (first, static size) of each: the smallest size that holds the rest; or if half an array or more of that would be unused,
    # the largest that the rest fills
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
