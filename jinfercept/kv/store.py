"""The slots of every page, the lists of pages that may be evicted, and the copies in flight.

    ======  ================================  ========================
    kind    references to a page on a slot    eviction
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

from collections import OrderedDict
from collections.abc import Mapping
from typing import final

from jinfercept.kv.page import Occupancy, Page, PageCopy, Residency
from jinfercept.kv.pool import SlotPool


@final
class PageStore:
    """The pages of one model on one device pool and one host pool.

    Args:
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots; 0 turns the host tier off.
        page_size: tokens per page.
        prefix_caching: keep full pages without references until their slots are needed.

    Attributes:
        paused: pages on the device of paused contexts only, in the order of pausing.
        dropped: free host slots whose arrays the runner still has.
    """

    def __init__(self, num_device_pages: int, num_host_pages: int, page_size: int, prefix_caching: bool) -> None:
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._device = SlotPool(num_device_pages, first=1)
        self._host = SlotPool(num_host_pages)
        self._by_digest: dict[bytes, Page] = {}
        self.paused: OrderedDict[Page, None] = OrderedDict()
        self._paused_clean: set[Page] = set()  # those of them that are clean
        self._cached: OrderedDict[Page, None] = OrderedDict()  # on the device, of no context; least recently used first
        # with a host copy on which no paused context depends
        self._reclaimable: OrderedDict[Page, None] = OrderedDict()
        self._fetching: list[Page] = []
        self._filling: set[Page] = set()  # with references, and full only after this plan's compute
        self._offloading: dict[int, Page] = {}  # by host slot
        self.dropped: list[int] = []
        self._late_drops: list[int] = []  # host slots that this plan still fills: free from the next plan on
        self._late_slots: list[int] = []  # device slots, likewise

    # -- numbers of slots ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Free device slots."""
        return self._device.num_free

    @property
    def num_available(self) -> int:
        """Device slots that are free or hold a finished prefix, which `evict_cached` frees."""
        return self._device.num_free + len(self._cached)

    @property
    def num_host_free(self) -> int:
        """Host slots that are free or hold a reclaimable copy."""
        return self._host.num_free + len(self._reclaimable)

    def occupancy(self) -> Occupancy:
        """Both pools by kind."""
        free, paused, cached, total = self.num_free, len(self.paused), len(self._cached), self._device.size
        host = self._host.size - self._host.num_free
        used = total - free - paused - cached
        return Occupancy(free, used, paused, cached, total, len(self._paused_clean), host, self._host.size)

    # -- a plan begins ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a plan: pages that the last one fetched are readable, pages that it offloaded can be fetched."""
        for page in self._fetching:
            page.fetching = False
        self._fetching.clear()
        self._filling.clear()
        arrived = list(self._offloading.values())
        self._offloading.clear()
        for page in arrived:
            page.offloading = False
            self._update_lists(page)
        for slot in self._late_drops:
            self.dropped.append(slot)
            self._host.give(slot)
        self._late_drops.clear()
        for slot in self._late_slots:
            self._device.give(slot)
        self._late_slots.clear()

    # -- digests and references -----------------------------------------------------------------------------------

    def find(self, digest: bytes) -> Page | None:
        """The indexed page of this digest."""
        return self._by_digest.get(digest)

    def index(self, page: Page, digest: bytes) -> None:
        """Give a full page its digest, and index it unless another page has the same one."""
        page.digest = digest
        self._by_digest.setdefault(digest, page)

    def forget(self, page: Page) -> None:
        """Take the page's digest from it and from the index: it is of use only to the contexts that have it."""
        if page.digest is not None and self._by_digest.get(page.digest) is page:
            del self._by_digest[page.digest]
        page.digest = None

    def count(self, page: Page, refs: int = 0, evictable_refs: int = 0) -> None:
        """Add to the page's references; one that has none left is cached or freed."""
        page.refs += refs
        page.evictable_refs += evictable_refs
        self._update_lists(page)

    def place(self, page: Page) -> None:
        """Give a page with references a free device slot. There must be one."""
        assert page.refs
        assert page.device is None
        page.device, page.filled = self._device.take(), 0
        self._update_lists(page)

    def fill(self, page: Page) -> None:
        """Note that this plan's compute fills the page: it can be offloaded from the next plan on."""
        self._filling.add(page)

    # -- moving ----------------------------------------------------------------------------------------------------

    def fetch(self, page: Page) -> PageCopy:
        """Copy a host page to a free device slot. There must be one. The page is readable from the next plan on."""
        assert page.host is not None
        assert not page.offloading
        assert page.device is None
        page.device, page.filled, page.fetching = self._device.take(), page.host_filled, True
        self._fetching.append(page)
        self._update_lists(page)
        return PageCopy(page.device, page.host)

    def can_offload(self, page: Page) -> bool:
        """Whether the page can be copied to the host: it is dirty, and no plan in flight changes it."""
        changes = page.refs > 0 and (page.filled < self.page_size or page in self._filling)
        return not changes and not page.fetching and page.residency is Residency.DIRTY

    def offload(self, page: Page) -> PageCopy | None:
        """Copy a page to the host; None if it cannot be (`can_offload`), or no host slot is free or reclaimable."""
        if not self.can_offload(page) or not self.num_host_free:
            return None
        if not self._host.num_free:
            self.drop_host(next(iter(self._reclaimable)))
        assert page.device is not None
        page.host, page.host_filled, page.offloading = self._host.take(), page.filled, True
        self._offloading[page.host] = page
        self._update_lists(page)
        return PageCopy(page.device, page.host)

    def drop_device(self, page: Page) -> bool:
        """Free the device slot of a page; False if the page is used, being fetched, or not on the device."""
        if page.refs or page.fetching or page.device is None:
            return False
        self._device.give(page.device)
        page.device, page.filled = None, 0
        self._update_lists(page)
        return True

    def drop_host(self, page: Page) -> None:
        """Free the host copy of a page."""
        self._free_host(page)
        self._update_lists(page)

    def evict_cached(self) -> bool:
        """Free one device slot of the least recently used finished prefix; False if there is none."""
        if not self._cached:
            return False
        return self.drop_device(next(iter(self._cached)))

    def evict_paused(self) -> bool:
        """Free the device slot of the page that was paused first; False if no paused page can be evicted."""
        return any(self.drop_device(page) for page in list(self.paused))

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def check(self, refs: Mapping[Page, int], evictable_refs: Mapping[Page, int]) -> None:
        """Assert that counts, slots, lists and index agree with the references of the contexts."""
        pages = {*refs, *evictable_refs, *self._cached, *self._reclaimable, *self._by_digest.values()}
        for page in pages:
            assert page.host is None or page.device is None or page.host_filled == page.filled, f"stale copy: {page}"
            assert page.refs == refs.get(page, 0), f"references of {page}: {refs.get(page, 0)} contexts use it"
            assert page.evictable_refs == evictable_refs.get(page, 0), f"evictable references of {page}"
            assert page.refs + page.evictable_refs > 0 or page.digest, f"lost: {page}"
            assert (page.device is None) == (page.filled == 0) or page.refs, f"an empty slot: {page}"
            assert (page in self._cached) == (page.device is not None and not page.refs and not page.evictable_refs)
            assert (page in self.paused) == (page.device is not None and not page.refs and page.evictable_refs > 0)
            assert (page in self._paused_clean) == (page in self.paused and page.residency is Residency.CLEAN)
            assert (page in self._reclaimable) == self._is_reclaimable(page), f"reclaimable or not: {page}"
            indexed = page.digest is not None and self._by_digest.get(page.digest) is page
            assert not indexed or page.residency is not Residency.MISSING, f"indexed and missing: {page}"
        self._device.check([*(page.device for page in pages if page.device is not None), *self._late_slots])
        self._host.check([*(page.host for page in pages if page.host is not None), *self._late_drops])
        occupancy = self.occupancy()
        used = sum(page.device is not None and page.refs > 0 for page in pages)
        assert occupancy.used == used + len(self._late_slots)
        assert sum(occupancy[:4]) == occupancy.total

    def clear(self) -> None:
        """Drop every finished prefix, on the device and on the host, since the weights changed or the arrays were lost."""
        for page in [*self._cached, *self._reclaimable]:
            if not page.refs and not page.evictable_refs:
                self.drop_device(page)
                if page.host is not None:
                    self.drop_host(page)

    def _is_reclaimable(self, page: Page) -> bool:
        if page.host is None or page.offloading:
            return False
        return page.device is not None if page.refs else not page.evictable_refs

    def _is_cacheable(self, page: Page) -> bool:
        full = self.page_size in (page.filled, page.host_filled)
        return self._prefix_caching and full and page.digest is not None and self._by_digest.get(page.digest) is page

    def _update_lists(self, page: Page) -> None:
        """Update the lists after a change of the page, and free it if it has no reference and is not worth caching."""
        if page.digest is not None and page.residency is Residency.MISSING and self._by_digest.get(page.digest) is page:
            del self._by_digest[page.digest]
        if not page.refs and not page.evictable_refs and not self._is_cacheable(page):
            self._free(page)
        here = None
        if page.device is not None and not page.refs:
            here = self.paused if page.evictable_refs else self._cached
        for members in (self.paused, self._cached):
            if members is here:
                members.setdefault(page)
            else:
                members.pop(page, None)
        if here is self.paused and page.host is not None and page.host_filled == page.filled:
            self._paused_clean.add(page)
        else:
            self._paused_clean.discard(page)
        if self._is_reclaimable(page):
            self._reclaimable.setdefault(page)
        else:
            self._reclaimable.pop(page, None)

    def _free(self, page: Page) -> None:
        if page.device is not None:
            if page.fetching:
                page.fetching = False
                self._fetching.remove(page)
                self._late_slots.append(page.device)
            else:
                self._device.give(page.device)
            page.device, page.filled = None, 0
        if page.host is not None:
            self._free_host(page)
        if page.digest is not None and self._by_digest.get(page.digest) is page:
            del self._by_digest[page.digest]

    def _free_host(self, page: Page) -> None:
        """Free the host slot: at once, or after this plan if this plan fills it."""
        assert page.host is not None
        if page.offloading:
            page.offloading = False
            del self._offloading[page.host]
            self._late_drops.append(page.host)
        else:
            self.dropped.append(page.host)
            self._host.give(page.host)
        page.host, page.host_filled = None, 0
