"""Where every page is: its slots, the list that it is on, and the copies that are on their way. Knows pages, not contexts.

Device slots are free, used (a running context references the page), paused (only contexts that do not run have references on
it, evictable ones) or cached (a finished prefix, of no context). Used pages stay; paused and cached ones may be evicted at any
time. Host slots are free or hold a copy; a copy is spare when no paused context needs it.

All changes are made while a plan is built, between `begin` and the end of the plan; the runner executes a plan as
fetch, drop, offload, compute, scatter, which is what allows a device slot to be reused inside the plan that offloads it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, final

from jinfercept.kv.page import Page, Residency
from jinfercept.kv.pool import SlotPool


class PageCopy(NamedTuple):
    """One page on its way between the memories, in either direction."""

    device_slot: int
    host_slot: int


class Occupancy(NamedTuple):
    """Pages of the device pool by kind; they add up to `total`."""

    free: int
    used: int
    paused: int
    cached: int
    total: int


@final
class PageStore:
    """The pages of one model on one device pool and one host pool.

    Args:
        num_device_pages: usable device slots, numbered from 1 (0 is scratch).
        num_host_pages: host slots; 0 turns the host tier off.
        page_size: tokens per page.
        prefix_caching: keep full pages that nobody needs until their slots are wanted.
    """

    def __init__(self, num_device_pages: int, num_host_pages: int, page_size: int, prefix_caching: bool) -> None:
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._device = SlotPool(num_device_pages, first=1)
        self._host = SlotPool(num_host_pages)
        self._index: dict[bytes, Page] = {}
        self._paused: OrderedDict[Page, None] = OrderedDict()  # on the device, of paused contexts only
        self._paused_clean: set[Page] = set()  # those of them that are clean
        self._cached: OrderedDict[Page, None] = OrderedDict()  # on the device, of no context; least recently used first
        self._spare: OrderedDict[Page, None] = OrderedDict()  # host copies that no paused context counts on
        self._fetching: list[Page] = []
        self._filling: set[Page] = set()  # referenced, and full only after this plan's compute
        self._offloading: dict[int, Page] = {}  # by host slot
        self._dropped: list[int] = []
        self._late_drops: list[int] = []  # host and device slots that this plan still fills: free from the next one on
        self._late_slots: list[int] = []

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Free device slots."""
        return self._device.num_free

    @property
    def num_cached(self) -> int:
        """Device slots of finished prefixes: to be had with `evict_cached`."""
        return len(self._cached)

    @property
    def num_paused(self) -> int:
        """Device slots that only paused contexts count on: a policy decides which of them go."""
        return len(self._paused)

    @property
    def num_paused_clean(self) -> int:
        """Those of them that the host has a copy of."""
        return len(self._paused_clean)

    @property
    def num_host_free(self) -> int:
        """Host slots to be had without loss to a paused context."""
        return self._host.num_free + len(self._spare)

    @property
    def num_host_pages(self) -> int:
        return self._host.size

    def occupancy(self) -> Occupancy:
        """The device pool by kind."""
        free, paused, cached, total = self.num_free, len(self._paused), len(self._cached), self._device.size
        return Occupancy(free, total - free - paused - cached, paused, cached, total)

    @property
    def num_host_used(self) -> int:
        return self._host.size - self._host.num_free

    # -- a plan begins ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a plan: what the last one fetched can be read, what it copied out can be fetched."""
        for page in self._fetching:
            page.fetching = False
        self._fetching.clear()
        self._filling.clear()
        arrived = list(self._offloading.values())
        self._offloading.clear()
        for page in arrived:
            page.offloading = False
            self._file(page)
        for slot in self._late_drops:
            self._dropped.append(slot)
            self._host.give(slot)
        self._late_drops.clear()
        for slot in self._late_slots:
            self._device.give(slot)
        self._late_slots.clear()

    def drain_dropped(self) -> tuple[int, ...]:
        """Host slots freed since the last call: the runner forgets their arrays."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

    # -- names and users -------------------------------------------------------------------------------------------

    def find(self, digest: bytes) -> Page | None:
        """The page of this name."""
        return self._index.get(digest)

    def name(self, page: Page, digest: bytes) -> None:
        """Index a full page under the chain of its tokens, unless another one has that name."""
        page.digest = digest
        self._index.setdefault(digest, page)

    def count(self, page: Page, refs: int = 0, evictable_refs: int = 0) -> None:
        """Change who uses the page and who waits for it, and everything that follows from that."""
        page.refs += refs
        page.evictable_refs += evictable_refs
        self._file(page)

    def place(self, page: Page) -> None:
        """Put a free device slot under a page that is used; there must be one."""
        assert page.refs
        assert page.device is None
        page.device, page.filled = self._device.take(), 0
        self._file(page)

    def fills(self, page: Page) -> None:
        """This plan's compute makes the page full: it can be copied from the next plan on."""
        self._filling.add(page)

    # -- moving ----------------------------------------------------------------------------------------------------

    def fetch(self, page: Page) -> PageCopy:
        """Bring a host page to a free device slot (there must be one); readable from the next plan on."""
        assert page.host is not None
        assert not page.offloading
        host = page.host
        self.place(page)
        assert page.device is not None
        page.filled = page.host_filled
        page.fetching = True
        self._fetching.append(page)
        return PageCopy(page.device, host)

    def can_offload(self, page: Page) -> bool:
        """Whether a copy to the host would make sense: the page is dirty and will not change any more."""
        changes = page.refs > 0 and (page.filled < self.page_size or page in self._filling)
        return not changes and not page.fetching and page.residency is Residency.DIRTY

    def offload(self, page: Page) -> PageCopy | None:
        """Copy a page to the host; None if it may not be (`can_offload`), or no host slot is to be had without loss."""
        if not self.can_offload(page) or not self.num_host_free:
            return None
        if not self._host.num_free:
            self.drop_host(next(iter(self._spare)))
        assert page.device is not None
        page.host, page.host_filled, page.offloading = self._host.take(), page.filled, True
        self._offloading[page.host] = page
        self._file(page)
        return PageCopy(page.device, page.host)

    def drop_device(self, page: Page) -> bool:
        """Free the device slot of a page; False if it is in use, on its way in, or not there."""
        if page.refs or page.fetching or page.device is None:
            return False
        self._device.give(page.device)
        page.device, page.filled = None, 0
        self._file(page)
        return True

    def drop_host(self, page: Page) -> None:
        """Free the host copy of a page."""
        self._free_host(page)
        self._file(page)

    def evict_cached(self) -> bool:
        """Free one device slot of the least recently used finished prefix; False if there is none."""
        if not self._cached:
            return False
        return self.drop_device(next(iter(self._cached)))

    def evict_paused(self) -> bool:
        """Free the device slot of the page that has been paused for longest; False if there is none to be had."""
        return any(self.drop_device(page) for page in list(self._paused))

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def check(self, refs: Mapping[Page, int], evictable_refs: Mapping[Page, int]) -> None:
        """Assert that counts, slots, lists and index agree with how many contexts use a page and how many wait for it."""
        pages = {*refs, *evictable_refs, *self._cached, *self._spare, *self._index.values()}
        for page in pages:
            assert page.host is None or page.device is None or page.host_filled == page.filled, f"stale copy: {page}"
            assert page.refs == refs.get(page, 0), f"references of {page}: {refs.get(page, 0)} contexts use it"
            assert page.evictable_refs == evictable_refs.get(page, 0), f"evictable references of {page}"
            assert page.refs + page.evictable_refs > 0 or page.digest, f"nobody knows {page}"
            assert (page.device is None) == (page.filled == 0) or page.refs, f"an empty slot: {page}"
            assert (page in self._cached) == (page.device is not None and not page.refs and not page.evictable_refs)
            assert (page in self._paused) == (page.device is not None and not page.refs and page.evictable_refs > 0)
            assert (page in self._paused_clean) == (page in self._paused and page.residency is Residency.CLEAN)
            assert (page in self._spare) == self._is_spare(page), f"spare or not: {page}"
            indexed = page.digest is not None and self._index.get(page.digest) is page
            assert not indexed or page.residency is not Residency.MISSING, f"indexed and missing: {page}"
        self._device.check([*(page.device for page in pages if page.device is not None), *self._late_slots])
        self._host.check([*(page.host for page in pages if page.host is not None), *self._late_drops])
        occupancy = self.occupancy()
        used = sum(page.device is not None and page.refs > 0 for page in pages)
        assert occupancy.used == used + len(self._late_slots)
        assert sum(occupancy[:4]) == occupancy.total

    def clear(self) -> None:
        """Forget every finished prefix, on the device and on the host (the weights changed, or the arrays were lost)."""
        for page in [*self._cached, *self._spare]:
            if not page.refs and not page.evictable_refs:
                self.drop_device(page)
                if page.host is not None:
                    self.drop_host(page)

    def _is_spare(self, page: Page) -> bool:
        if page.host is None or page.offloading:
            return False
        return page.device is not None if page.refs else not page.evictable_refs

    def _worth_keeping(self, page: Page) -> bool:
        full = self.page_size in (page.filled, page.host_filled)
        return self._prefix_caching and full and page.digest is not None and self._index.get(page.digest) is page

    def _file(self, page: Page) -> None:
        """Put the page on the lists where it belongs now, or free it if nobody needs it."""
        if page.digest is not None and page.residency is Residency.MISSING and self._index.get(page.digest) is page:
            del self._index[page.digest]
        if not page.refs and not page.evictable_refs and not self._worth_keeping(page):
            self._forget(page)
        here = None
        if page.device is not None and not page.refs:
            here = self._paused if page.evictable_refs else self._cached
        for members in (self._paused, self._cached):
            if members is here:
                members.setdefault(page)
            else:
                members.pop(page, None)
        if here is self._paused and page.host is not None and page.host_filled == page.filled:
            self._paused_clean.add(page)
        else:
            self._paused_clean.discard(page)
        if self._is_spare(page):
            self._spare.setdefault(page)
        else:
            self._spare.pop(page, None)

    def _forget(self, page: Page) -> None:
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
        if page.digest is not None and self._index.get(page.digest) is page:
            del self._index[page.digest]

    def _free_host(self, page: Page) -> None:
        """Give the host slot back: at once, or after this plan if this plan fills it."""
        assert page.host is not None
        if page.offloading:
            page.offloading = False
            del self._offloading[page.host]
            self._late_drops.append(page.host)
        else:
            self._dropped.append(page.host)
            self._host.give(page.host)
        page.host, page.host_filled = None, 0
