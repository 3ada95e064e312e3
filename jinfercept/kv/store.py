"""The slots of every extent, the queues of extents that may be evicted, and the copies in flight.

All changes are made while a plan is built, between `begin` and the end of the plan. The runner executes a plan as fetch, drop,
offload, compute, scatter, so a device slot can be reused inside the plan that offloads it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, final

from jinfercept.kv.extent import NEVER, TOKEN_BYTES, ContextCheckpoint, PageExtent
from jinfercept.kv.page import Occupancy, Residency, SlotPool, Slots


class _ExtentPlace(NamedTuple):
    last_use: int
    minus_start: int  # of one use, the last pages come first
    number: int  # equal ones by age
    num_pages: int


@final
class ExtentQueue:
    """A set of extents, least recently used first, of one use children before parents."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._order: list[tuple[_ExtentPlace, PageExtent]] = []
        self.places: dict[PageExtent, _ExtentPlace] = {}

    def sort(self, extent: PageExtent, is_member: bool) -> None:
        """Add an extent, sort it in anew as it is now, or remove it."""
        place = _ExtentPlace(extent.last_use, -extent.start, extent.number, extent.num_pages) if is_member else None
        if self.places.get(extent) != place:
            self.discard(extent)
            if place is not None:
                insort(self._order, (place, extent))
                self.places[extent] = place
                self.num_pages += place.num_pages

    def discard(self, extent: PageExtent) -> None:
        """Remove an extent if it is a member."""
        place = self.places.pop(extent, None)
        if place is not None:
            del self._order[bisect_left(self._order, (place,))]
            self.num_pages -= place.num_pages

    def __iter__(self) -> Iterator[PageExtent]:
        """The members in order, which must not change meanwhile."""
        return (extent for _, extent in self._order)


