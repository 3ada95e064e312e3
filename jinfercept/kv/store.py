"""The slots of every extent, the queues of extents that may be evicted, and the copies in flight.

    ======  ================================  ========================
    kind    references to pages on slots      eviction
    ======  ================================  ========================
    used    of running contexts               never
    paused  evictable ones only               by the policy
    cached  none: a finished prefix           least recently used first
    ======  ================================  ========================

A device slot that holds no page is free. A host slot is free or holds a copy, which is reclaimable while no paused context
depends on it.

All changes are made while a plan is built, between `begin` and the end of the plan; the runner executes a plan as
fetch, drop, offload, compute, scatter, which is what allows a device slot to be reused inside the plan that offloads it.
"""

from array import array
from collections.abc import Mapping
from typing import final

from jinfercept.kv.extent import NEVER, TOKEN_BYTES, PageExtent
from jinfercept.kv.page import Occupancy, Residency
from jinfercept.kv.pool import SlotPool, Slots
from jinfercept.kv.queue import ExtentQueue, ExtentQueues
from jinfercept.kv.side_pool import SidePool


@final
class ExtentStore:
    """The extents of one model on one device pool and one host pool.

    Args:
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots; 0 turns the host tier off.
        page_size: tokens per page.
        prefix_caching: keep full pages without references until their slots are needed.
        side_pool: loses the checkpoints of pages that are gone.

    Attributes:
        queues: the extents that may be evicted.
        dropped: free host slots whose arrays the runner still has.
    """

    def __init__(
        self, num_device_pages: int, num_host_pages: int, page_size: int, prefix_caching: bool, side_pool: SidePool
    ) -> None:
        self.page_size, self.page_bytes = page_size, page_size * TOKEN_BYTES
        self._prefix_caching, self._side_pool = prefix_caching, side_pool
        self._device = SlotPool(num_device_pages, first=1)
        self._host = SlotPool(num_host_pages)
        self.queues = ExtentQueues()
        self._moving: list[PageExtent] = []  # in flight
        self._changed: list[PageExtent] = []  # perhaps alike with a neighbour now
        self._uses = 0
        self.dropped: Slots = array("i")
        self._late_drops: Slots = array("i")  # host slots that this plan still fills: free from the next plan on
        self._late_slots: Slots = array("i")  # device slots, likewise

    # -- numbers of slots ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Free device slots."""
        return self._device.num_free

    @property
    def num_available(self) -> int:
        """Device slots that are free or hold a finished prefix, which `evict_cached` frees."""
        return self._device.num_free + self.queues.cached.num_pages

    @property
    def num_host_free(self) -> int:
        """Host slots that are free or hold a reclaimable copy."""
        return self._host.num_free + self.queues.reclaimable.num_pages

    @property
    def num_host(self) -> int:
        """Host slots."""
        return self._host.size

    def occupancy(self) -> Occupancy:
        """Both pools by kind."""
        free, paused, total = self._device.num_free, self.queues.paused.num_pages, self._device.size
        cached, paused_clean = self.queues.cached.num_pages, self.queues.paused_clean.num_pages
        host = self._host.size - self._host.num_free
        used = total - free - paused - cached
        return Occupancy(free, used, paused, cached, total, paused_clean, host, self._host.size)

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
        if self._late_drops:
            self.dropped.extend(self._late_drops)
            self._host.give(self._late_drops)
            self._late_drops = array("i")
        if self._late_slots:
            self._device.give(self._late_slots)
            self._late_slots = array("i")

    def _join(self, extent: PageExtent) -> None:
        """Join an extent with its neighbours in the tree, as far as they are alike."""
        if extent.parent is None or not extent.num_pages:
            return
        while (child := extent.joinable(self.page_size)) is not None:
            self._absorb(extent, child)
            extent = child
        while extent.parent is not None and extent.parent.joinable(self.page_size) is extent:
            self._absorb(extent.parent, extent)

    def _absorb(self, parent: PageExtent, child: PageExtent) -> None:
        self.queues.discard(parent)
        parent.join(child, self.page_bytes)
        self.update(child)

    # -- the tree and its references ---------------------------------------------------------------------------------

    def next_use(self) -> int:
        """The number of a use, for `PageExtent.last_use`."""
        self._uses += 1
        return self._uses

    def part(self, extent: PageExtent, start: int, end: int) -> PageExtent:
        """The extent of the pages `start … end - 1` of one, which is cut as needed."""
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
        """An extent may be alike with a neighbour now: the next plan joins them."""
        self._changed.append(extent)

    def freshen(self, extent: PageExtent, index: int) -> None:
        """Note that this plan's compute fills pages from `index` on: they can be offloaded from the next plan on."""
        extent.fresh = min(extent.fresh, index)
        self._moving.append(extent)

    # -- moving ----------------------------------------------------------------------------------------------------

    def take(self, most: int) -> Slots:
        """Take up to so many device slots; those of finished prefixes go where too few are free."""
        if self._device.num_free < most:
            self.evict_cached(most - self._device.num_free)
        return self._device.take(most)

    def give(self, slots: Slots) -> None:
        """Free device slots of pages that no extent has any more."""
        self._device.give(slots)

    def place(self, extent: PageExtent, slots: Slots) -> None:
        """Give an extent that is not on the device these slots, which hold nothing yet."""
        assert extent.device is None
        assert len(slots) == extent.num_pages
        extent.device, extent.filled = slots, 0
        self.changed(extent)
        self.update(extent)

    def fetch(self, extent: PageExtent, slots: Slots) -> None:
        """Copy host pages to these device slots. The pages are readable from the next plan on."""
        assert extent.is_fetchable
        assert extent.host is not None
        self.place(extent, slots)
        extent.filled, extent.fetching = extent.host_filled, True
        self._moving.append(extent)

    def offloadable(self, extent: PageExtent) -> int:
        """The index behind the leading pages that can be copied to the host: dirty ones, which no plan in flight changes."""
        is_tail = extent.parent is None
        if (
            extent.residency is not Residency.DIRTY
            or extent.fetching
            or (extent.refs if is_tail else extent.filled < extent.num_pages * self.page_size)
        ):
            return extent.start
        return min(extent.end, max(extent.start, extent.fresh)) if extent.refs else extent.end

    def offload(self, extent: PageExtent) -> None:
        """Copy pages to the host that can be copied; as many host slots are free or reclaimable."""
        assert extent.device is not None
        assert self.offloadable(extent) == extent.end
        slots = self.take_host(extent.num_pages)
        extent.host, extent.host_filled, extent.offloading = slots, extent.filled, True
        self._moving.append(extent)
        self.update(extent)

    def take_host(self, most: int) -> Slots:
        """Take up to so many host slots; those of reclaimable copies go where too few are free."""
        while (lacking := most - self._host.num_free) > 0 and (spare := self.queues.reclaimable.first()) is not None:
            self.drop_host(self.part(spare, max(spare.start, spare.end - lacking), spare.end))
        return self._host.take(most)

    def adopt(self, extent: PageExtent, slots: Slots) -> None:
        """Give an extent that is nowhere host copies that come from elsewhere."""
        assert extent.residency is Residency.MISSING
        extent.host, extent.host_filled = slots, extent.num_pages * self.page_size
        self.changed(extent)
        self.update(extent)

    def drop_device(self, extent: PageExtent) -> int:
        """Free the device slots of an extent; none if it is used, being fetched, or not on the device."""
        if not extent.is_evictable:
            return 0
        assert extent.device is not None
        self._device.give(extent.device)
        extent.device, extent.filled = None, 0
        self.changed(extent)
        self.update(extent)
        return extent.num_pages

    def recede(self, extent: PageExtent, index: int) -> bool:
        """Free the device slots of the pages from `index` on, which go to the extent behind, if that is alike without them.

        This is what a context that is evicted from its end does most; it saves cutting and joining.
        """
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
        extent.hand_over(behind, index - extent.start, self.page_size, self._device)
        self.update(extent)
        self.update(behind)
        return True

    def drop_host(self, extent: PageExtent) -> None:
        """Free the host copies of an extent."""
        self._free_host(extent)
        self.changed(extent)
        self.update(extent)

    def evict_cached(self, most: int) -> int:
        """Free up to `most` device slots of the least recently used finished prefixes, last pages first; returns how many."""
        return self._evict(self.queues.cached, most)

    def evict_paused(self, most: int) -> int:
        """Free up to `most` device slots of the extents that were paused first; returns how many."""
        return self._evict(self.queues.paused, most)

    def _evict(self, queue: ExtentQueue, most: int) -> int:
        freed = 0
        while freed < most:
            extent = next((extent for extent in queue if not extent.fetching), None)
            if extent is None:
                break
            num_pages = min(extent.num_pages, most - freed)
            freed += num_pages
            self.drop_device(self.part(extent, extent.end - num_pages, extent.end))
        return freed

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def forget(self, top: PageExtent) -> None:
        """Take an extent and all behind it out of the tree: only the contexts that have them have them from now on."""
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
        for extent in [*self.queues.cached, *self.queues.reclaimable]:
            if not extent.num_contexts and extent.num_pages:
                self.drop_device(extent)
                if extent.host is not None:
                    self.drop_host(extent)

    def update(self, extent: PageExtent) -> None:
        """Update what depends on an extent that has changed."""
        extent.changed()
        self._sort(extent)

    def _sort(self, extent: PageExtent) -> None:
        """Update the queues after a change of the extent, and free it if it has no reference and is not worth caching."""
        if not extent.refs and not extent.evictable_refs and not self._is_cacheable(extent):
            self._free(extent)
        self.queues.sort(extent)

    def _is_cacheable(self, extent: PageExtent) -> bool:
        return (
            self._prefix_caching
            and extent.shareable
            and extent.parent is not None
            and (extent.host is not None or extent.filled == extent.num_pages * self.page_size > 0)
        )

    def _free(self, extent: PageExtent) -> None:
        if extent.device is not None:
            if extent.fetching:
                extent.fetching = False
                self._late_slots.extend(extent.device)
            else:
                self._device.give(extent.device)
            extent.device, extent.filled = None, 0
        if extent.host is not None:
            self._free_host(extent)
        self._remove(extent)

    def _remove(self, extent: PageExtent) -> None:
        """Take an extent without references and KV out of the tree, and its parents that are like it; not while others are
        behind it, which are found through it."""
        while extent.parent is not None and extent.num_pages and not extent.children:
            parent = extent.parent
            del parent.children[extent.key(self.page_bytes)]
            extent.parent, extent.num_pages = None, 0
            if extent.checkpoints:
                self._side_pool.checkpoints.forget(extent.checkpoints.values())
            self._changed.append(parent)
            if parent.num_contexts or parent.residency is not Residency.MISSING:
                return
            extent = parent

    def _free_host(self, extent: PageExtent) -> None:
        """Free the host slots: at once, or after this plan if this plan fills them."""
        assert extent.host is not None
        if extent.offloading:
            extent.offloading = False
            self._late_drops.extend(extent.host)
        else:
            self.dropped.extend(extent.host)
            self._host.give(extent.host)
        extent.host, extent.host_filled = None, 0

    def check(self, refs: Mapping[PageExtent, int], evictable_refs: Mapping[PageExtent, int]) -> None:
        """Assert that counts, slots, queues and trees agree with the references of the contexts."""
        extents = {*refs, *evictable_refs, *self.queues}
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
        self.queues.check(extents)
        self._device.check([*(slot for extent in extents for slot in extent.device or ()), *self._late_slots])
        self._host.check([*(slot for extent in extents for slot in extent.host or ()), *self._late_drops])
        occupancy = self.occupancy()
        used = sum([extent.num_pages for extent in extents if extent.device is not None and extent.refs])
        assert occupancy.used == used + len(self._late_slots)
        assert sum(occupancy[:4]) == occupancy.total


def _root(extent: PageExtent) -> PageExtent:
    while extent.parent is not None:
        extent = extent.parent
    return extent