@final
class ExtentStore:
    """The extents of one model on one device pool and one host pool.

    Args:
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots; 0 turns the host tier off.
        prefix_caching: keep full pages without references until their slots are needed.
        forget_checkpoints: called with the checkpoints of pages that are gone; None: there are none.
    """

    def __init__(
        self,
        num_device_pages: int,
        num_host_pages: int,
        page_size: int,
        prefix_caching: bool,
        forget_checkpoints: Callable[[Iterable[ContextCheckpoint]], None] | None = None,
    ) -> None:
        self.page_size, self.page_bytes = page_size, page_size * TOKEN_BYTES
        self._prefix_caching, self._forget_checkpoints = prefix_caching, forget_checkpoints
        self.device = SlotPool(num_device_pages, first=1)
        self.host = SlotPool(num_host_pages, notes_drops=True)
        # paused: on the device, of paused contexts only: the policy evicts them.
        # cached: on the device, of no context, as finished prefixes: evicted least recently used first.
        # reclaimable: with a host copy on which no paused context depends.
        self.paused, self.cached, self.reclaimable = ExtentQueue(), ExtentQueue(), ExtentQueue()
        self._queues = self.paused, self.cached, self.reclaimable
        self._moving: list[PageExtent] = []  # in flight
        self._changed: list[PageExtent] = []  # perhaps alike with a neighbour now
        self._uses = 0

    @property
    def num_host_free(self) -> int:
        """Number of host slots that are free or hold a reclaimable copy."""
        return self.host.num_free + self.reclaimable.num_pages

    def occupancy(self) -> Occupancy:
        free, paused, cached = self.device.num_free, self.paused.num_pages, self.cached.num_pages
        total, host = self.device.size, self.host.size - self.host.num_free
        return Occupancy(free, total - free - paused - cached, paused, cached, total, host, self.host.size)

    # -- a plan begins ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a plan: pages that the last one fetched are readable, pages that it offloaded can be fetched."""
        moving, changed = self._moving, self._changed
        self._moving, self._changed = [], []
        for extent in moving:
            arrived = extent.offloading
            extent.fetching = extent.offloading = False
            extent.fresh = NEVER
            extent.changed()
            if arrived and extent.num_pages:
                self._sort(extent)
        for extent in (*moving, *changed):
            self._join(extent)
        self.host.begin()
        self.device.begin()

    def _join(self, extent: PageExtent) -> None:
        if extent.parent is None or not extent.num_pages:
            return
        while (child := extent.joinable(self.page_size)) is not None:
            self._absorb(extent, child)
            extent = child
        while extent.parent is not None and extent.parent.joinable(self.page_size) is extent:
            self._absorb(extent.parent, extent)

    def _absorb(self, parent: PageExtent, child: PageExtent) -> None:
        for queue in self._queues:
            queue.discard(parent)
        parent.join(child, self.page_bytes)
        self.update(child)

    # -- the tree and its references ---------------------------------------------------------------------------------

    def next_use(self) -> int:
        """The number of a use, for `PageExtent.last_use`."""
        self._uses += 1
        return self._uses

    def part(self, extent: PageExtent, start: int, end: int) -> PageExtent:
        """The extent of the pages `start … end - 1` of an extent, which is cut as needed."""
        part = extent
        if end < extent.end:
            part = self._cut(extent, end)
        if start > part.start:
            self._cut(part, start)
        return part

    def _cut(self, extent: PageExtent, index: int) -> PageExtent:
        head = extent.cut(index - extent.start, self.page_size)
        if extent.in_flight:
            self._moving.append(head)
        self._changed.append(head)
        self._sort(head)
        self._sort(extent)
        return head

    def count(self, extent: PageExtent, refs: int = 0, evictable_refs: int = 0) -> None:
        """Add to an extent's references; one that has none left is cached or freed."""
        num_contexts, is_used = extent.num_contexts, extent.refs > 0
        extent.refs += refs
        extent.evictable_refs += evictable_refs
        if min(num_contexts, 2) != min(extent.num_contexts, 2) or is_used != (extent.refs > 0):
            extent.changed()
        self._sort(extent)

    def changed(self, extent: PageExtent) -> None:
        """Note that an extent may be alike with a neighbour now. The next plan joins them."""
        self._changed.append(extent)

    def freshen(self, extent: PageExtent, index: int) -> None:
        """Note that this plan's compute fills pages from `index` on. They can be offloaded from the next plan on."""
        extent.fresh = min(extent.fresh, index)
        self._moving.append(extent)

    # -- moving ----------------------------------------------------------------------------------------------------

    def take(self, most: int) -> Slots:
        """Take up to `most` device slots. If too few are free, finished prefixes lose theirs."""
        if self.device.num_free < most:
            self.evict(self.cached, most - self.device.num_free)
        return self.device.take(most)

    def place(self, extent: PageExtent, slots: Slots) -> None:
        """Give these device slots, which hold nothing yet, to an extent that is not on the device."""
        assert extent.device is None
        assert len(slots) == extent.num_pages
        extent.device, extent.filled = slots, 0
        self.update(extent, is_alike=True)

    def fetch(self, extent: PageExtent, slots: Slots) -> None:
        """Copy host pages to these device slots. The pages are readable from the next plan on."""
        assert extent.is_fetchable
        assert extent.host is not None
        self.place(extent, slots)
        extent.filled, extent.fetching = extent.host_filled, True
        self._moving.append(extent)

    def offloadable(self, extent: PageExtent) -> int:
        """Index behind the leading pages that can be copied to the host: dirty ones, which no plan in flight changes."""
        is_tail = extent.parent is None
        if (
            extent.residency is not Residency.DIRTY
            or extent.fetching
            or (extent.refs if is_tail else extent.filled < extent.num_pages * self.page_size)
        ):
            return extent.start
        return min(extent.end, max(extent.start, extent.fresh)) if extent.refs else extent.end

    def offload(self, extent: PageExtent) -> None:
        """Copy an extent to the host. Its pages can be copied, and as many host slots are free or reclaimable."""
        assert extent.device is not None
        assert self.offloadable(extent) == extent.end
        slots = self.take_host(extent.num_pages)
        extent.host, extent.host_filled, extent.offloading = slots, extent.filled, True
        self._moving.append(extent)
        self.update(extent)

    def take_host(self, most: int) -> Slots:
        """Take up to `most` host slots. If too few are free, reclaimable copies lose theirs."""
        while (lacking := most - self.host.num_free) > 0 and (spare := next(iter(self.reclaimable), None)) is not None:
            self.drop_host(self.part(spare, max(spare.start, spare.end - lacking), spare.end))
        return self.host.take(most)

    def adopt(self, extent: PageExtent, slots: Slots) -> None:
        """Give host copies that come from elsewhere to an extent that is missing."""
        assert extent.residency is Residency.MISSING
        extent.host, extent.host_filled = slots, extent.num_pages * self.page_size
        self.update(extent, is_alike=True)

    def drop_device(self, extent: PageExtent) -> int:
        """Free the device slots of an extent; returns their number. An extent that is used or being fetched keeps them."""
        if not extent.is_evictable:
            return 0
        assert extent.device is not None
        self.device.give(extent.device)
        extent.device, extent.filled = None, 0
        self.update(extent, is_alike=True)
        return extent.num_pages

    def recede(self, extent: PageExtent, index: int) -> bool:
        """Move the pages from `index` on to the extent behind, if that is alike without their device slots, which are freed."""
        # a context that is evicted from its end does mostly this; it saves cutting and joining
        if len(extent.children) != 1 or not extent.is_evictable or extent.in_flight:
            return False
        behind = next(iter(extent.children.values()))
        if (
            behind.device is not None
            or (behind.host is None) != (extent.host is None)
            or behind.in_flight
            or (behind.refs, behind.evictable_refs) != (extent.refs, extent.evictable_refs)
        ):
            return False
        extent.hand_over(behind, index - extent.start, self.page_size, self.device)
        self.update(extent)
        self.update(behind)
        return True

    def drop_host(self, extent: PageExtent) -> None:
        self._free_host(extent)
        self.update(extent, is_alike=True)

    def evict(self, queue: ExtentQueue, most: int) -> int:
        """Free up to `most` device slots of the first extents of a queue, last pages first; returns their number."""
        freed = 0
        while freed < most and (extent := next((first for first in queue if not first.fetching), None)) is not None:
            num_pages = min(extent.num_pages, most - freed)
            freed += num_pages
            self.drop_device(self.part(extent, extent.end - num_pages, extent.end))
        return freed

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def forget(self, top: PageExtent) -> None:
        """Take an extent and all behind it out of the tree: only the contexts that have them now have them later."""
        root = top.parent
        assert root is not None
        del root.children[top.key(self.page_bytes)]
        PageExtent(start=root.start, shareable=False).add_child(top, self.page_bytes)
        below = [top]
        while below:
            extent = below.pop()
            below += extent.children.values()
            extent.shareable = False
            self.update(extent)

    def clear(self) -> None:
        """Drop every finished prefix, on the device and on the host, since the weights changed or the arrays were lost."""
        for extent in [*self.cached, *self.reclaimable]:
            if not extent.num_contexts and extent.num_pages:
                self.drop_device(extent)
                if extent.host is not None:
                    self.drop_host(extent)

    def update(self, extent: PageExtent, *, is_alike: bool = False) -> None:
        """Update what depends on a changed extent. If it may be alike with a neighbour now, the next plan joins them."""
        if is_alike:
            self._changed.append(extent)
        extent.changed()
        self._sort(extent)

    def _sort(self, extent: PageExtent) -> None:
        if not extent.refs and not extent.evictable_refs and not self._is_cacheable(extent):
            self._free(extent)
        for queue, is_member in zip(self._queues, _memberships(extent), strict=True):
            if is_member or extent in queue.places:
                queue.sort(extent, is_member)

    def _is_cacheable(self, extent: PageExtent) -> bool:
        return (
            self._prefix_caching
            and extent.shareable
            and extent.parent is not None
            and (extent.host is not None or extent.filled == extent.num_pages * self.page_size > 0)
        )

    def _free(self, extent: PageExtent) -> None:
        if extent.device is not None:
            self.device.give(extent.device, late=extent.fetching)
            extent.device, extent.filled, extent.fetching = None, 0, False
        if extent.host is not None:
            self._free_host(extent)
        self._remove(extent)

    def _remove(self, extent: PageExtent) -> None:
        # An extent that others are behind stays, since these are found through it.
        while extent.parent is not None and extent.num_pages and not extent.children:
            parent = extent.parent
            del parent.children[extent.key(self.page_bytes)]
            extent.parent, extent.num_pages = None, 0
            if self._forget_checkpoints is not None:
                self._forget_checkpoints(extent.checkpoints.values())
            self._changed.append(parent)
            if parent.num_contexts or parent.residency is not Residency.MISSING:
                return
            extent = parent

    def _free_host(self, extent: PageExtent) -> None:
        assert extent.host is not None
        self.host.give(extent.host, late=extent.offloading)
        extent.host, extent.host_filled, extent.offloading = None, 0, False

    def check(self, refs: Mapping[PageExtent, int], evictable_refs: Mapping[PageExtent, int]) -> None:
        """Assert that counts, slots, queues and trees agree with the references of the contexts."""
        extents = {*refs, *evictable_refs, *(extent for queue in self._queues for extent in queue)}
        extents |= {extent for extent in self._moving if extent.parent is not None}
        roots = {_root(extent) for extent in extents if extent.parent is not None}
        below = list(roots)
        while below:
            extents |= set(children := below.pop().children.values())
            below += children
        for extent in extents:
            assert extent.refs == refs.get(extent, 0), f"references of {extent}: {refs.get(extent, 0)} contexts use it"
            assert extent.evictable_refs == evictable_refs.get(extent, 0), f"evictable references of {extent}"
            assert len(extent.contexts) in (extent.num_contexts, int(extent.parent is None)), f"contexts of {extent}"
            extent.check(self.page_size)
            are_members = tuple(extent in queue.places for queue in self._queues)
            assert are_members == _memberships(extent), f"queues of {extent}"
        for queue in self._queues:
            assert queue.num_pages == sum([extent.num_pages for extent in queue]), "pages of a queue"
        self.device.check(slot for extent in extents for slot in extent.device or ())
        self.host.check(slot for extent in extents for slot in extent.host or ())
        occupancy = self.occupancy()
        used = sum([extent.num_pages for extent in extents if extent.device is not None and extent.refs])
        assert occupancy.used == used + self.device.num_late
        assert sum(occupancy[:4]) == occupancy.total


def _memberships(extent: PageExtent) -> tuple[bool, bool, bool]:
    on_device = extent.device is not None and not extent.refs and extent.num_pages > 0
    is_paused = on_device and extent.evictable_refs > 0
    is_reclaimable = (
        extent.host is not None
        and not extent.offloading
        and (extent.device is not None if extent.refs else not extent.evictable_refs)
    )
    return is_paused, on_device and not is_paused, is_reclaimable  # see `ExtentStore`


def _root(extent: PageExtent) -> PageExtent:
    while extent.parent is not None:
        extent = extent.parent
    return extent
